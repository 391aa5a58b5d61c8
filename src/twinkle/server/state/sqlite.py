"""Everything that is true of SQLite only."""

import os
import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, make_url

from twinkle.errors import UnsupportedError

__all__ = ["BEGIN_WRITE", "checkpoint", "database_url", "is_disk_full", "open_engine"]

# The default BEGIN takes the write lock at the first write, and fails there when another process wrote in between.
BEGIN_WRITE = "BEGIN IMMEDIATE"

_PRAGMAS = (
    "PRAGMA journal_mode=WAL",  # readers and the writer do not wait for each other
    "PRAGMA synchronous=NORMAL",  # no fsync a commit: what is committed survives our death, not a power failure
    "PRAGMA busy_timeout=10000",  # ms: a command-line tool may be writing
    "PRAGMA foreign_keys=ON",
    "PRAGMA wal_autocheckpoint=16384",  # pages of 4 KiB: a limit that checkpoint() keeps commits away from
)


def database_url(data_dir: Path, url: str | None) -> URL:
    """``url``, or the default file in ``data_dir``."""
    if url is None:
        return URL.create("sqlite", database=str(data_dir / "state.db"))
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        raise UnsupportedError(f"database url: got {parsed!r}, allowed: sqlite:///path/to/file; others are to come")
    if parsed.database in (None, "", ":memory:"):
        raise UnsupportedError(f"database url: got {parsed!r}, allowed: sqlite:///path/to/file (state must outlive us)")
    return parsed.set(drivername="sqlite")


def open_engine(url: URL) -> Engine:
    """Connections that leave transactions to us and may move between threads (one at a time)."""
    assert url.database is not None
    # Created here for its mode, which SQLite gives to the WAL beside it too.
    os.close(os.open(url.database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    engine = create_engine(url, connect_args={"check_same_thread": False})
    event.listen(engine, "connect", _configure)
    return engine


def checkpoint(driver_cursor: Any) -> None:
    """Copy what the WAL holds into the database, which takes some fsyncs, without getting in the writer's way."""
    driver_cursor.execute("PRAGMA wal_checkpoint(PASSIVE)")
    driver_cursor.fetchall()


def is_disk_full(error: BaseException) -> bool:
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def _configure(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the module would begin transactions of its own
    for pragma in _PRAGMAS:
        connection.execute(pragma)
