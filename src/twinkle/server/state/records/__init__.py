"""The areas of the state: sessions, runs, ops, checkpoints and so on, each a class with methods of its own.

``area.py`` has what they share. A new kind of record is a dataclass, a table in ``database/tables.py`` with its
migration, and an area here that ``store.py`` makes. Areas import ``database/`` and each other, never ``store.py``.
"""
