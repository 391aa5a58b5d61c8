"""The routes of Tinker's protocol. A handler calls the gateway, which makes the decisions, and writes the answer.

May import: http, gateway and the rooms below, and each other.
"""
