"""The interface to one kind of database: everything in which SQLite and PostgreSQL differ."""

from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol

from sqlalchemy import Connection, Engine, PoolProxiedConnection


class Role(Enum):
    """Why a process opens the state, which decides the locks it takes and whether it may migrate and write ops."""

    SERVER = "server"  # a server with one process
    MEMBER = "member"  # one of several processes of a server
    TOOL = "tool"  # a command-line tool, with or without a running server


class Driver(Protocol):
    """Opens connections to one database, and runs the statements that depend on its kind.

    Methods may block. ``cursor`` is a cursor of the database driver (``sqlite3`` or ``psycopg``).
    """

    @property
    def engine(self) -> Engine: ...

    def connect(self) -> AbstractContextManager[Connection]:
        """Return a connection of SQLAlchemy, for migrations and checks at the start."""

    def begin_migration(self, connection: Connection) -> None:
        """Begin a transaction during which no other connection can write."""

    def finish_migration(self, connection: Connection) -> None:
        """Create what this kind of database needs besides the tables, and commit."""

    def fail_damaged_rows(self) -> None:
        """Compare rows with their checksums and report damaged ones; fail a live run if its own row, its snapshot's row
        or the row of one of its ops is damaged.

        SQLite does nothing here: its file is examined before it is opened.
        """

    def connect_reader(self) -> PoolProxiedConnection: ...

    def connect_writer(self) -> PoolProxiedConnection: ...

    def begin(self, cursor: Any) -> None:
        """Begin a transaction of the writer. Other writers, in this process or another, wait until it ends."""

    def commit(self, cursor: Any) -> None: ...

    def is_committed(self, cursor: Any) -> bool:
        """Return whether the writer's last transaction, which lost its connection, was committed.

        ``cursor`` belongs to a new connection.
        """

    def is_lost(self, connection: PoolProxiedConnection) -> bool:
        """Return whether a connection is broken and must be opened again."""

    def typed(self, error: Exception) -> Exception:
        """Return the error of ``state.errors`` that corresponds to a driver's error, or else the same error."""

    def maintain(self, cursor: Any) -> None:
        """Do periodic maintenance. Called in a reader's thread, after every few hundred writes."""

    def leave(self, cursor: Any) -> None:
        """Remove what the writer has registered in the database, when the store is closed."""
