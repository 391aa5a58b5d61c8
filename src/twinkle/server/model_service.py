"""The model service: accepts ops for the adapters of one base model, runs them in shared batches, keeps its promises.

The life of an op: ``submit`` journals it and hands a ticket to the scheduler; the pump takes batches from the scheduler
to the compute thread; outcomes settle futures at once and go to the journal behind them. If the process dies in
between, ``recover`` starts from each adapter's last snapshot and runs the journalled ops again, in order; clients find
the same futures under the same ids.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import time
from collections.abc import Coroutine, Sequence
from functools import partial

from twinkle.errors import NotFoundError, QuotaError, TwinkleError
from twinkle.server.backend import ServedModel
from twinkle.server.checkpoints import Checkpoints
from twinkle.server.compute import Compute
from twinkle.server.execution import Execution, unexpected
from twinkle.server.files import DataDir, read_snapshot
from twinkle.server.futures import Futures
from twinkle.server.ids import split_request_id
from twinkle.server.live_adapter import LiveAdapter, Place, Task
from twinkle.server.recovery import read_replay
from twinkle.server.scheduler import Batch, Scheduler
from twinkle.server.scheduler_sequence import Conflict, Duplicate, Refusal, RefusalReason, Ticket, TooLate
from twinkle.server.snapshots import Snapshots
from twinkle.server.state import Store
from twinkle.server.types import Op, OpKind, Outcome, RunRecord, TrainPass
from twinkle.server.wire import responses

logger = logging.getLogger(__name__)

# Ids of futures that never had a place in a sequence: the number is far beyond any sequence.
_REFUSED_FROM = 10**18
# Sequence numbers this far beyond the last one are a mistake; a call of many chunks takes some dozens.
_FURTHEST_AHEAD = 10_000


class ModelService:
    def __init__(
        self,
        model: ServedModel,
        store: Store,
        compute: Compute,
        files: DataDir,
        *,
        merge: bool = True,
        max_queued_ops: int = 1024,
        max_unfetched_bytes: int = 2**30,
        futures: Futures | None = None,
    ) -> None:
        self.model = model
        self.scheduler = Scheduler(model.tokens_per_batch, merge=merge)
        self.busy_seconds = 0.0
        self._store = store
        self._compute = compute
        self._files = files
        self._futures = futures or Futures()
        self._max_queued_ops = max_queued_ops
        self._max_unfetched_bytes = max_unfetched_bytes
        self._execution = Execution(model)
        self._checkpoints = Checkpoints(model, store, compute, files)
        self._snapshots = Snapshots(model, store, compute, files)
        self._adapters: dict[str, LiveAdapter] = {}
        self._refused_ids = itertools.count(_REFUSED_FROM)
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pump: asyncio.Task[None] | None = None
        self._stopping = False

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring back what was there before, then work."""
        for run in await self._store.runs.in_state("live"):
            if run.model_name == self.model.name:
                await self._recover(run)
        self._pump = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Finish what is on the device, put every changed adapter on disk, and end."""
        self._stopping = True
        self._wake.set()
        for adapter in self._adapters.values():
            adapter.op_ended.set()  # whoever waits for the next one waits in vain
        if self._pump is not None:
            await self._pump
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for adapter_id in self._snapshots.changed():
            await self._snapshots.finish_writing()
            await self._snapshot(adapter_id)
        await self._snapshots.finish_writing()

    async def _recover(self, run: RunRecord) -> None:
        snapshot = await self._store.snapshots.get(run.run_id)
        applied = -1 if snapshot is None else snapshot.seq
        # Without a snapshot its creation is among the ops to replay.
        adapter = LiveAdapter(run, Place.NOWHERE if snapshot is None else Place.DISK)
        self._adapters[run.run_id] = adapter
        self.scheduler.add_adapter(
            run.run_id,
            run.tenant_id,
            next_seq=applied + 1,
            failed_seq=None if snapshot is None else snapshot.failed_seq,
        )
        replays = await read_replay(self._store, run, applied)
        for replay in replays:
            adapter.replays[replay.op.seq] = replay
            self._enqueue(adapter, replay.op)
        if replays:
            logger.info("replaying %d ops of %s from %d", len(replays), run.run_id, applied + 1)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def create(self, run: RunRecord, op: Op) -> str:
        """A new adapter. The same run may arrive again, when a client did not hear our answer."""
        accepted = await self._store.ops.accept_run(run, op, digest_of(op.body), time.time())
        # Without a record it was created long ago, and nobody knows any more with which request.
        if accepted.record is not None and accepted.record.digest != digest_of(op.body):
            return self.refuse(run, f"model_seq_id {run.number} was used before with another request")
        if accepted.created:
            adapter = LiveAdapter(run, Place.NOWHERE)
            self._adapters[run.run_id] = adapter
            self.scheduler.add_adapter(run.run_id, run.tenant_id)
            self._enqueue(adapter, op)
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
        accepted = await self._store.ops.accept(op, digest_of(op.body), time.time())
        if accepted.record.digest != digest_of(op.body):
            return self.refuse(adapter.run, _conflict(op))
        if accepted.created:
            adapter.last_request_at = time.time()
            self._futures.promise(op.request_id, adapter.run.tenant_id)
            message = self._enqueue(adapter, op) if op.adapter_id in self._adapters else "the model was just removed"
            if message is not None:
                self._settle(adapter, op, responses.failed(message, "user"))
        return op.request_id

    async def _comes_too_late(self, op: Op) -> bool:
        """Whether the op's number was given up as missing. Then it stays so in the journal, for replays to repeat."""
        if op.seq >= self.scheduler.next_seq(op.adapter_id):
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
        while adapter is not None and adapter.repeats and not self._stopping:
            await adapter.next_end()
        if adapter is None or self._stopping or self._adapters.pop(run.run_id, None) is None:
            return
        waiting = [adapter.ops.pop(ticket.seq) for ticket in self.scheduler.remove_adapter(run.run_id)]
        while adapter.ops:
            await adapter.next_end()
        if await self._load(adapter):
            note = await self._checkpoints.park(run, why, keep_seconds)
        else:
            note = f"session {run.session_id} {why}, and its adapter could not be read from disk"
        for op in waiting:
            self._settle(adapter, op, responses.failed(note, "user"))
        await self._store.runs.set_state(run.run_id, "parked", note)
        self._snapshots.forget(run.run_id)
        await self._snapshots.finish_writing()
        await self._store.snapshots.delete(run.run_id)
        await asyncio.to_thread(self._files.remove_snapshots, run.run_id)
        logger.info("%s left the device: its session %s", run.run_id, why)

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
        parts = (split_request_id(request_id) for request_id in self._futures.take_delivered())
        return [part for part in parts if part is not None and part[1] < _REFUSED_FROM]

    def release_waiters(self) -> None:
        self._futures.close()

    def _check_quota(self, adapter: LiveAdapter, op: Op) -> None:
        """A request that fills a gap before waiting ones is always let in: without it they would wait in vain."""
        fills_gap = bool(adapter.ops) and op.seq < max(adapter.ops)
        depth = self.scheduler.waiting(adapter.run.tenant_id)
        if depth >= self._max_queued_ops and not fills_gap:
            raise QuotaError("queued ops", depth, self._max_queued_ops)
        unfetched = self._futures.unfetched_bytes(adapter.run.tenant_id)
        if unfetched >= self._max_unfetched_bytes:
            raise QuotaError("bytes of results not fetched", unfetched, self._max_unfetched_bytes)

    def _enqueue(self, adapter: LiveAdapter, op: Op) -> str | None:
        """Hand an op to the scheduler; returns why it was not taken, if so."""
        tokens = op.payload.tokens if isinstance(op.payload, TrainPass) else 0
        ticket = Ticket(op.adapter_id, op.seq, op.kind, tokens, digest_of(op.body))
        submitted = self.scheduler.submit(ticket, time.monotonic())
        if isinstance(submitted, Conflict | TooLate):
            return submitted.message
        if isinstance(submitted, Duplicate) and op.seq not in adapter.ops:
            return f"seq_id {op.seq} was answered long ago, and its result is not kept any more"
        adapter.ops.setdefault(op.seq, op)
        adapter.highest_seq = max(adapter.highest_seq, op.seq)
        self._futures.promise(op.request_id, adapter.run.tenant_id)
        self._wake.set()
        return None

    def refuse(self, run: RunRecord, message: str) -> str:
        """A future that has failed already: the SDK takes a failed future well, and a 409 as a reason to try again."""
        request_id = f"{run.run_id}:{next(self._refused_ids)}"
        self._futures.promise(request_id, run.tenant_id)
        self._futures.settle(request_id, responses.failed(message, "user"), time.time())
        return request_id

    # --- the pump -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            now = time.monotonic()
            await self._refuse_all(self.scheduler.refusals(now))
            batch = self.scheduler.next_batch()
            if batch is not None:
                await self._run_batch(batch)
            due = self._snapshots.due(now)
            if due is not None:
                await self._snapshot(due)
            if batch is None and due is None:
                await self._sleep(now)

    async def _sleep(self, now: float) -> None:
        deadlines = [t for t in (self.scheduler.next_deadline(), self._snapshots.next_due()) if t is not None]
        timeout = max(0.0, min(deadlines) - now) if deadlines else None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout)

    async def _run_batch(self, batch: Batch) -> None:
        tasks = [self._task(ticket) for ticket in batch.tickets]
        try:
            tasks = [task for task in tasks if not await self._repeat_outcome(task) and await self._is_here(task)]
            slow = [task for task in tasks if task.op.kind in (OpKind.SAVE, OpKind.PUBLISH, OpKind.LOAD)]
            quick = [task for task in tasks if task not in slow]
            for task in slow:  # these wait for disk and database: other adapters go on meanwhile
                self._background(self._run_slow(task))
            if quick:
                await self._run_quick(quick)
        except Exception as error:  # noqa: BLE001 - the trainer loop is an edge: a bug fails its batch, not the server
            for task in tasks:
                if not task.finished:
                    self._finish(task, unexpected(error, task.op.request_id))

    async def _run_quick(self, tasks: Sequence[Task]) -> None:
        ops = [task.op for task in tasks]
        logger.debug("batch: %s", " ".join(op.request_id for op in ops))
        started = time.perf_counter()
        run = self._execution.passes if ops[0].kind.is_pass else self._execution.short_barriers
        outcomes = await self._compute.run(lambda: run(ops))
        self.busy_seconds += time.perf_counter() - started
        for task, outcome in zip(tasks, outcomes, strict=True):
            if task.op.kind is OpKind.CREATE and not outcome.failed:
                task.adapter.place = Place.TRAINER
            self._finish(task, outcome)

    async def _run_slow(self, task: Task) -> None:
        outcome = await self._checkpoints.run(task.op, task.adapter.run)
        if task.op.kind is OpKind.LOAD and not outcome.failed:
            await self._keep_loaded(task.op, outcome)
        self._finish(task, outcome)

    async def _keep_loaded(self, op: Op, outcome: Outcome) -> None:
        """Once the client hears of a load, its source may be replaced or deleted: no replay may need it any more."""
        try:
            # In this order: a snapshot covers only ops whose outcome is on record.
            await self._store.ops.record_outcomes([(op.adapter_id, op.seq, outcome)], time.time())
            await self._snapshots.take_now(op.adapter_id, op.seq, None)
        except Exception:  # the trainer loop is an edge; the weights are loaded all the same
            logger.exception("no snapshot of %s after %s", op.adapter_id, op.request_id)

    async def _repeat_outcome(self, task: Task) -> bool:
        """After a restart: what failed fails again, what only wrote files is not written twice."""
        replay = task.adapter.replays.get(task.op.seq)
        if replay is None or replay.outcome is None or replay.must_run:
            return False
        if task.op.kind is OpKind.OPTIM_STEP:  # it closed its window all the same
            await self._drop_window(task.adapter)
        self._finish(task, replay.outcome)
        return True

    async def _is_here(self, task: Task) -> bool:
        """Whether the op can run; brings the adapter from its snapshot to the trainer, once."""
        if task.op.kind is OpKind.CREATE or await self._load(task.adapter):
            return True
        message = f"model {task.op.adapter_id} could not be created or read from disk; load one of its checkpoints"
        self._finish(task, responses.failed(message, "user"))
        return False

    async def _load(self, adapter: LiveAdapter) -> bool:
        run_id = adapter.run.run_id
        if adapter.place is Place.DISK:
            try:
                record = await self._store.snapshots.get(run_id)
                assert record is not None, "an adapter that is on disk has a snapshot"
                snapshot = await asyncio.to_thread(read_snapshot, self._files.root / record.directory)
                await self._compute.run(lambda: self.model.trainer.restore(run_id, snapshot))
                adapter.place = Place.TRAINER
            except TwinkleError:
                logger.exception("snapshot of %s cannot be restored", run_id)
        return adapter.place is Place.TRAINER

    async def _drop_window(self, adapter: LiveAdapter) -> None:
        """Forget the gradient since the last optim_step, also where it is still in a snapshot."""
        if await self._load(adapter):
            await self._compute.run(partial(self._execution.drop_window, adapter.run.run_id))

    async def _refuse_all(self, refusals: Sequence[Refusal]) -> None:
        tasks = [(refusal, self._task(refusal.ticket)) for refusal in refusals]
        for refusal, task in tasks:
            if refusal.drops_gradient:
                await self._drop_window(task.adapter)
            self._settle(task.adapter, task.op, responses.failed(refusal.message, "user"))
            # A gap that was given up is forgotten with the next snapshot; until then a replay repeats it.
            self._snapshots.note(task.op.adapter_id, time.monotonic(), urgent=refusal.reason is RefusalReason.GAP)

    def _task(self, ticket: Ticket) -> Task:
        adapter = self._adapters[ticket.adapter_id]
        return Task(ticket, adapter, adapter.ops[ticket.seq])

    def _finish(self, task: Task, outcome: Outcome) -> None:
        task.finished = True
        self.scheduler.finish(task.ticket, failed=outcome.failed)
        self._settle(task.adapter, task.op, outcome)
        self._wake.set()

    def _settle(self, adapter: LiveAdapter, op: Op, outcome: Outcome) -> None:
        """Tell whoever waits, then write it down. What is lost in between is computed again."""
        adapter.ops.pop(op.seq, None)
        replay = adapter.replays.pop(op.seq, None)
        if replay is not None and replay.outcome is not None:
            if outcome.failed and not replay.outcome.failed:
                logger.error("replay of %s failed, though it had succeeded before", op.request_id)
            outcome = replay.outcome
        else:
            self._background(self._store.ops.record_outcomes([(op.adapter_id, op.seq, outcome)], time.time()))
        self._futures.settle(op.request_id, outcome, time.time())
        adapter.op_ended.set()
        if op.kind is not OpKind.FORWARD:
            self._snapshots.note(op.adapter_id, time.monotonic())

    async def _snapshot(self, adapter_id: str) -> None:
        adapter = self._adapters.get(adapter_id)
        if adapter is None or adapter.place is not Place.TRAINER:
            self._snapshots.forget(adapter_id)
            return
        position = self.scheduler.position(adapter_id)
        if position is None:  # one of its ops is running and may change it
            self._snapshots.postpone(adapter_id, time.monotonic())
            return
        try:
            await self._snapshots.take(adapter_id, position.seq, position.failed_seq)
        except Exception:  # the trainer loop is an edge; the journal still has everything
            logger.exception("no snapshot of %s", adapter_id)
            self._snapshots.postpone(adapter_id, time.monotonic())

    def _background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        """What could not be written down is lost at most until it is computed again."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("background work failed", exc_info=task.exception())

    def status(self) -> dict[str, object]:
        numbers = self.scheduler.numbers()
        return {
            "adapters": len(self._adapters),
            "queued_ops": sum(numbers.waiting.values()),
            "ops": numbers.ops,
            "batches": numbers.pass_batches,
            "merge_ratio": round(numbers.merge_ratio, 2),
            "trained_tokens": sum(numbers.tokens.values()),
            "training_seconds": round(self.busy_seconds, 3),
        }


def digest_of(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


def _conflict(op: Op) -> str:
    return f"seq_id {op.seq} of model {op.adapter_id} was used before with another request; each request needs its own"
