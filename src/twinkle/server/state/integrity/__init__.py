"""Detection and repair of damage on disk: checksums of rows, SQLite's structure and WAL, copies, repair of rows.

``examination.py`` is what a server runs before it opens a SQLite database; the other modules are its parts. Of these,
``row_checksums.py`` also computes the checksums when rows are written, on PostgreSQL too.
"""
