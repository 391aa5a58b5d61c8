"""The tables, the drivers of SQLite and PostgreSQL, the mapping of records to rows, and the journal.

This package imports ``integrity/``, for the checksums of rows and of SQLite's schema, but never ``records/``.
"""
