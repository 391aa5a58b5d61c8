"""What client and server of the native protocol agree on: bodies, answers, headers, codes, and the table of verbs.

It ships with the client, and the server imports it. It needs pydantic, and imports nothing else of the client.
"""
