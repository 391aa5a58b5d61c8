"""The tables, the two databases they can be in (SQLite and PostgreSQL), records as rows, and the journal beside them.

It imports ``integrity/`` for the checksum of every row and of SQLite's schema, and nothing of ``records/``.
"""
