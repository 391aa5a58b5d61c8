"""The processor service: the worker of each session, and the limits of tenants.

The body of a client's request goes to its session's worker unparsed, and the answer goes back unparsed; only batches
that training requests refer to are parsed here. The gateway has checked before that the session belongs to the tenant.
"""

import asyncio
import hashlib
import json
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from twinkle.errors import (
    GoneError,
    InvalidInputError,
    LimitReachedError,
    NotFoundError,
    OverloadedError,
    QuotaError,
    ShuttingDownError,
    TwinkleServerError,
    UserError,
)
from twinkle.server.config import LimitsConfig, ServerConfig
from twinkle.server.processors.live import UnknownProcessorError
from twinkle.server.processors.messages import Answers, Settings
from twinkle.server.processors.worker_process import WorkerEndedError, WorkerProcess
from twinkle.server.tenancy.work_pools import FairPool
from twinkle.server.types import Budget
from twinkle.server.verbs.features import FIELDS, numbers

_LONGEST_KEY = 256
_MOST_WAITING = 64  # requests of one session
_CLOSE_SOME = "close() datasets and other remote objects that are no longer needed, or end a session that has some"
_END_ONE = "end one of them with TwinkleClient.close()"
_SHUTDOWN = "the server is shutting down"
_AT_ONCE = 2**20  # bytes that may be hashed or parsed on the event loop; more goes to a thread


class Processors(Protocol):
    """The methods of the processor service that a gateway calls. The service may run in another process."""

    async def batch(self, tenant_id: str, session_id: str, processor_id: str, number: int) -> list[dict[str, Any]]: ...

    async def end_session(self, session_id: str) -> None: ...

    def release_waiters(self) -> None: ...


# The error for each outcome that a worker reports, made from the body of its answer: a message, or for "unknown" the
# name of the argument.
_ERRORS: Mapping[str, Callable[[str], Exception]] = {
    "user": UserError,
    "unknown": UnknownProcessorError,
    "gone": GoneError,
    "failed": TwinkleServerError,
}


