"""Everything the server must still know after it was killed: a data directory, opened.

state.db      the database (SQLite, WAL)
journal/      bodies of requests and encoded outcomes, in segment files
secret        under which API keys are hashed
lock          held by the one server that works here
"""

import asyncio
from pathlib import Path

from filelock import FileLock, Timeout
from sqlalchemy import URL, Engine

from twinkle.server.state import sqlite
from twinkle.server.state.checkpoints import Checkpoints
from twinkle.server.state.database import Database
from twinkle.server.state.errors import DataDirInUseError
from twinkle.server.state.journal import SEGMENT_BYTES, Journal
from twinkle.server.state.keys import Keys, read_secret
from twinkle.server.state.migrations import migrate, needs_migration
from twinkle.server.state.ops import Ops
from twinkle.server.state.runs import Runs
from twinkle.server.state.sampling import SamplingSessions
from twinkle.server.state.sessions import Sessions
from twinkle.server.state.snapshots import Snapshots

__all__ = ["Store"]


class Store:
    """The areas of the state, each with its own methods. Belongs to one event loop.

    Records are found by id alone: whoever asks checks their ``tenant_id``.
    """

    def __init__(
        self, data_dir: Path, url: str | None, lock: bool, segment_bytes: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Blocks: use :meth:`open`."""
        database_url = sqlite.database_url(data_dir, url)
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.data_dir = data_dir
        self._lock = _acquire(data_dir) if lock else None
        try:
            _update_schema(data_dir, database_url, self._lock)
            secret = read_secret(data_dir / "secret")
            journal_dir = data_dir / "journal"
            journal_dir.mkdir(mode=0o700, exist_ok=True)
            self._bodies = Journal(journal_dir / "bodies", segment_bytes, writable=lock)
            self._outcomes = Journal(journal_dir / "outcomes", segment_bytes, writable=lock)
            self._database = Database(database_url, loop)
        except BaseException:
            _release(self._lock)
            raise
        self.sessions = Sessions(self._database)
        self.runs = Runs(self._database)
        self.checkpoints = Checkpoints(self._database)
        self.sampling_sessions = SamplingSessions(self._database)
        self.ops = Ops(self._database, self._bodies, self._outcomes)
        self.snapshots = Snapshots(self._database)
        self.keys = Keys(self._database, secret)

    @classmethod
    async def open(
        cls, data_dir: Path, url: str | None = None, lock: bool = True, segment_bytes: int = SEGMENT_BYTES
    ) -> "Store":
        """Open the directory, creating or migrating what is in it.

        A server takes the lock; a second one gets :class:`DataDirInUseError`. Command-line tools open without it, also
        beside a running server: they may do everything but journal and prune ops.
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


def _update_schema(data_dir: Path, url: URL, held: FileLock | None) -> None:
    engine = sqlite.open_engine(url)
    try:
        with engine.connect() as connection:
            outdated = needs_migration(connection)
        if outdated:
            # Tables never change under a running server, so that without the lock we need it for this moment.
            momentary = _acquire(data_dir) if held is None else None
            try:
                _migrate(engine)
            finally:
                _release(momentary)
    finally:
        engine.dispose()


def _migrate(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(sqlite.BEGIN_WRITE)
        migrate(connection)
        connection.commit()


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
