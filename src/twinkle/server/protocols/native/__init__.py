"""The routes of our own protocol, which carries the library's verbs.

May import: http, gateway and the rooms below; of the other protocols what they share.
"""
