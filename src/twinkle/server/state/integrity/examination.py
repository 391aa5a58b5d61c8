"""What is looked at before a server opens a SQLite database, and the copy that it keeps of one.

Damage in rows is put right or costs their owners (row_repair). Damage in what all tenants depend on, the structure of
the file and its WAL, is put right where nothing is lost by that; otherwise the start is refused: a server that went on
would answer clients as if what they were promised had never been.
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
_COPY_SECONDS = 600.0  # how old the copy of a database that changes may become
# Any of these says that a server has worked here.
_TRACES = ("secret", "copies/state.db", "journal/*/*.journal", "snapshots/*", "checkpoints/*", "samplers/*")

_logger = logging.getLogger(__name__)


def is_in_use(data_dir: Path) -> bool:
    """Return whether anything in the directory says that a server has worked there."""
    return any(next(data_dir.glob(pattern), None) is not None for pattern in _TRACES)


def check_before_opening(database: Path, data_dir: Path, *, has_lock: bool) -> None:
    """Raise DamagedStateError if the file is gone, or if SQLite would ignore a part of its WAL.

    Without the lock, of a tool: a server that runs has its WAL under control, and is left alone.
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
        damage = check_wal(database)  # nobody writes now
        if damage is None:
            return
        if not damage.is_needed:
            aside = set_aside(database)
            _logger.error("%s %s; all of them are in %s too: it is now %s", damage.file, damage, database, aside)
        elif not is_same_boot(data_dir):
            _logger.error(
                "%s %s. The machine went down since: commits of its last moments may be lost", damage.file, damage
            )
        else:
            raise DamagedStateError(damage.file, str(damage), data_dir)


def examine(database: Path, data_dir: Path) -> None:
    """Look at every page and every row; put right what can be, raise DamagedStateError otherwise.

    For whoever has the data directory alone. A database of an earlier version has no checksums yet.
    """
    if database.exists() and database.stat().st_size > 0:
        try:
            with closing(connect(database, read_only=True)) as connection:
                structure = check_structure(connection)
                if structure.broken is not None:
                    raise DamagedStateError(database, f"is damaged: {structure.broken}", data_dir)
                whole = is_whole(connection, structure)
            if not whole:
                with closing(connect(database)) as connection:
                    _put_right(connection, database, data_dir)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if isinstance(error, sqlite3.OperationalError) and _is_about_the_disk(error):
                raise
            raise DamagedStateError(database, f"is damaged: {error}", data_dir) from error
    note_opening(data_dir, database)


def _put_right(connection: sqlite3.Connection, database: Path, data_dir: Path) -> None:
    rows = put_right(connection, data_dir)
    connection.execute("REINDEX")
    again = check_structure(connection)
    if again.broken is not None or again.indexes:
        raise DamagedStateError(database, f"is damaged: {again.broken or 'an index'}", data_dir)
    what = f"{rows} damaged rows were dealt with" if rows else "damaged indexes were made again, nothing is lost"
    _logger.error("%s: %s", database, what)


def _is_about_the_disk(error: sqlite3.OperationalError) -> bool:
    return str(getattr(error, "sqlite_errorname", "")).startswith(_ABOUT_THE_DISK)


class DatabaseCopies:
    """The copy of a database in use. Its methods block."""

    def __init__(self, database: Path, data_dir: Path) -> None:
        self._database = database
        self._data_dir = data_dir
        self._made_at = 0.0

    def make(self) -> None:
        self._made_at = time.monotonic()
        try:
            copy_database(self._database, self._data_dir)
        except (OSError, sqlite3.Error) as error:  # a full disk, most likely: the copy before it stays
            _logger.warning("no copy of %s could be made: %s", self._database, error)

    def make_if_old(self) -> None:
        if time.monotonic() - self._made_at > _COPY_SECONDS:
            self.make()

    def make_if_changed(self) -> None:
        """Copy a database that was closed, unless the copy is newer."""
        copy = copied_database(self._data_dir)
        if not copy.exists() or copy.stat().st_mtime <= self._database.stat().st_mtime:
            self.make()
