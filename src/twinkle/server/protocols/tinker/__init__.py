"""The routes of Tinker's protocol. A handler asks the gateway and writes the answer; it decides nothing.

May import: http, gateway and the rooms below, and each other.
"""
