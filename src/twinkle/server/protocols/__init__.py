"""The HTTP routes, one room for each protocol. A handler reads a request, asks the gateway, and writes the answer.

May import: http, gateway and the rooms below them.
"""
