"""The records of a backup: how SQLite and PostgreSQL copy their records as they are at one moment, and put them back.

SQLite copies its own file. PostgreSQL exports a snapshot of the database, from which pg_dump reads later: so the files
that the snapshot names are known, and can be held, before the dump takes its time. pg_dump and pg_restore are part of
PostgreSQL's client package; they must be at least as new as the database server.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import URL, CompoundSelect, Select, func, inspect, make_url, select, text, union

from twinkle.errors import TwinkleServerError
from twinkle.server.state.database.driver import Driver, Role
from twinkle.server.state.database.sqlite import as_sql
from twinkle.server.state.database.tables import CHECKPOINTS, SAMPLING_SESSIONS, SNAPSHOTS
from twinkle.server.state.files.data_dir import make_parents, sync
from twinkle.server.state.integrity.copies import copy_sqlite, write_private
from twinkle.server.state.integrity.examination import check_before_opening
from twinkle.server.state.integrity.sqlite_check import connect
from twinkle.server.state.records.ops import BODIES_NEEDED, OUTCOMES_NEEDED
from twinkle.server.state.records.sampling import ACTIVE_DIRECTORIES
from twinkle.server.state.store import driver_of

_SQLITE_FILE = "state.db"
# Directories that must exist. The files of other sampler versions may be deleted: no active session samples from them.
_DIRECTORIES = union(select(SNAPSHOTS.c.directory), select(CHECKPOINTS.c.directory), ACTIVE_DIRECTORIES)
_VERSIONS = select(SAMPLING_SESSIONS.c.directory).where(SAMPLING_SESSIONS.c.directory.is_not(None)).distinct()
_WRITERS = "writers"  # a table with rows of running processes


@dataclass(frozen=True)
class NamedFiles:
    """The paths that the records name, relative to the data directory.

    ``directories`` must exist. ``old_versions``, sampler versions of sessions that have ended, may be missing.
    ``segments`` are the files of the journal with bodies and outcomes that are still needed.
    """

    directories: frozenset[str]
    old_versions: frozenset[str]
    segments: frozenset[str]


class Records(Protocol):
    """The records of a server in one database. All methods block."""

    @property
    def file(self) -> str:
        """Return the name of the file in a backup that holds the records."""

    def check_before_backup(self, data_dir: Path) -> None:
        """Raise TwinkleServerError if no server has kept its records here, DamagedStateError if they are damaged."""

    def choose_moment(self, scratch: Path) -> NamedFiles:
        """Choose this moment as that of the backup, and return the files that the records name now.

        ``scratch``: a directory for temporary files. A later call chooses another moment.
        """

    def named_now(self) -> NamedFiles:
        """Return the files that the records name now."""

    def write(self, scratch: Path, target: Path) -> None:
        """Write the records of the chosen moment to the file ``target``, with mode 600."""

    def check_before_restore(self) -> None:
        """Raise TwinkleServerError if the database already holds the records of a server."""

    def put_back(self, partial: Path, data_dir: Path) -> list[Path]:
        """Put the records in ``partial``, a copy of the backup that will become ``data_dir``, where they belong.

        Return directories that were created for them.
        """


def _named(rows: Callable[[Select[Any] | CompoundSelect[Any]], Iterable[Any]]) -> NamedFiles:
    """Return the files that the records name. ``rows`` runs a query."""
    directories, versions, bodies, outcomes = (
        frozenset(row[0] for row in rows(statement))
        for statement in (_DIRECTORIES, _VERSIONS, BODIES_NEEDED, OUTCOMES_NEEDED)
    )
    segments = {f"journal/bodies/{number:08d}.journal" for number in bodies}
    segments |= {f"journal/outcomes/{number:08d}.journal" for number in outcomes}
    return NamedFiles(directories, versions - directories, frozenset(segments))


class SqliteRecords:
    """The records in a SQLite file."""

    file = _SQLITE_FILE

    def __init__(self, database: Path) -> None:
        self._database = database

    def check_before_backup(self, data_dir: Path) -> None:
        if not self._database.is_file():
            raise TwinkleServerError(f"no server has kept its state in {data_dir}")
        check_before_opening(self._database, data_dir, has_lock=False)

    def choose_moment(self, scratch: Path) -> NamedFiles:
        with closing(connect(self._database, read_only=True)) as live:
            copy_sqlite(live, scratch / _SQLITE_FILE)
        return self._named_in(scratch / _SQLITE_FILE)

    def named_now(self) -> NamedFiles:
        return self._named_in(self._database)

    def _named_in(self, database: Path) -> NamedFiles:
        with closing(connect(database, read_only=True)) as connection:
            return _named(lambda statement: connection.execute(as_sql(statement)))

    def write(self, scratch: Path, target: Path) -> None:
        shutil.copyfile(scratch / _SQLITE_FILE, target)
        target.chmod(0o600)

    def check_before_restore(self) -> None:
        if self._database.exists():
            raise TwinkleServerError(f"{self._database} exists: a backup does not replace the state of a server")

    def put_back(self, partial: Path, data_dir: Path) -> list[Path]:
        restored = partial / _SQLITE_FILE
        if self._database.is_relative_to(data_dir):
            if self._database != data_dir / _SQLITE_FILE:
                restored.rename(partial / self._database.relative_to(data_dir))
            return []
        new_parents = make_parents(self._database, private=False)
        shutil.move(restored, self._database)  # a copy if the database is on another file system
        sync(self._database)
        sync(self._database.parent)
        return new_parents


class PostgresRecords:
    """The records in a PostgreSQL database. ``driver`` opens connections to it."""

    file = "state.pgdump"

    def __init__(self, driver: Driver, url: str) -> None:
        self._driver = driver
        self._url = make_url(url)
        self._snapshot: str | None = None  # the id of the snapshot that choose_moment() exported
        self._transaction = ExitStack()  # holds the transaction that exported it, without which it would be gone

    @classmethod
    @contextmanager
    def opened(cls, url: str) -> Iterator["PostgresRecords"]:
        """Give the records of a database, and close all connections to it at the end."""
        if "sslpassword" in make_url(url).query:  # other than the password, pg_dump takes it as an argument only
            raise TwinkleServerError(
                "persistence.url: pg_dump would show sslpassword in the list of processes; use a client key without one"
            )
        driver = driver_of(make_url(url), Role.TOOL)
        records = cls(driver, url)
        try:
            yield records
        finally:
            records._end_moment()
            driver.engine.dispose()

    def check_before_backup(self, data_dir: Path) -> None:
        _program("pg_dump")
        if not self._has_tables():
            raise TwinkleServerError(f"no server has kept its state in {self._name}")
        if not data_dir.joinpath("secret").is_file():
            raise TwinkleServerError(f"{data_dir} does not hold the files of a server that uses {self._name}")

    def _has_tables(self) -> bool:
        with self._driver.connect() as connection:
            return inspect(connection).has_table(CHECKPOINTS.name)

    @property
    def _name(self) -> str:
        return f"the database {self._url.database!r}"

    def choose_moment(self, scratch: Path) -> NamedFiles:
        self._end_moment()
        connection = self._transaction.enter_context(self._driver.connect())
        connection = connection.execution_options(isolation_level="REPEATABLE READ")
        # The transaction stays idle while files are linked, longer than our other connections may.
        connection.execute(text("SET idle_in_transaction_session_timeout = 0"))
        self._snapshot = connection.execute(select(func.pg_export_snapshot())).scalar_one()
        return _named(lambda statement: connection.execute(statement))

    def _end_moment(self) -> None:
        self._transaction.close()
        self._snapshot = None

    def named_now(self) -> NamedFiles:
        with self._driver.connect() as connection:
            return _named(lambda statement: connection.execute(statement))

    def write(self, scratch: Path, target: Path) -> None:
        assert self._snapshot is not None, "choose_moment() comes first"
        target.touch(mode=0o600)
        # The rows of running processes are of no use to the server that starts after a restore.
        options = ("--format=custom", f"--exclude-table-data={_WRITERS}", f"--snapshot={self._snapshot}")
        self._run("pg_dump", scratch, *options, f"--file={target}")
        self._end_moment()

    def check_before_restore(self) -> None:
        _program("pg_restore")
        if self._has_tables():
            raise TwinkleServerError(f"{self._name} holds the state of a server, which a backup does not replace")

    def put_back(self, partial: Path, data_dir: Path) -> list[Path]:
        # All of it or nothing: an error ends the one transaction.
        self._run("pg_restore", partial, "--single-transaction", "--exit-on-error", str(partial / self.file))
        (partial / self.file).unlink()
        return []

    def _run(self, program: str, scratch: Path, *arguments: str) -> None:
        """Run a program of PostgreSQL on this database; TwinkleServerError with its message if it fails."""
        whole, password_file = self._url.difference_update_query(["password"]), scratch / ".pgpass"
        url = URL.create("postgresql", whole.username, None, whole.host, whole.port, whole.database, whole.query)
        password = whole.password or self._url.query.get("password")
        if password is not None:  # in a private file: other users can read the arguments of a process
            escaped = str(password).replace("\\", r"\\").replace(":", r"\:")
            write_private(password_file, f"*:*:*:*:{escaped}\n".encode())
            url = url.update_query_dict({"passfile": str(password_file)})
        always = ("--no-owner", "--no-privileges", "--no-password", f"--dbname={url}")
        try:
            command = [_program(program), *always, *arguments]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        finally:
            password_file.unlink(missing_ok=True)
        if done.returncode != 0:
            raise TwinkleServerError(f"{program} failed: {' '.join(done.stderr.split())}")


def _program(name: str) -> str:
    """Return the path of a program of PostgreSQL; TwinkleServerError if it is not installed."""
    found = shutil.which(name)
    if found is None:
        raise TwinkleServerError(
            f"{name} is not installed: it is part of PostgreSQL's client programs (Debian: postgresql-client)"
        )
    return found
