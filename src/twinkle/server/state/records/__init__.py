"""The areas of the state: sessions, runs, ops, checkpoints and so on. Each is a class with methods of its own.

``area.py`` has the code that all areas share. A new kind of record needs a dataclass, a table in
``database/tables.py`` with its migration, and an area here, which ``store.py`` creates. Areas import ``database/`` and
each other, never ``store.py``.
"""
