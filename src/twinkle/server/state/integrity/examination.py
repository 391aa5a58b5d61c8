"""The checks before a server opens a SQLite database, and the copy of the database that the server maintains.

Damaged rows are repaired, or affect only their owners (``row_repair``). All tenants depend on the structure of the file
and on its WAL: damage there is repaired if nothing is lost by that. Otherwise the server refuses to start, because it
would have forgotten requests that it had accepted. One loss is accepted and logged: the last commits in the WAL if the
machine itself went down.
"""

import logging
import sqlite3
import time
from contextlib import closing, nullcontext, suppress
from pathlib import Path

from twinkle.server.state.errors import DamagedStateError, DataDirInUseError
from twinkle.server.state.files.guards import DirectoryLock
from twinkle.server.state.integrity.copies import (
    copied_database,
    copy_database,
    is_database_of,
    is_same_boot,
    note_opening,
)
from twinkle.server.state.integrity.row_repair import put_right
from twinkle.server.state.integrity.sqlite_check import check_structure, connect, is_whole
from twinkle.server.state.integrity.wal_check import check_wal, set_aside

_ABOUT_THE_DISK = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_BUSY")
_COPY_SECONDS = 600.0  # the copy is renewed when it is older than this
# Files of a data directory that a server has used.
_TRACES = ("secret", "copies/state.db", "journal/*/*.journal", "snapshots/*", "checkpoints/*", "samplers/*")

_logger = logging.getLogger(__name__)


def is_in_use(data_dir: Path) -> bool:
    """Return whether the directory holds files of a server, which need not be running."""
    return any(next(data_dir.glob(pattern), None) is not None for pattern in _TRACES)


def check_before_opening(database: Path, data_dir: Path, *, has_lock: bool) -> None:
    """Raise DamagedStateError if the file was lost, or if SQLite would ignore a needed part of its WAL.

    The file was lost if it is missing or empty, though the directory holds the files of a server that used it. If the
    machine was rebooted since a server last started, a damaged WAL is only logged. One that is not needed is moved
    away. ``has_lock``: the caller holds the exclusive lock of the directory. Without it, damage of the WAL counts only
    if the lock is free: the WAL of a running server changes all the time.
    """
    if not database.exists() or database.stat().st_size == 0:
        is_known = database.absolute() == (data_dir / "state.db").absolute() or is_database_of(data_dir, database)
        if is_known and is_in_use(data_dir):
            what = "is empty" if database.exists() else "is missing"
            raise DamagedStateError(database, f"{what}, though {data_dir} holds the files of a server", data_dir)
        return
    if check_wal(database) is None:
        return
    with suppress(DataDirInUseError), nullcontext() if has_lock else DirectoryLock(data_dir):
        damage = check_wal(database)  # again, now that no server writes
        if damage is None:
            return
        if not damage.is_needed:
            aside = set_aside(database)
            _logger.error("%s %s; all of them are in %s too: moved to %s", damage.file, damage, database, aside)
        elif not is_same_boot(data_dir):
            _logger.error("%s %s. The machine went down since: its last commits may be lost", damage.file, damage)
        else:
            raise DamagedStateError(damage.file, str(damage), data_dir)


def examine(database: Path, data_dir: Path) -> None:
    """Check every page and every row; repair what can be repaired, otherwise raise DamagedStateError.

    The caller must hold the exclusive lock of the data directory. A file that is missing or empty, and rows of tables
    without checksums (those of an earlier version), are not checked. If the disk is full or cannot be read, the error
    of sqlite3 is raised.
    """
    if database.exists() and database.stat().st_size > 0:
        done = "Nothing was changed"
        try:
            with closing(connect(database, read_only=True)) as connection:
                structure = check_structure(connection)
                if structure.broken is not None:
                    raise DamagedStateError(database, f"is damaged: {structure.broken}", data_dir)
                whole = is_whole(connection, structure)
            if not whole:
                done = "A repair was begun and not finished"
                with closing(connect(database)) as connection:
                    _put_right(connection, database, data_dir)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if isinstance(error, sqlite3.OperationalError) and _is_about_the_disk(error):
                raise
            raise DamagedStateError(database, f"is damaged: {error}", data_dir, done) from error
    note_opening(data_dir, database)


def _put_right(connection: sqlite3.Connection, database: Path, data_dir: Path) -> None:
    """Repair rows and rebuild indexes; DamagedStateError if the structure is still damaged afterwards."""
    rows = put_right(connection, data_dir)
    connection.execute("REINDEX")
    again = check_structure(connection)
    if again.broken is not None or again.indexes:
        done = f"{rows} damaged rows were repaired or removed and the indexes rebuilt, which did not mend it"
        raise DamagedStateError(database, f"is damaged: {again.broken or 'an index'}", data_dir, done)
    what = f"{rows} damaged rows repaired or removed" if rows else "damaged indexes were rebuilt, nothing is lost"
    _logger.error("%s: %s", database, what)


def _is_about_the_disk(error: sqlite3.OperationalError) -> bool:
    return str(getattr(error, "sqlite_errorname", "")).startswith(_ABOUT_THE_DISK)


class DatabaseCopies:
    """Maintains the copy, in ``copies/``, of a database that is in use. All methods block."""

    def __init__(self, database: Path, data_dir: Path) -> None:
        self._database = database
        self._data_dir = data_dir
        self._made_at = 0.0

    def make(self) -> None:
        """Copy the database. A failure is logged, and the previous copy stays."""
        self._made_at = time.monotonic()
        try:
            copy_database(self._database, self._data_dir)
        except (OSError, sqlite3.Error) as error:  # most likely a full disk
            _logger.warning("no copy of %s could be made: %s", self._database, error)

    def make_if_old(self) -> None:
        """Copy the database if this process last did so more than ten minutes ago."""
        if time.monotonic() - self._made_at > _COPY_SECONDS:
            self.make()

    def make_if_changed(self) -> None:
        """Copy a database that was closed, if it has changed since the last copy."""
        copy = copied_database(self._data_dir)
        if not copy.exists() or copy.stat().st_mtime <= self._database.stat().st_mtime:
            self.make()
