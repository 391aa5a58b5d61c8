"""The routes of the native protocol, which carries the library's verbs.

May import: http, gateway and the rooms below, and the helpers that the other protocols share.
"""
