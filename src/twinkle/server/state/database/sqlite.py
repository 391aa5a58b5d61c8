"""The driver of SQLite."""

import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, PoolProxiedConnection, SelectBase, create_engine, event
from sqlalchemy.dialects.sqlite import dialect as sqlite_dialect

from twinkle.errors import UnsupportedError
from twinkle.server.state.errors import StorageFullError
from twinkle.server.state.integrity.row_checksums import SQL_FUNCTION, checksum_function
from twinkle.server.state.integrity.sqlite_check import set_schema_sum

# Takes the write lock at once. A plain BEGIN takes it at the first write, and fails there if another process wrote
# in between.
_BEGIN_WRITE = "BEGIN IMMEDIATE"

_PRAGMAS = (
    "PRAGMA journal_mode=WAL",  # readers and the writer do not wait for each other
    "PRAGMA synchronous=NORMAL",  # no fsync per commit: commits survive the death of the process, not a power failure
    "PRAGMA busy_timeout=10000",  # ms: a command-line tool may be writing
    "PRAGMA foreign_keys=ON",
    "PRAGMA wal_autocheckpoint=16384",  # pages of 4 KiB: checkpoint() runs long before a commit reaches this limit
)


def default_url(data_dir: Path) -> URL:
    return URL.create("sqlite", database=str(data_dir / "state.db"))


class SqliteDriver:
    """The driver of one SQLite file. Its connections are never reported as lost.

    ``after_maintenance`` is called in a reader's thread after each :meth:`maintain`.
    """

    def __init__(self, url: URL) -> None:
        self.after_maintenance: Callable[[], None] = lambda: None
        if url.database in (None, "", ":memory:"):
            raise UnsupportedError(
                f"database url: got {url!r}, allowed: sqlite:///path/to/file (the state must survive the process)"
            )
        self.engine: Engine = _open_engine(url.set(drivername="sqlite"))

    def connect(self) -> Connection:
        return self.engine.connect()

    def begin_migration(self, connection: Connection) -> None:
        connection.exec_driver_sql(_BEGIN_WRITE)

    def finish_migration(self, connection: Connection) -> None:
        set_schema_sum(connection.connection.driver_connection)
        connection.commit()

    def fail_damaged_rows(self) -> None:
        """Do nothing: ``state.integrity.examination`` checks the file before it is opened."""

    def connect_reader(self) -> PoolProxiedConnection:
        return self.engine.raw_connection()

    def connect_writer(self) -> PoolProxiedConnection:
        return self.engine.raw_connection()

    def begin(self, cursor: Any) -> None:
        cursor.execute(_BEGIN_WRITE)

    def commit(self, cursor: Any) -> None:
        cursor.connection.commit()

    def is_committed(self, cursor: Any) -> bool:
        raise AssertionError("no connection to SQLite was ever lost")

    def is_lost(self, connection: PoolProxiedConnection) -> bool:
        del connection
        return False

    def typed(self, error: Exception) -> Exception:
        if not isinstance(error, sqlite3.Error) or getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_FULL:
            return error
        return StorageFullError(errno.ENOSPC, f"the database's disk is full: {error}")

    def maintain(self, cursor: Any) -> None:
        checkpoint(cursor)
        self.after_maintenance()

    def leave(self, cursor: Any) -> None:
        pass


def as_sql(statement: SelectBase) -> str:
    """Return a query as SQL text with its constants inlined, for a plain ``sqlite3`` connection."""
    return str(statement.compile(dialect=sqlite_dialect(), compile_kwargs={"literal_binds": True}))


def checkpoint(cursor: Any) -> None:
    """Copy the WAL into the database file, as far as possible without waiting for readers or for the writer."""
    cursor.execute("PRAGMA wal_checkpoint(PASSIVE)")
    cursor.fetchall()


def _open_engine(url: URL) -> Engine:
    """Return an engine whose connections begin no transaction by themselves and may move between threads."""
    assert url.database is not None
    # The file is created here to set its mode; SQLite gives the same mode to the WAL.
    os.close(os.open(url.database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    engine = create_engine(url, connect_args={"check_same_thread": False})
    event.listen(engine, "connect", _configure)
    return engine


def _configure(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # otherwise the sqlite3 module begins transactions by itself
    for pragma in _PRAGMAS:
        connection.execute(pragma)
    connection.create_function(SQL_FUNCTION, -1, checksum_function, deterministic=True)
