"""The state of a server: an opened data directory with these files.

state.db      the database (SQLite in WAL mode), unless the configuration names another file or PostgreSQL
journal/      bodies of requests and encoded outcomes, in segment files
secret        the key with which API keys are hashed, and tokens and addresses signed
generated-key the key that a launch generated (``runtime.generated_key``), unless it was shown or the file was deleted
copies/       copies of the secret and the database, used when the originals are damaged
reserve       a file that is deleted to free space when the disk is full
lock          held by the one server that uses the directory, or shared by the processes of that server
"""

import asyncio
import time
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from functools import partial
from pathlib import Path

from sqlalchemy import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError

from twinkle.errors import UnsupportedError
from twinkle.extras import missing
from twinkle.server.config.timings import DEFAULT_TIMINGS, Timings
from twinkle.server.state.database.database import Database
from twinkle.server.state.database.driver import Driver, Role
from twinkle.server.state.database.journal import SEGMENT_BYTES, Journal, JournalWriters
from twinkle.server.state.database.migrations import migrate, needs_migration
from twinkle.server.state.database.sqlite import SqliteDriver, default_url
from twinkle.server.state.errors import DatabaseInUseError, DataDirInUseError
from twinkle.server.state.files.guards import (
    DirectoryLock,
    give_up_reserve,
    is_disk_full,
    keep_reserve,
    make_data_dir,
)
from twinkle.server.state.integrity.copies import read_secret
from twinkle.server.state.integrity.examination import DatabaseCopies, check_before_opening, examine
from twinkle.server.state.records.audit import Audit
from twinkle.server.state.records.checkpoints import CheckpointRecords
from twinkle.server.state.records.coordination import Leases, OperatorRequests
from twinkle.server.state.records.damage import DamageRecords
from twinkle.server.state.records.keys import Keys
from twinkle.server.state.records.ops import Ops
from twinkle.server.state.records.retention import Retention
from twinkle.server.state.records.run_metrics import RunMetrics
from twinkle.server.state.records.runs import Runs, SnapshotRecords
from twinkle.server.state.records.sampling import SamplingSessions
from twinkle.server.state.records.sessions import CustomLossRecords, Sessions
from twinkle.server.state.records.tenants import TenantRecords
from twinkle.server.state.records.usage import UsageRecords

# Seconds that a process of a server waits for another process, which may be migrating the tables.
_MEMBER_SECONDS = 60.0
_PAUSE = 0.1


class Store:
    """The opened state of a server: an attribute for each area, such as ``sessions``. It belongs to one event loop.

    Records are looked up by id alone, for any tenant: the caller must check their ``tenant_id``.
    """

    def __init__(
        self,
        data_dir: Path,
        url: str | None,
        role: Role,
        segment_bytes: int,
        loop: asyncio.AbstractEventLoop,
        timings: Timings,
    ) -> None:
        """Open the directory. This blocks, so callers on an event loop use :meth:`open`."""
        database_url = default_url(data_dir) if url is None else _parsed(url)
        make_data_dir(data_dir)
        self.data_dir = data_dir
        self._copies: DatabaseCopies | None = None
        file = Path(database_url.database or "") if database_url.get_backend_name() == "sqlite" else None
        with ExitStack() as held:  # released here if opening fails, otherwise by close()
            if role is Role.SERVER:
                held.enter_context(DirectoryLock(data_dir))
            if file is not None and str(file) not in ("", ".", ":memory:"):
                held.enter_context(_database_lock(data_dir, file, role))
                _examine(data_dir, file, role)
            driver = driver_of(database_url, role)
            held.callback(driver.engine.dispose)
            _update_schema(data_dir, driver, role)
            if role is Role.MEMBER:
                held.enter_context(DirectoryLock(data_dir, shared=True, wait_seconds=_MEMBER_SECONDS))
            with driver.connect() as connection:
                secret = read_secret(data_dir, may_make=_is_unused(connection))
            journal_dir = data_dir / "journal"
            journal_dir.mkdir(mode=0o700, exist_ok=True)
            writable = role is not Role.TOOL
            writers = (
                held.enter_context(closing(JournalWriters(journal_dir / "writers"))) if role is Role.MEMBER else None
            )
            self._bodies = Journal(journal_dir / "bodies", segment_bytes, writable, writers)
            self._outcomes = Journal(journal_dir / "outcomes", segment_bytes, writable, writers)
            self._database = Database(driver, loop, timings.outage)
            if role is Role.SERVER:
                driver.fail_damaged_rows()
            if isinstance(driver, SqliteDriver) and file is not None and role is not Role.TOOL:
                self._copies = DatabaseCopies(file, data_dir)
                self._copies.make()
                driver.after_maintenance = self._copies.make_if_old
            self._held = held.pop_all()
        self.sessions = Sessions(self._database)
        self.runs = Runs(self._database)
        self.run_metrics = RunMetrics(self._database)
        self.checkpoints = CheckpointRecords(self._database)
        self.sampling_sessions = SamplingSessions(self._database)
        self.ops = Ops(self._database, self._bodies, self._outcomes, writers)
        self.leases = Leases(self._database)
        self.custom_losses = CustomLossRecords(self._database)
        self.snapshots = SnapshotRecords(self._database)
        self.keys = Keys(self._database, secret, timings.key_cache)
        self.tenants = TenantRecords(self._database)
        self.usage = UsageRecords(self._database)
        self.operator_requests = OperatorRequests(self._database)
        self.audit = Audit(self._database)
        self.retention = Retention(self._database)
        self.damage = DamageRecords(self._database)

    @classmethod
    async def open(
        cls,
        data_dir: Path,
        url: str | None = None,
        lock: bool = True,
        segment_bytes: int = SEGMENT_BYTES,
        shared: bool = False,
        timings: Timings = DEFAULT_TIMINGS,
    ) -> "Store":
        """Open the directory, creating or migrating what is in it.

        A server takes the lock of the directory (``lock``). A second server gets :class:`DataDirInUseError`, or
        :class:`DatabaseInUseError` if it has another directory but the same database. The processes of one server share
        the lock (``shared``), and each writes its own segments of the journal. Command-line tools open the store
        without the lock, also while a server runs: they may do everything except write to the journal and prune it.
        If the disk is full, the reserve file is deleted and the directory is opened once more.
        """
        role = Role.TOOL if not lock else Role.MEMBER if shared else Role.SERVER
        opened = partial(cls, data_dir, url, role, segment_bytes, asyncio.get_running_loop(), timings)
        give_up_reserve(data_dir, only_if_low=True)
        try:
            return await asyncio.to_thread(opened)
        except Exception as error:
            if not is_disk_full(error) or not give_up_reserve(data_dir, only_if_low=False):
                raise
        return await asyncio.to_thread(opened)

    def keep_reserve(self) -> None:
        """Create the reserve file, whose space is freed when the disk is full, if it is missing and fits. Blocks."""
        keep_reserve(self.data_dir)

    async def close(self) -> None:
        """Commit all pending writes, copy a SQLite file that has changed, and release the lock for the next server."""
        await self._database.close()
        self._bodies.close()
        self._outcomes.close()
        if self._copies is not None:
            await asyncio.to_thread(self._copies.make_if_changed)
        self._held.close()


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise UnsupportedError("database url: cannot be read, allowed: sqlite:///PATH or postgresql://…") from None
    backend = parsed.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise UnsupportedError(f"database url: got {backend}://…, allowed: sqlite:///PATH or postgresql://…")
    return parsed


