"""Files of the data directory: where they lie, how they are written whole, their checksums, lock, reserve and export.

It imports no other folder of ``state/``, only ``errors.py``.
"""
