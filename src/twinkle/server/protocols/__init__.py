"""The HTTP routes, one package for each protocol. A handler reads a request, calls the gateway, and writes the answer.

May import: http, gateway and the rooms below them.
"""
