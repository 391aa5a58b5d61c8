"""The HTTP routes: a package for each protocol, and one for operators.

A handler reads a request, calls the gateway, and writes the answer.

May import: http, gateway and the rooms below them.
"""
