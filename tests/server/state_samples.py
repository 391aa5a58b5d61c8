"""Records to store, and a store to put them in, for the tests of the state."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from twinkle.model.types import AdamParams, LoraSpec
from twinkle.server.state import Store
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


@asynccontextmanager
async def opened(data_dir: Path, lock: bool = True, segment_bytes: int = 1 << 26) -> AsyncIterator[Store]:
    store = await Store.open(data_dir, lock=lock, segment_bytes=segment_bytes)
    try:
        yield store
    finally:
        await store.close()


def with_store(data_dir: Path, test: Callable[[Store], Awaitable[T]], segment_bytes: int = 1 << 26) -> T:
    """Open the directory, run the test, close it."""

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
    )


def op(seq: int, body: bytes = b"{}", adapter_id: str = "s1:train:1", kind: OpKind = OpKind.OPTIM_STEP) -> Op:
    return Op(adapter_id, seq, kind, OptimStep(AdamParams()), body)


def digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


async def accept(store: Store, request: Op, now: float = 100.0):
    return await store.ops.accept(request, digest(request.body), now)


async def begin(store: Store, *numbers: int) -> None:
    """A session with runs of these numbers."""
    await store.sessions.create(session())
    for number in numbers or (1,):
        await store.runs.add(run(number))
