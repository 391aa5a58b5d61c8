"""The data directory: paths, atomic writing of directories, file checksums, the lock, the reserve, and export.

From ``state/`` this package imports only ``errors.py``.
"""
