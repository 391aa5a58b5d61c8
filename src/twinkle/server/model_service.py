"""The model service: accepts ops for the adapters of one base model, runs them in shared batches, keeps its promises.

The life of an op: ``submit`` journals it and hands it to the :class:`~twinkle.server.op_runner.OpRunner`, whose outcome
``wait`` waits for. If the process dies in between, ``start`` begins at each adapter's last snapshot and runs the
journalled ops again, in order; clients find the same futures under the same ids.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.errors import NotFoundError, QuotaError, UserError
from twinkle.server.backend import ServedModel
from twinkle.server.compute import Compute
from twinkle.server.files import DataDir
from twinkle.server.futures import Futures
from twinkle.server.ids import is_native_run, split_request_id
from twinkle.server.live_adapter import LiveAdapter, Place
from twinkle.server.live_versions import LiveVersion, LiveVersions
from twinkle.server.native.codec import refused_op, verb_op
from twinkle.server.native.errors import SequenceConflictError
from twinkle.server.native.features import Row, are_encoded, as_rows, checked_rows
from twinkle.server.op_runner import OpRunner
from twinkle.server.rates import RecentRate
from twinkle.server.recovery import read_replay
from twinkle.server.state import Store
from twinkle.server.templates import Templates
from twinkle.server.types import Op, Outcome, RunRecord, digest
from twinkle.server.wire import responses

logger = logging.getLogger(__name__)

# Ids of futures that never had a place in a sequence: the number is far beyond any sequence.
_REFUSED_FROM = 10**18
# Sequence numbers this far beyond the last one are a mistake; a call of many chunks takes some dozens.
_FURTHEST_AHEAD = 10_000
_SMALL_BODY = 16_384  # bytes: what is shorter is understood in a fraction of a millisecond


class ModelService:
    def __init__(
        self,
        model: ServedModel,
        templates: Templates,
        store: Store,
        compute: Compute,
        files: DataDir,
        *,
        merge: bool = True,
        allowed_dirs: Sequence[Path] = (),
        max_queued_ops: int = 1024,
        max_unfetched_bytes: int = 2**30,
        futures: Futures | None = None,
    ) -> None:
        self.model = model
        self._store = store
        self._files = files
        self._futures = futures or Futures()
        self._max_queued_ops = max_queued_ops
        self._max_unfetched_bytes = max_unfetched_bytes
        self._runner = OpRunner(
            model, templates, store, compute, files, self._futures, merge=merge, allowed_dirs=allowed_dirs
        )
        self._adapters = self._runner.adapters
        self._scheduler = self._runner.scheduler
        self._live_versions = LiveVersions(model, self._runner, compute)
        self._refused_ids = itertools.count(_REFUSED_FROM)
        self._rate = RecentRate(time.time())

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring back what was there before, then work."""
        for run in await self._store.runs.in_state("live"):
            if run.model_name == self.model.name:
                await self._recover(run)
        self._runner.start()

    async def stop(self) -> None:
        """Finish what is on the device, put every changed adapter on disk, and end."""
        await self._runner.stop()

    async def _recover(self, run: RunRecord) -> None:
        snapshot = await self._store.snapshots.get(run.run_id)
        applied = -1 if snapshot is None else snapshot.seq
        # Without a snapshot its creation is among the ops to replay.
        adapter = LiveAdapter(run, Place.NOWHERE if snapshot is None else Place.DISK, highest_seq=max(applied, 0))
        self._adapters[run.run_id] = adapter
        self._scheduler.add_adapter(
            run.run_id,
            run.tenant_id,
            next_seq=applied + 1,
            failed_seq=None if snapshot is None else snapshot.failed_seq,
        )
        replays = await read_replay(self._store, run, applied)
        for replay in replays:
            adapter.replays[replay.op.seq] = replay
            self._runner.enqueue(adapter, replay.op)
        if replays:
            logger.info("replaying %d ops of %s from %d", len(replays), run.run_id, applied + 1)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def create(self, run: RunRecord, op: Op) -> str:
        """A new adapter. The same run may arrive again, when a client did not hear our answer."""
        accepted = await self._store.ops.accept_run(run, op, op.digest, time.time())
        # Without a record it was created long ago, and nobody knows any more with which request.
        if accepted.record is not None and accepted.record.digest != op.digest:
            used = f"model_seq_id {run.number} was used"
            if is_native_run(run.run_id):
                used = f"an adapter of this name was added to this session, {run.run_id},"
            return self.refuse(run, f"{used} before with another request")
        if accepted.record is None and accepted.run.state == "parked":
            return self.refuse(run, f"model_seq_id {run.number} is in use: {accepted.run.note}")
        if accepted.created:
            adapter = LiveAdapter(run, Place.NOWHERE)
            self._adapters[run.run_id] = adapter
            self._scheduler.add_adapter(run.run_id, run.tenant_id)
            self._runner.enqueue(adapter, op)
        return op.request_id

    async def submit(self, op: Op) -> str:
        """Accept an op; returns the id of its future once the op is safe on disk."""
        adapter = self._adapters.get(op.adapter_id)
        if adapter is None:
            raise NotFoundError("model", op.adapter_id)
        self._check_quota(adapter, op)
        if op.seq > adapter.highest_seq + _FURTHEST_AHEAD:
            allowed = f"at most {_FURTHEST_AHEAD} beyond the last one, {adapter.highest_seq}"
            return self.refuse(adapter.run, f"seq_id: got {op.seq}, allowed: {allowed}")
        if await self._comes_too_late(op):
            return self.refuse(adapter.run, f"seq_id {op.seq} came too late: {op.adapter_id} has gone on without it")
        accepted = await self._store.ops.accept(op, op.digest, time.time())
        if accepted.record.digest != op.digest:
            return self.refuse(adapter.run, _conflict(op))
        if accepted.created:
            adapter.last_request_at = time.time()
            self._futures.promise(op.request_id, adapter.run.tenant_id)
            message = (
                self._runner.enqueue(adapter, op) if op.adapter_id in self._adapters else "the model was just removed"
            )
            if message is not None:
                self._runner.settle(adapter, op, responses.failed(message, "user"))
        return op.request_id

    async def submit_verb(
        self, run_id: str, seq: int | None, verb: str, sent: bytes, fields: Callable[[], Awaitable[Mapping[str, Any]]]
    ) -> str:
        """A native request; ``fields`` finds out what it means, with rows of tokens for its inputs.

        Without a number it gets the next one. A number that is used again gets its answer without asking ``fields``: a
        batch that was meant may be gone by then.
        """
        adapter = self._adapters.get(run_id)
        if adapter is None:
            raise NotFoundError("model", run_id)
        if seq is None:
            meant = await fields()
            async with adapter.numbering:
                seq = max(adapter.highest_seq + 1, self._scheduler.next_seq(run_id))
                return await self.submit(await _understood(run_id, seq, verb, meant, sent))
        record = await self._store.ops.get(run_id, seq)
        if record is not None:
            if record.digest != digest(sent):
                raise SequenceConflictError(run_id, seq)
            return f"{run_id}:{seq}"
        try:
            op = await _understood(run_id, seq, verb, await fields(), sent)
        except UserError as error:  # its place in the sequence is taken all the same
            op = refused_op(run_id, seq, verb, str(error), sent)
        return await self.submit(op)

    async def rows(self, run_id: str, inputs: object, max_tokens: int) -> tuple[Row, ...]:
        """What to train on: conversations go through the adapter's template first."""
        rows = as_rows(inputs)
        if not are_encoded(rows):
            adapter = self._adapters.get(run_id)
            while adapter is not None and adapter.repeats and not self._runner.stopping:
                await adapter.next_end()  # its template may be among what is done again after a restart
            if adapter is None or not await self._runner.load(adapter):
                raise NotFoundError("model", run_id)
            rows = await asyncio.to_thread(self._runner.native.adapters.encode, run_id, rows)
        return await asyncio.to_thread(checked_rows, rows, max_tokens)

    async def _comes_too_late(self, op: Op) -> bool:
        """Whether the op's number was given up as missing. Then it stays so in the journal, for replays to repeat."""
        if op.seq >= self._scheduler.next_seq(op.adapter_id):
            return False
        return await self._store.ops.get(op.adapter_id, op.seq) is None

    async def wait(self, request_id: str, adapter_id: str, seq: int, timeout: float) -> Outcome | None:
        """The outcome, or None while there is none; NotFoundError when nobody knows the id (any more)."""
        if request_id in self._futures:
            return await self._futures.wait(request_id, timeout, time.time())
        outcome = await self._store.ops.outcome(adapter_id, seq)
        if outcome is None:
            raise NotFoundError("request", request_id)
        return outcome

    async def park(self, run: RunRecord, why: str, keep_seconds: float) -> None:
        """Take an adapter off the device and keep its last state as a checkpoint.

        What was done before a restart is done again first, what runs is finished, what still waits fails.
        """
        adapter = self._adapters.get(run.run_id)
        while adapter is not None and adapter.repeats and not self._runner.stopping:
            await adapter.next_end()
        if adapter is None or self._runner.stopping or self._adapters.pop(run.run_id, None) is None:
            return
        waiting = [adapter.ops.pop(ticket.seq) for ticket in self._scheduler.remove_adapter(run.run_id)]
        while adapter.ops:
            await adapter.next_end()
        loaded = await self._runner.load(adapter)
        note = await self._runner.checkpoints.park(run, why, keep_seconds) if loaded else None
        for op in waiting:
            message = note or f"session {run.session_id} {why}, and its adapter could not be kept"
            self._runner.settle(adapter, op, responses.failed(message, "user"))
        if note is None:  # its journal and snapshot stay: the next start tries again
            logger.error("%s could not be kept as a checkpoint when its session %s", run.run_id, why)
            return
        await self._store.runs.set_state(run.run_id, "parked", note)
        self._runner.snapshots.forget(run.run_id)
        await self._runner.snapshots.finish_writing()
        await self._store.snapshots.delete(run.run_id)
        await asyncio.to_thread(self._files.remove_snapshots, run.run_id)
        logger.info("%s left the device: its session %s", run.run_id, why)

    async def live_version(self, run_id: str) -> LiveVersion | None:
        """The adapter as it is now, for sampling; None if it is not (any more) here."""
        adapter = self._adapters.get(run_id)
        return None if adapter is None else await self._live_versions.of(adapter)

    def run(self, run_id: str) -> RunRecord | None:
        adapter = self._adapters.get(run_id)
        return None if adapter is None else adapter.run

    def adapters_of(self, tenant_id: str) -> int:
        return sum(adapter.run.tenant_id == tenant_id for adapter in self._adapters.values())

    def last_requests(self) -> dict[str, float]:
        """When each adapter was last asked for something, as far as that is news."""
        return {run_id: a.last_request_at for run_id, a in self._adapters.items() if a.last_request_at}

    def queued(self, run_id: str) -> int:
        adapter = self._adapters.get(run_id)
        return 0 if adapter is None else len(adapter.ops)

    def sweep(self, now: float) -> list[tuple[str, int]]:
        """Forget outcomes that were kept long enough; returns (run id, number) of what was fetched since last time."""
        self._futures.sweep(now)
        self._rate.note(self._trained_tokens(), now)
        parts = (split_request_id(request_id) for request_id in self._futures.take_delivered())
        return [part for part in parts if part is not None and part[1] < _REFUSED_FROM]

    def release_waiters(self) -> None:
        self._futures.close()

    def _check_quota(self, adapter: LiveAdapter, op: Op) -> None:
        """A request that fills a gap before waiting ones is always let in: without it they would wait in vain."""
        fills_gap = bool(adapter.ops) and op.seq < max(adapter.ops)
        depth = self._scheduler.waiting(adapter.run.tenant_id)
        if depth >= self._max_queued_ops and not fills_gap:
            raise QuotaError("queued ops", depth, self._max_queued_ops)
        unfetched = self._futures.unfetched_bytes(adapter.run.tenant_id)
        if unfetched >= self._max_unfetched_bytes:
            raise QuotaError("bytes of results not fetched", unfetched, self._max_unfetched_bytes)

    def refuse(self, run: RunRecord, message: str) -> str:
        """A future that has failed already: the SDK takes a failed future well, and a 409 as a reason to try again."""
        request_id = f"{run.run_id}:{next(self._refused_ids)}"
        self._futures.promise(request_id, run.tenant_id)
        self._futures.settle(request_id, responses.failed(message, "user"), time.time())
        return request_id

    @property
    def alive(self) -> bool:
        return self._runner.alive

    def status(self) -> dict[str, object]:
        numbers = self._scheduler.numbers()
        return {
            "adapters": len(self._adapters),
            "queued_ops": sum(numbers.waiting.values()),
            "ops": numbers.ops,
            "batches": numbers.pass_batches,
            "merge_ratio": round(numbers.merge_ratio, 2),
            "trained_tokens": self._trained_tokens(),
            "training_tokens_per_second": self._rate.rate(self._trained_tokens(), time.time()),
            "training_seconds": round(self._runner.busy_seconds, 6),
        }

    def _trained_tokens(self) -> int:
        return sum(self._scheduler.numbers().tokens.values())


async def _understood(run_id: str, seq: int, verb: str, fields: Mapping[str, Any], sent: bytes) -> Op:
    """Its body for the journal and its digest take a second for a million tokens: not on the event loop."""

    def digested() -> Op:
        op = verb_op(run_id, seq, verb, fields, sent)
        assert op.digest, "it is kept"
        return op

    return digested() if "inputs" not in fields and len(sent) < _SMALL_BODY else await asyncio.to_thread(digested)


def _conflict(op: Op) -> str:
    return f"seq_id {op.seq} of model {op.adapter_id} was used before with another request; each request needs its own"
