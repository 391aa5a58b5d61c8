"""Sample records and a store to put them in, for tests of the server's state.

    def test_something(tmp_path, backend):
        async def test(store):
            await begin(store)                     # a session with one run
            await accept(store, op(1))

        with_store(tmp_path, test)

Tests with the fixture ``backend`` run on SQLite and, if TWINKLE_TEST_POSTGRES names a cluster, also on PostgreSQL.
There each data directory has its own database.
"""

import asyncio
import hashlib
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from sqlalchemy import create_engine

from tests.support.servers import postgres_cluster
from twinkle.model.types import AdamParams, LoraSpec
from twinkle.server.state.integrity.row_checksums import fill_checksums
from twinkle.server.state.store import Store
from twinkle.server.types import (
    CheckpointRecord,
    Op,
    OpKind,
    OptimStep,
    RunRecord,
    SamplingSessionRecord,
    SessionRecord,
)

T = TypeVar("T")

BACKENDS = ("sqlite",) if postgres_cluster.cluster_url() is None else ("sqlite", "postgresql")

_urls: dict[Path, str] | None = None  # URL of each data directory of the test; None on SQLite


@contextmanager
def on_backend(name: str) -> Iterator[None]:
    """Use this database, ``sqlite`` or ``postgresql``, for all stores that are opened inside the ``with`` block."""
    global _urls
    _urls = {} if name == "postgresql" else None
    try:
        yield
    finally:
        _urls = None


def url_of(data_dir: Path) -> str | None:
    """Return the database URL of ``data_dir``; None means SQLite, the default.

    Creates the database at the first call.
    """
    if _urls is None:
        return None
    if data_dir not in _urls:
        cluster = postgres_cluster.cluster_url()
        assert cluster is not None
        _urls[data_dir] = postgres_cluster.new_database(cluster)
    return _urls[data_dir]


def query(data_dir: Path, sql: str) -> list[tuple]:
    """Query the database directly, without the store."""
    url = url_of(data_dir)
    if url is not None:
        return postgres_cluster.execute(url, sql)
    connection = sqlite3.connect(data_dir / "state.db", isolation_level=None)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def change_rows(database: Path, table: str, statement: str, parameters: Sequence[object] = ()) -> None:
    """Change rows of a SQLite database that no process has open, and update their checksums as the server would."""
    engine = create_engine(f"sqlite:///{database}")
    with engine.begin() as connection:
        connection.exec_driver_sql(statement, tuple(parameters))
        fill_checksums(connection, table)
    engine.dispose()


def integrity_error() -> type[Exception]:
    """Return the exception class that the driver raises when a constraint is violated."""
    if _urls is None:
        return sqlite3.IntegrityError
    import psycopg  # installed by our extra `postgres`

    return psycopg.IntegrityError


@asynccontextmanager
async def opened(data_dir: Path, lock: bool = True, segment_bytes: int = 1 << 26) -> AsyncIterator[Store]:
    """Open a store on the test's database for the ``with`` block."""
    store = await Store.open(data_dir, url_of(data_dir), lock=lock, segment_bytes=segment_bytes)
    try:
        yield store
    finally:
        await store.close()


def with_store(data_dir: Path, test: Callable[[Store], Awaitable[T]], segment_bytes: int = 1 << 26) -> T:
    """Open a store on the directory, run the coroutine ``test`` on it, and close it."""

    async def main() -> T:
        async with opened(data_dir, segment_bytes=segment_bytes) as store:
            return await test(store)

    return asyncio.run(main())


def session(session_id: str = "s1", tenant_id: str = "alice", created_at: float = 100.0, **fields) -> SessionRecord:
    return SessionRecord(session_id, tenant_id, created_at, fields.pop("last_seen", created_at), **fields)


def run(number: int = 1, session_id: str = "s1", tenant_id: str = "alice", **fields) -> RunRecord:
    return RunRecord(
        run_id=f"{session_id}:train:{number}",
        session_id=session_id,
        number=number,
        tenant_id=tenant_id,
        base_model="some/alias",
        model_name="some/model",
        spec=fields.pop("spec", LoraSpec(rank=8)),
        created_at=fields.pop("created_at", 100.0),
        last_request_at=fields.pop("last_request_at", 100.0),
        **fields,
    )


def checkpoint(
    name: str = "final", run_id: str = "s1:train:1", created_at: float = 100.0, **fields
) -> CheckpointRecord:
    return CheckpointRecord(
        run_id=run_id,
        kind=fields.pop("kind", "weights"),
        name=name,
        tenant_id=fields.pop("tenant_id", "alice"),
        request_id=fields.pop("request_id", f"{run_id}:7"),
        directory=f"{run_id}/{name}",
        created_at=created_at,
        size_bytes=5_000_000_000,
        **fields,
    )


def sampling_session(number: int = 1, session_id: str = "s1", **fields) -> SamplingSessionRecord:
    return SamplingSessionRecord(
        sampling_session_id=f"{session_id}:sample:{number}",
        session_id=session_id,
        number=number,
        tenant_id="alice",
        base_model="some/alias",
        model_name="some/model",
        model_path=fields.pop("model_path", None),
        version_id=fields.pop("version_id", None),
        directory=fields.pop("directory", None),
        created_at=100.0,
        size_bytes=fields.pop("size_bytes", 0),
    )


def op(seq: int, body: bytes = b"{}", adapter_id: str = "s1:train:1", kind: OpKind = OpKind.OPTIM_STEP) -> Op:
    return Op(adapter_id, seq, kind, OptimStep(AdamParams()), body)


def digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


async def accept(store: Store, request: Op, now: float = 100.0):
    return await store.ops.accept(request, digest(request.body), now)


async def begin(store: Store, *numbers: int) -> None:
    """Store a session and runs with these numbers (default: run 1)."""
    await store.sessions.create(session())
    for number in numbers or (1,):
        await store.runs.add(run(number))


async def delete_checkpoint(store: Store, record: CheckpointRecord, event: str = "checkpoint_delete") -> None:
    """Delete a checkpoint's record as the server does, but leave its files."""
    await store.checkpoints.begin_delete(record, event)
    await store.checkpoints.finish_delete(record)
