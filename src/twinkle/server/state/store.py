"""Everything the server must still know after it was killed: a data directory, opened.

state.db      the database (SQLite, WAL), unless it is elsewhere (a file, or PostgreSQL)
journal/      bodies of requests and encoded outcomes, in segment files
secret        under which API keys are hashed, and tokens and addresses signed
lock          held by the one server that works here
"""

import asyncio
from pathlib import Path

from filelock import FileLock, Timeout
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from twinkle.errors import MissingDependencyError, UnsupportedError
from twinkle.server.state.audit import Audit
from twinkle.server.state.checkpoints import Checkpoints
from twinkle.server.state.database import Database
from twinkle.server.state.driver import Driver
from twinkle.server.state.errors import DataDirInUseError
from twinkle.server.state.journal import SEGMENT_BYTES, Journal
from twinkle.server.state.keys import Keys, read_secret
from twinkle.server.state.migrations import migrate, needs_migration
from twinkle.server.state.ops import Ops
from twinkle.server.state.runs import Runs
from twinkle.server.state.sampling import SamplingSessions
from twinkle.server.state.sessions import Sessions
from twinkle.server.state.snapshots import Snapshots
from twinkle.server.state.sqlite import SqliteDriver, default_url

__all__ = ["Store"]


class Store:
    """The areas of the state, each with its own methods. Belongs to one event loop.

    Records are found by id alone: whoever asks checks their ``tenant_id``.
    """

    def __init__(
        self, data_dir: Path, url: str | None, lock: bool, segment_bytes: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Blocks: use :meth:`open`."""
        database_url = default_url(data_dir) if url is None else _parsed(url)
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.data_dir = data_dir
        self._lock = _acquire(data_dir) if lock else None
        driver = None
        try:
            driver = _driver(database_url, is_server=lock)
            _update_schema(data_dir, driver, self._lock)
            secret = read_secret(data_dir / "secret")
            journal_dir = data_dir / "journal"
            journal_dir.mkdir(mode=0o700, exist_ok=True)
            self._bodies = Journal(journal_dir / "bodies", segment_bytes, writable=lock)
            self._outcomes = Journal(journal_dir / "outcomes", segment_bytes, writable=lock)
            self._database = Database(driver, loop)
        except BaseException:
            if driver is not None:
                driver.engine.dispose()
            _release(self._lock)
            raise
        self.sessions = Sessions(self._database)
        self.runs = Runs(self._database)
        self.checkpoints = Checkpoints(self._database)
        self.sampling_sessions = SamplingSessions(self._database)
        self.ops = Ops(self._database, self._bodies, self._outcomes)
        self.snapshots = Snapshots(self._database)
        self.keys = Keys(self._database, secret)
        self.audit = Audit(self._database)

    @classmethod
    async def open(
        cls, data_dir: Path, url: str | None = None, lock: bool = True, segment_bytes: int = SEGMENT_BYTES
    ) -> "Store":
        """Open the directory, creating or migrating what is in it.

        A server takes the lock; a second one gets :class:`DataDirInUseError`, or :class:`DatabaseInUseError` if it has
        another directory and the same PostgreSQL database. Command-line tools open without it, also beside a running
        server: they may do everything but journal and prune ops.
        """
        return await asyncio.to_thread(cls, data_dir, url, lock, segment_bytes, asyncio.get_running_loop())

    async def close(self) -> None:
        """Finish what was asked for and let the next one in."""
        await self._database.close()
        self._bodies.close()
        self._outcomes.close()
        _release(self._lock)

    @property
    def transactions(self) -> int:
        """How many transactions were committed since opening."""
        return self._database.transactions


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise UnsupportedError("database url: cannot be read, allowed: sqlite:///PATH or postgresql://…") from None
    backend = parsed.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise UnsupportedError(f"database url: got {backend}://…, allowed: sqlite:///PATH or postgresql://…")
    return parsed


def _driver(url: URL, is_server: bool) -> Driver:
    if url.get_backend_name() == "sqlite":
        return SqliteDriver(url)
    try:
        from twinkle.server.state.postgres import PostgresDriver  # needs a package that SQLite does not
    except ImportError as error:
        raise MissingDependencyError("psycopg[binary]", "postgres", "a state on PostgreSQL") from error
    return PostgresDriver(url, is_server)


def _update_schema(data_dir: Path, driver: Driver, held: FileLock | None) -> None:
    with driver.connect() as connection:
        outdated = needs_migration(connection)
    if not outdated:
        return
    # Tables never change under a running server, so that without the lock we need it for this moment.
    momentary = _acquire(data_dir) if held is None else None
    try:
        with driver.connect() as connection:
            driver.begin_migration(connection)
            migrate(connection)
            driver.finish_migration(connection)
    finally:
        _release(momentary)


def _acquire(data_dir: Path) -> FileLock:
    # Taken in one thread and let go in another.
    lock = FileLock(data_dir / "lock", mode=0o600, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise DataDirInUseError(data_dir) from None
    return lock


def _release(lock: FileLock | None) -> None:
    if lock is not None:
        lock.release()
