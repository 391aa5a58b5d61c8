"""The native protocol below HTTP: the library's verbs as ops on adapters of a server.

May import: telemetry, wire, state and the rooms below them.
"""