def driver_of(url: URL, role: Role) -> Driver:
    """Return the driver of a database; MissingDependencyError if a package for it is not installed."""
    if url.get_backend_name() == "sqlite":
        return SqliteDriver(url)
    try:
        from twinkle.server.state.database.postgres import PostgresDriver  # imports psycopg, which is optional
    except ImportError as error:
        raise missing("psycopg", "a state on PostgreSQL") from error
    return PostgresDriver(url, role)


def _database_lock(data_dir: Path, database: Path, role: Role) -> AbstractContextManager[object]:
    """Lock a database file other than ``state.db``, because servers with other data directories may use it too.

    A tool takes no lock.
    """
    if role is Role.TOOL or database.absolute() == (data_dir / "state.db").absolute():
        return nullcontext()
    database.parent.mkdir(parents=True, exist_ok=True)
    try:
        return DirectoryLock(database.parent, name=f"{database.name}.lock", shared=role is Role.MEMBER)
    except DataDirInUseError:
        raise DatabaseInUseError(str(database)) from None


def _examine(data_dir: Path, database: Path, role: Role) -> None:
    """Look for damage before the SQLite file is opened: all processes in the WAL, a server's first one in all rows."""
    check_before_opening(database, data_dir, has_lock=role is Role.SERVER)
    if role is not Role.TOOL:
        # If the directory is in use, another process of this server has examined the database already.
        with suppress(DataDirInUseError), DirectoryLock(data_dir) if role is Role.MEMBER else nullcontext():
            examine(database, data_dir)


def _is_unused(connection: Connection) -> bool:
    """Return whether the database holds no session and no API key, which depend on the secret."""
    return not any(
        connection.exec_driver_sql(f"SELECT 1 FROM {table} LIMIT 1").all() for table in ("sessions", "api_keys")
    )


def _update_schema(data_dir: Path, driver: Driver, role: Role) -> None:
    """Create the tables, or migrate them to the newest schema version.

    Tables never change while a server runs, so only a process that holds the exclusive lock migrates them. One of
    several processes of a server waits up to a minute for another that may be migrating. Raises DataDirInUseError or
    DatabaseInUseError if the lock is not free then, or, for other processes, at once.
    """
    deadline = time.monotonic() + (_MEMBER_SECONDS if role is Role.MEMBER else 0)
    while _is_outdated(driver):
        try:
            with nullcontext() if role is Role.SERVER else DirectoryLock(data_dir), driver.connect() as connection:
                driver.begin_migration(connection)
                migrate(connection)
                driver.finish_migration(connection)
        except (DataDirInUseError, DatabaseInUseError):  # another process of this server may be migrating now
            if time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE)


def _is_outdated(driver: Driver) -> bool:
    with driver.connect() as connection:
        return needs_migration(connection)
