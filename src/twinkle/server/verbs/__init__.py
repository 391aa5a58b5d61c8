"""The native protocol below HTTP: the library's verbs as ops on adapters of a server.

What is different about its runs is in ``runs.py``, which is registered with the services; these know nothing of it.
May import: services, telemetry, wire, state and the rooms below them.
"""
