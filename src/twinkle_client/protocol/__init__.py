"""The native protocol: bodies of requests and answers, headers, error codes, and the table of verbs.

It ships with the client, and the server imports it. It needs pydantic and imports no other module of the client.
"""
