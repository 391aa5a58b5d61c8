"""What the server must still know after it was killed: a database for records, a journal for bytes, and files.

``records/`` has the areas of the state, ``database/`` the tables, the two databases they can be in, and the journal,
``files/`` the data directory, ``integrity/`` what finds damage and puts it right. Nothing here knows a protocol.
"""
