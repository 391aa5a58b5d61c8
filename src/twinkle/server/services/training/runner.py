"""Running ops: from tickets of the scheduler to outcomes, for all adapters of one base model.

One loop takes batches to the compute thread. Ops that wait for disk and database run beside it: other
adapters go on meanwhile. An outcome settles its future at once and goes to the journal behind that.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.compute_thread import Compute, compute_thread, event_loop
from twinkle.server.scheduling.scheduler import Batch, Scheduler
from twinkle.server.scheduling.sequence import Conflict, Duplicate, Refusal, RefusalReason, Ticket, TooLate
from twinkle.server.services.checkpoints.save_and_load import Checkpoints
from twinkle.server.services.futures import Futures
from twinkle.server.services.running_ops import MOST_DEATHS, RunningOps
from twinkle.server.services.service_loop import BackgroundTasks, ServiceLoop
from twinkle.server.services.training.adapters import LiveAdapter, LiveAdapters, Place
from twinkle.server.services.training.execution import Execution, unexpected
from twinkle.server.services.training.long_passes import LongPasses, LoopTurns
from twinkle.server.services.training.measurements import RunMeasurements
from twinkle.server.services.training.settlement import Settlement
from twinkle.server.services.training.snapshots import Snapshots
from twinkle.server.state.store import Store
from twinkle.server.telemetry.recording import TrainingRecorder
from twinkle.server.types import Ending, Op, OpKind, Outcome

logger = logging.getLogger(__name__)


@dataclass
class Task:
    """An op on its way through the device. The adapter may leave the service meanwhile."""

    ticket: Ticket
    adapter: LiveAdapter
    op: Op
    finished: bool = False
    in_background: bool = False  # it ends by itself, whatever becomes of its batch


class OpRunner:
    """Runs the accepted ops of one model service. Belongs to the event loop."""

    def __init__(
        self,
        model: ServedModel,
        store: Store,
        compute: Compute,
        scheduler: Scheduler,
        adapters: LiveAdapters,
        settlement: Settlement,
        snapshots: Snapshots,
        checkpoints: Checkpoints,
        measurements: RunMeasurements,
        execution: Execution,
        futures: Futures,
        recorder: TrainingRecorder,
        running: RunningOps,
        background: BackgroundTasks,
    ) -> None:
        """``running`` notes on disk what runs."""
        self.busy_seconds = 0.0
        self.loop = ServiceLoop(f"training on {model.name}")
        self._model = model
        self._store = store
        self._compute = compute
        self._scheduler = scheduler
        self._adapters = adapters
        self._settlement = settlement
        self._snapshots = snapshots
        self._checkpoints = checkpoints
        self._measurements = measurements
        self._execution = execution
        self._futures = futures
        self._recorder = recorder
        self._running = running
        self._background = background
        self._turns = LoopTurns()
        self._long_passes = LongPasses(compute, scheduler, execution, self._turns)
        self._stopping = False
        self._wake = asyncio.Event()

    def start(self) -> None:
        self.loop.start(self._run())

    async def stop(self) -> None:
        """Finish what is on the device, put every changed adapter on disk, and end."""
        self._stopping = self._adapters.stopping = self._settlement.stopping = True
        self._running.stopping()
        self._wake.set()
        for adapter in self._adapters:
            adapter.op_ended.set()  # nothing more of it will end: whoever waits sees that the server stops
        await self.loop.ended()
        await self._background.finish()
        # After a bug nobody knows what state adapters are in: the next server begins at the last snapshots.
        for adapter_id in () if self.loop.failed else self._snapshots.noted():
            await self._snapshots.finish_writing()
            await self._adapters.snapshot(adapter_id)
        await self._snapshots.finish_writing()
        await self._measurements.stop()
        self._running.close()

    @event_loop
    def enqueue(self, adapter: LiveAdapter, op: Op) -> str | None:
        """Hand an op to the scheduler; returns why it was not taken, if so."""
        spoils = adapter.kind.failed_pass_spoils
        ticket = Ticket(op.adapter_id, op.seq, op.kind, op.tokens, op.digest, op.price.work, op.is_step, spoils)
        submitted = self._scheduler.submit(ticket, time.monotonic())
        if isinstance(submitted, Conflict | TooLate):
            return submitted.message
        if isinstance(submitted, Duplicate) and op.seq not in adapter.ops:
            return f"seq_id {op.seq} was answered long ago, and its result is not kept any more"
        self._recorder.accepted(op)
        adapter.ops.setdefault(op.seq, op)
        adapter.highest_seq = max(adapter.highest_seq, op.seq)
        replay = adapter.replays.get(op.seq)
        if replay is None or not replay.ended:  # otherwise the journal has the outcome for whoever asks
            self._futures.promise(op.request_id, adapter.run.tenant_id)
        self._wake.set()
        return None

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._run_batches()
        finally:
            self._turns.end(idle=True)  # nobody waits for it any more

    async def _run_batches(self) -> None:
        while not self._stopping:
            self._turns.begin()
            self._wake.clear()
            now = time.monotonic()
            await self._refuse_all(self._scheduler.refusals(now))
            batch = self._scheduler.next_batch()
            if batch is not None and batch.long and self._may_run_beside():
                self._background.start(self._run_long(batch))
            elif batch is not None:
                await self._run_batch(batch)
                self._turns.end(idle=False)
                await self._adapters.make_room()
            due = self._snapshots.due(now)
            if due is not None:
                await self._adapters.snapshot(due)
            if batch is None and due is None:
                self._turns.end(idle=True)
                # Ops that ended beside the loop may have kept adapters here; nobody may come who runs another batch.
                await self._adapters.make_room()
                await self._sleep(time.monotonic())

    async def _sleep(self, now: float) -> None:
        deadlines = [t for t in (self._scheduler.next_deadline(), self._snapshots.next_due()) if t is not None]
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(max(0.0, min(deadlines) - now), self._wake.set)] if deadlines else []
        await self._wake.wait()
        for timer in timers:
            timer.cancel()

    def _may_run_beside(self) -> bool:
        """Whether one more long batch may run between those of others.

        Not while an op may have killed the last process: suspects run alone, and a batch would hold the loop up for
        the very turns that it waits for.
        """
        return self._long_passes.may_begin and not self._running.has_suspects

    async def _run_long(self, batch: Batch) -> None:
        """A batch that takes long: the loop goes on with those of other tenants between its steps."""
        try:
            async with self._long_passes.beside():
                await self._run_batch(batch, beside=True)
        finally:
            self._wake.set()

    async def _run_batch(self, batch: Batch, *, beside: bool = False) -> None:
        """``beside``: the loop does not wait for it."""
        tasks = [self._task(ticket) for ticket in batch.tickets]
        for part in self._running.apart([task.op.request_id for task in tasks]):
            await self._run_together(tasks[part], in_steps=batch.long, beside=beside)

    async def _run_together(self, tasks: Sequence[Task], *, in_steps: bool, beside: bool) -> None:
        """Run a batch, or a part of it: an op that may have killed the process is alone.

        ``in_steps``: batches of other tenants run between its micro-batches.
        """
        try:
            ready: list[Task] = []
            for task in tasks:
                if self._is_poison(task) or await self._repeat_outcome(task):
                    continue
                if ready and not await self._adapters.make_room_for(task.adapter, creating=task.op.kind.creates):
                    # Once they have run, their adapters may go to disk, and this one has room.
                    await self._run_tasks(ready, in_steps=in_steps, beside=beside)
                    ready = []
                await self._adapters.make_room_for(task.adapter, creating=task.op.kind.creates)
                if await self._has_come(task):
                    ready.append(task)
            await self._run_tasks(ready, in_steps=in_steps, beside=beside)
        except Exception as error:  # noqa: BLE001 - the trainer loop is an edge: a bug fails its batch, not the server
            for task in tasks:
                if not task.finished and not task.in_background:
                    self._finish(task, unexpected(error, task.op.request_id))

    async def _run_tasks(self, tasks: Sequence[Task], *, in_steps: bool, beside: bool) -> None:
        slow = [task for task in tasks if task.op.kind.takes_files]
        quick = [task for task in tasks if task not in slow]
        for task in slow:  # these wait for disk and database: other adapters go on meanwhile
            task.in_background = True
            self._background.start(self._run_slow(task))
        if quick:
            async with self._running.noted([task.op.request_id for task in quick]):
                await self._run_quick(quick, in_steps=in_steps, beside=beside)

    async def _has_come(self, task: Task) -> bool:
        """Whether the op can run; an adapter that comes from disk does so under a note of what the process works on."""
        if task.adapter.place is not Place.DISK:
            return await self._is_here(task)
        async with self._running.noted([task.op.request_id], decoding=True):
            return await self._is_here(task)

    async def _run_quick(self, tasks: Sequence[Task], *, in_steps: bool, beside: bool) -> None:
        ops = [task.op for task in tasks]
        logger.debug("batch: %s", " ".join(op.request_id for op in ops))
        if in_steps:
            outcomes = await self._run_in_steps(ops, tasks[0].adapter.run.tenant_id, beside=beside)
        else:
            outcomes = await self._compute.run(partial(self._execute, ops))
        for task, outcome in zip(tasks, outcomes, strict=True):
            if task.op.kind is OpKind.CREATE and not outcome.failed:
                task.adapter.place = Place.TRAINER
            self._finish(task, outcome)
            if task.op.kind is OpKind.CREATE and outcome.failed:
                self._adapters.fail(task.adapter, _not_created(task.adapter))
        self._measurements.write_soon()

    async def _run_in_steps(self, ops: Sequence[Op], tenant_id: str, *, beside: bool) -> list[Outcome]:
        for op in ops:
            self._recorder.started(op)
        outcomes, seconds = await self._long_passes.run(ops, tenant_id, beside=beside)
        self.busy_seconds += seconds
        self._recorder.stepped(ops, self._model.trainer, seconds)
        return outcomes

    @compute_thread
    def _execute(self, ops: Sequence[Op]) -> list[Outcome]:
        """In the compute thread."""
        started = time.perf_counter()
        run = self._execution.passes if ops[0].kind.is_pass else self._execution.short_barriers
        with self._recorder.batch(ops, self._model.trainer):
            outcomes = run(ops)
        self.busy_seconds += time.perf_counter() - started
        return outcomes

    def _is_poison(self, task: Task) -> bool:
        """Whether the process died with this op as often as it may; then the op has failed now, and never runs."""
        request_id = task.op.request_id
        deaths = self._running.deaths(request_id)
        if deaths < MOST_DEATHS:
            return False
        times = "twice" if deaths == 2 else f"{deaths} times"
        message = f"request {request_id}: the server died {times} while running it; it was not run again"
        logger.error("%s", message, extra={"request_id": request_id})
        self._running.forgive(request_id)
        self._finish(task, Outcome.failure(message, "server", Ending.REFUSED))
        if task.op.kind.creates:
            self._adapters.fail(task.adapter, _not_created(task.adapter))
        return True

    async def _run_slow(self, task: Task) -> None:
        async with self._running.noted([task.op.request_id]):
            if await self._is_here(task):
                await self._run_with_files(task)

    async def _run_with_files(self, task: Task) -> None:
        kind = task.op.kind
        self._recorder.started(task.op)
        outcome = await self._checkpoints.run(task.op, task.adapter.run)
        if kind.creates and not outcome.failed:
            task.adapter.place = Place.TRAINER
        if kind in (OpKind.LOAD, OpKind.CREATE_FROM) and not outcome.failed:
            await self._compute.run(partial(self._measurements.dropped, task.op.adapter_id))
            await self._keep_loaded(task.op, outcome)
        self._finish(task, outcome)
        if kind.creates and outcome.failed:
            self._adapters.fail(task.adapter, _not_created(task.adapter))

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
        if replay is None or replay.repeated is None:
            return False
        if replay.repeated.ending is Ending.DROPPED:
            await self._drop_window(task.adapter)
        self._finish(task, replay.repeated)
        return True

    async def _is_here(self, task: Task) -> bool:
        """Whether the op can run; brings the adapter from its snapshot to the trainer, once."""
        if task.op.kind.creates or await self._adapters.load(task.adapter):
            return True
        message = f"model {task.op.adapter_id} could not be created or read from disk; load one of its checkpoints"
        damage = await self._store.damage.of_run(task.op.adapter_id)
        message = message if damage is None else damage.message
        self._finish(task, Outcome.failure(message, "user"))
        return False

    async def _drop_window(self, adapter: LiveAdapter) -> None:
        """Forget the gradient since the last optim_step, also where it is still in a snapshot."""
        if await self._adapters.load(adapter):
            await self._compute.run(partial(self._execution.drop_window, adapter.run.run_id))

    async def _refuse_all(self, refusals: Sequence[Refusal]) -> None:
        tasks = [(refusal, self._task(refusal.ticket)) for refusal in refusals]
        for refusal, task in tasks:
            if refusal.drops_gradient:
                await self._drop_window(task.adapter)
            ending = Ending.DROPPED if refusal.drops_gradient else Ending.REFUSED
            outcome = Outcome.failure(refusal.message, "user", ending)
            self._running.forgive(task.op.request_id)
            self._settlement.settle(task.adapter, task.op, outcome)
            # A gap that was given up is forgotten with the next snapshot; until then a replay repeats it.
            self._snapshots.note(task.op.adapter_id, time.monotonic(), urgent=refusal.reason is RefusalReason.GAP)

    def _task(self, ticket: Ticket) -> Task:
        adapter = self._adapters.get(ticket.adapter_id)
        assert adapter is not None, "an adapter that leaves takes its tickets along"
        return Task(ticket, adapter, adapter.ops[ticket.seq])

    @event_loop
    def _finish(self, task: Task, outcome: Outcome) -> None:
        task.finished = True
        if task.op.changes_weights:
            task.adapter.changed_seq = task.op.seq
        self._scheduler.finish(task.ticket, failed=outcome.failed)
        self._settlement.settle(task.adapter, task.op, outcome)
        self._wake.set()


def _not_created(adapter: LiveAdapter) -> str:
    return f"model {adapter.run.run_id} could not be created"
