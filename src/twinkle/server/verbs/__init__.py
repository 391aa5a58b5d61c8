"""The native protocol below HTTP: the library's verbs as ops on adapters of a server.

``runs.py`` holds what is different about native runs. ``runtime/assembly.py`` registers it with the services, which
know nothing else of this protocol.
May import: services, telemetry, wire, state and the rooms below them.
"""
