"""Finding damage on disk and putting it right: checksums of rows, SQLite's structure and WAL, copies, repair.

``examination.py`` is what a server runs before it opens a database; the rest are its parts.
"""
