"""What differs between databases, for the code that works with any of them."""

from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol

from sqlalchemy import Connection, Engine, PoolProxiedConnection


class Part(Enum):
    """What a process is to the state that it opens."""

    SERVER = "server"  # the only one that serves from it
    MEMBER = "member"  # one of several that serve from it together
    TOOL = "tool"  # beside a server, or without one


class Driver(Protocol):
    """Connections to one database, and what is said on them. All methods block; ``cursor`` is the driver's own."""

    @property
    def engine(self) -> Engine: ...

    def connect(self) -> AbstractContextManager[Connection]:
        """Return SQLAlchemy's connection, for migrations."""

    def begin_migration(self, connection: Connection) -> None:
        """Begin a transaction in which nobody else can write."""

    def finish_migration(self, connection: Connection) -> None:
        """Make what this database needs beside the tables, and commit."""

    def fail_damaged_rows(self) -> None:
        """Compare every row with its checksum where nobody has done so before the database was opened."""

    def connect_reader(self) -> PoolProxiedConnection: ...

    def connect_writer(self) -> PoolProxiedConnection: ...

    def begin(self, cursor: Any) -> None:
        """Begin a transaction of the writer. Others that write, in this process or elsewhere, wait for its end."""

    def commit(self, cursor: Any) -> None: ...

    def is_committed(self, cursor: Any) -> bool:
        """Return whether the last transaction, whose connection was lost, took place. ``cursor`` is of a new one."""

    def is_lost(self, connection: PoolProxiedConnection) -> bool:
        """Return whether a connection is of no use any more."""

    def typed(self, error: Exception) -> Exception:
        """Return one of our errors where we have a type for what the driver's says; otherwise the same error."""

    def maintain(self, cursor: Any) -> None:
        """Do what is to be done now and then, in a reader's thread."""

    def leave(self, cursor: Any) -> None:
        """Tell the database that the writer ends."""
