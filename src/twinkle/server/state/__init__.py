"""The server's durable state, which survives a kill: a database for records, a journal for bytes, and files.

``records/`` has the areas of the state (sessions, runs, ops, …). ``database/`` has the tables, the drivers of the two
databases that can hold them, and the journal. ``files/`` has the data directory, ``integrity/`` the code that finds and
repairs damage. No module here imports one of the protocols.
"""

from twinkle.compatibility import find_name


def __getattr__(name: str) -> object:
    return find_name(__name__, name)