class _Session:
    """The state of one session: its answers, its worker if it has one, and what counts against limits."""

    def __init__(self, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self.answers = Answers()
        self.worker: WorkerProcess | None = None
        self.starting = asyncio.Lock()
        self.has_slot = False  # whether it counts as one of the workers that the server may have
        self.live: frozenset[str] = frozenset()  # the ids of the objects in the worker
        self.kept_bytes = 0  # of batches that requests can refer to
        self.being_made = 0  # objects that are being created
        self.waiting = 0  # requests that wait for the worker
        self.ended: str | None = None  # why its last worker ended
        self.over = False  # the session itself has ended

    def lost(self, worker: WorkerProcess) -> None:
        if self.worker is worker:
            self.worker, self.has_slot, self.kept_bytes, self.ended = None, False, 0, worker.why
            self.live = frozenset()


class ProcessorService:
    """Starts a worker process for each session that needs one, and hands requests to it. Belongs to the event loop."""

    def __init__(self, directory: Path, settings: Settings, limits: LimitsConfig, most_workers: int) -> None:
        self._directory = directory
        self._settings = settings
        self._limits = limits
        self._most_workers = most_workers
        self._sessions: dict[str, _Session] = {}
        self._threads = FairPool("batches", threads=2, at_once=1)  # large bodies: hashed and parsed
        self._stopping = False

    async def start(self) -> None:
        """Delete the directories that the workers of a killed server left behind."""
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        self._directory.mkdir(mode=0o700, parents=True)

    def release_waiters(self) -> None:
        """Kill all workers, so that every waiting request is answered now: the server is about to stop."""
        self._stopping = True
        for session in self._sessions.values():
            if session.worker is not None:
                session.worker.kill(_SHUTDOWN)

    async def stop(self) -> None:
        self.release_waiters()
        await asyncio.gather(*(self.end_session(session_id) for session_id in list(self._sessions)))
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def status(self) -> dict[str, int]:
        return {
            "workers": sum(session.has_slot for session in self._sessions.values()),
            "processors": sum(len(session.live) for session in self._sessions.values()),
        }

    async def create(self, tenant_id: str, session_id: str, body: bytes, idempotency_key: str | None) -> str:
        """Make the processor that ``body`` describes, in the session's worker, and return its id."""
        session = self._sessions.setdefault(session_id, _Session(tenant_id))
        answer = await self._once(session, idempotency_key, b"create", body, lambda: self._create(session, body))
        return answer.decode()

    async def call(self, tenant_id: str, session_id: str, body: bytes, idempotency_key: str | None) -> bytes:
        """Call a function of a processor and return ``{"result": …}`` as JSON. GoneError at the end of a pass."""
        session = self._session(tenant_id, session_id)
        return await self._once(session, idempotency_key, b"call", body, lambda: self._call(session, body))

    def check_alive(self, tenant_id: str, session_id: str, processor_id: str) -> None:
        """Raise UnknownProcessorError if the session has no such processor. The worker is not asked: it may be busy."""
        session = self._session(tenant_id, session_id)
        if processor_id not in session.live:
            raise self._missing(session)

    async def batch(self, tenant_id: str, session_id: str, processor_id: str, number: int) -> list[dict[str, Any]]:
        """Return the rows of a batch to which ``__next__`` gave a reference. Columns that training reads are arrays."""
        session = self._session(tenant_id, session_id)
        header = {"op": "batch", "processor_id": processor_id, "number": number}
        body = await asyncio.shield(asyncio.ensure_future(self._ask(session, header, b"")))
        rows: list[dict[str, Any]] = await self._off_loop(tenant_id, body, _rows)
        return rows

    @property
    def budget(self) -> Budget:
        """Return the bytes of batches that the workers of this service keep for references, and their limit."""
        used = sum(session.kept_bytes for session in self._sessions.values())
        return Budget("referenced_batches", used, self._limits.max_referenced_batch_bytes)

    async def end_session(self, session_id: str) -> None:
        """End the session's worker and delete all that it has in memory and on disk."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.over = True
            if session.worker is not None:
                await session.worker.end(_SHUTDOWN if self._stopping else "the session is over")

    # --- requests -----------------------------------------------------------------------------------------------------

    def _session(self, tenant_id: str, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None or session.tenant_id != tenant_id:
            raise UnknownProcessorError("processor_id")
        return session

    def _missing(self, session: _Session) -> NotFoundError:
        """Return the error for a processor that the session does not have, or has lost with its worker."""
        ended = session.worker is None and session.ended is not None
        return WorkerEndedError(str(session.ended)) if ended else UnknownProcessorError("processor_id")

    async def _once(
        self, session: _Session, key: str | None, kind: bytes, body: bytes, work: Callable[[], Awaitable[bytes]]
    ) -> bytes:
        if key is not None and not 0 < len(key) <= _LONGEST_KEY:
            raise InvalidInputError("X-Idempotency-Key header", key, f"1 to {_LONGEST_KEY} characters")
        digest = b""
        if key is not None:
            hashed = await self._off_loop(session.tenant_id, body, lambda data: hashlib.sha256(data).digest())
            digest = kind + hashed
        return await session.answers.once(key, digest, work)

    async def _create(self, session: _Session, body: bytes) -> bytes:
        self._check_room(session)
        session.being_made += 1
        try:
            await self._ensure_worker(session)
            return await self._ask(session, {"op": "create"}, body)
        except WorkerEndedError as error:  # which means "not found", but the client has no processor to miss yet
            raise UserError(str(error)) from error
        finally:
            session.being_made -= 1
            await self._end_if_empty(session)

    async def _call(self, session: _Session, body: bytes) -> bytes:
        try:
            return await self._ask(session, {"op": "call"}, body)
        finally:
            await self._end_if_empty(session)

    async def _ask(self, session: _Session, header: Mapping[str, Any], body: bytes) -> bytes:
        worker = session.worker
        if worker is None:
            raise self._missing(session)
        if session.waiting >= _MOST_WAITING:
            raise QuotaError(
                "waiting requests of this session", session.waiting, _MOST_WAITING, "waiting_processor_calls"
            )
        session.waiting += 1
        try:
            asked = {**header, "batch_bytes": self._room(session)}
            frame = await worker.ask(asked, body, self._limits.processor_call_seconds)
        except WorkerEndedError as error:
            session.lost(worker)
            if self._stopping:
                raise ShuttingDownError from error
            raise
        finally:
            session.waiting -= 1
        if session.worker is worker:
            session.live, session.kept_bytes = frozenset(frame.header["live"]), frame.header["kept_bytes"]
        outcome = frame.header["outcome"]
        if outcome == "quota":
            raise self._no_room(session, int(frame.body))
        if outcome != "ok":
            raise _ERRORS[outcome](frame.body.decode())
        return frame.body

    def _room(self, session: _Session) -> int:
        """Return the bytes that the session's kept batches may take: what other sessions leave of both limits."""
        limits, others = self._limits, [other for other in self._sessions.values() if other is not session]
        of_tenant = sum(other.kept_bytes for other in others if other.tenant_id == session.tenant_id)
        of_all = sum(other.kept_bytes for other in others)
        most_of_tenant, most = limits.max_referenced_batch_bytes_per_tenant, limits.max_referenced_batch_bytes
        return max(0, min(most_of_tenant - of_tenant, most - of_all))

    def _no_room(self, session: _Session, size: int) -> QuotaError | OverloadedError:
        of_tenant = [other for other in self._sessions.values() if other.tenant_id == session.tenant_id]
        used, most = sum(other.kept_bytes for other in of_tenant), self._limits.max_referenced_batch_bytes_per_tenant
        what = f"bytes of batches that loaders keep (this one has {size})"
        if used - session.kept_bytes + size > most:
            return QuotaError(what, used, most, "max_referenced_batch_bytes_per_tenant")
        return OverloadedError(what, self.budget.used, self.budget.limit, "max_referenced_batch_bytes")

    async def _off_loop(self, tenant_id: str, data: bytes, work: Callable[[bytes], Any]) -> Any:
        return work(data) if len(data) <= _AT_ONCE else await self._threads.in_thread(tenant_id, lambda: work(data))

    # --- workers ------------------------------------------------------------------------------------------------------

    def _check_room(self, session: _Session) -> None:
        """Raise LimitReachedError if the tenant has all the processors it may have; ShuttingDownError at a shutdown.

        The caller must not await anything between this check and counting the new processor: two requests at the same
        time could both pass the check.
        """
        if self._stopping:
            raise ShuttingDownError
        of_tenant = [other for other in self._sessions.values() if other.tenant_id == session.tenant_id]
        made = sum(len(other.live) + other.being_made for other in of_tenant)
        most = self._limits.max_processors_per_tenant
        if made >= most:
            raise LimitReachedError("processors", made, most, "max_processors_per_tenant", _CLOSE_SOME)

    async def _ensure_worker(self, session: _Session) -> None:
        async with session.starting:
            if session.worker is not None:
                return
            self._take_slot(session)
            try:
                worker = await WorkerProcess.start(self._settings, self._directory, session.lost)
            except OSError:
                session.has_slot = False
                raise
            session.worker = worker
        if session.over:  # the session ended while the worker started, too early for end_session to end the worker
            await worker.end("the session is over")
            raise UnknownProcessorError("session")

    def _take_slot(self, session: _Session) -> None:
        if self._stopping:
            raise ShuttingDownError
        taken = [other for other in self._sessions.values() if other.has_slot]
        used = sum(other.tenant_id == session.tenant_id for other in taken)
        most = self._limits.max_processor_sessions_per_tenant
        if used >= most:
            key = "max_processor_sessions_per_tenant"
            raise LimitReachedError("sessions with processors", used, most, key, _END_ONE)
        used, most = len(taken), self._most_workers
        if used >= most:
            advice = "wait until another session with processors ends"
            raise QuotaError("workers for processors on this server", used, most, "processor_workers", advice)
        session.has_slot = True

    async def _end_if_empty(self, session: _Session) -> None:
        """End a worker without objects, so that another session can have its slot."""
        worker = session.worker
        if worker is not None and not (session.live or session.being_made or session.waiting):
            session.worker, session.has_slot, session.kept_bytes = None, False, 0
            await worker.end("it was empty")


def _rows(lines: bytes) -> list[dict[str, Any]]:
    """Parse rows one by one, so that other threads can run in between. Columns that training reads become arrays."""
    return [_row(json.loads(line)) for line in lines.split(b"\n") if line]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {name: numbers(value, f"inputs.{name}") if name in FIELDS else value for name, value in row.items()}


def configured_processors(
    config: ServerConfig, tokenizers: Mapping[str, str | None], place: str = ""
) -> ProcessorService | None:
    """Return the processor service; None if the configuration has no application for it.

    ``tokenizers`` maps names of served models to folders. ``place``: the subdirectory of this service, if several
    services share a data directory.
    """
    if config.processor is None:
        return None
    limits = config.limits
    settings = Settings(
        allowed_dirs=[str(directory) for directory in config.allowed_dirs],
        tokenizers=dict(tokenizers),
        cache_dir="",  # each worker has its own
        memory_bytes=int(limits.processor_memory_gib * 2**30),
        answer_bytes=limits.max_request_bytes,
        hub_bytes=limits.max_hub_download_bytes,
        disk_bytes=int(limits.processor_disk_gib * 2**30),
    )
    return ProcessorService(config.data_dir / "processors" / place, settings, limits, config.processor.max_workers)
