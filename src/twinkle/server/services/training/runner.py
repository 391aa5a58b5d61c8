"""Runs ops, from the scheduler's batches to their outcomes, for all adapters of one base model.

One loop takes batches to the compute thread. Ops that wait for the disk and the database run in background tasks, so
that other adapters continue meanwhile. An outcome settles its future at once and is written to the journal after that;
only the outcome of a successful load is written before.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from twinkle.errors import ShuttingDownError
from twinkle.server.backends.compute_thread import Lane, compute_thread, event_loop
from twinkle.server.scheduling.gathering import ReadyPasses
from twinkle.server.scheduling.sequence import Conflict, Duplicate, Refusal, RefusalReason, TooLate
from twinkle.server.services.checkpoints.save_and_load import Checkpoints
from twinkle.server.services.images import RequestImages
from twinkle.server.services.running_ops import MOST_DEATHS
from twinkle.server.services.service_loop import ServiceLoop
from twinkle.server.services.training.adapters import LiveAdapter, LiveAdapters, Place
from twinkle.server.services.training.admission import JournalQuota
from twinkle.server.services.training.context import TrainingContext
from twinkle.server.services.training.execution import Execution, failure_of, unexpected
from twinkle.server.services.training.long_passes import LongPasses, LoopTurns
from twinkle.server.services.training.snapshots import Snapshots
from twinkle.server.state.errors import DatabaseUnavailableError, StorageFullError
from twinkle.server.types import Ending, Op, OpKind, Outcome
from twinkle.server.usage import UsageCounts

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0  # between two tries to write an outcome to the journal


class Settlement:
    """Ends the ops of one training service: settles futures and writes outcomes. Belongs to the event loop."""

    def __init__(self, context: TrainingContext, snapshots: Snapshots, journal: JournalQuota) -> None:
        self.stopping = False
        self.on_settled: Callable[[Op], None] = lambda _op: None
        self._context = context
        self._futures = context.futures
        self._snapshots = snapshots
        self._journal = journal

    @event_loop
    def settle(self, adapter: LiveAdapter, op: Op, outcome: Outcome) -> None:
        """Settle the op's future at once, and write the outcome to the journal in the background.

        If the process dies in between, the next one runs the op again. An op that had ended before a restart and was
        only replayed keeps its first outcome, which its client may have seen; it is neither settled nor counted again.
        """
        adapter.ops.pop(op.seq, None)
        adapter.used_at = time.monotonic()
        replay = adapter.replays.pop(op.seq, None)
        repeated = replay is not None and replay.ended
        self._context.recorder.settled(op, outcome, repeated=repeated)
        self.on_settled(op)
        if replay is not None and repeated:
            if outcome.failed and not replay.record.failed:
                logger.error("replay of %s failed, though it had succeeded before", op.request_id)
        else:
            self._context.background.start(self._record(adapter, op, outcome))
            if not outcome.failed:
                used = UsageCounts(trained_tokens=op.price.tokens, optim_steps=int(op.is_step), requests=1)
                self._context.tenants.usage.add(adapter.run.tenant_id, used)
            self._futures.settle(op.request_id, outcome, time.time())
        adapter.op_ended.set()
        # A forward pass that leaves no state behind does not change the adapter, so that the present snapshot can cover
        # its number.
        changed = op.kind is not OpKind.FORWARD or adapter.kind.passes_leave_state
        stepped = op.is_step and not outcome.failed
        self._snapshots.schedule(op.adapter_id, time.monotonic(), changed=changed, step=stepped)

    async def _record(self, adapter: LiveAdapter, op: Op, outcome: Outcome) -> None:
        """Write an outcome to the journal. While the disk is full or the database is unavailable, retry until the
        server stops.
        """
        while True:
            try:
                await self._context.store.ops.record_outcomes([(op.adapter_id, op.seq, outcome)], time.time())
                adapter.unrecorded.discard(op.seq)
                self._futures.recorded(op.request_id)
                self._journal.add(adapter.run.tenant_id, len(outcome.body))
                return
            except (StorageFullError, DatabaseUnavailableError) as error:
                adapter.unrecorded.add(op.seq)
                logger.error("the outcome of %s could not be written to the journal yet: %s", op.request_id, error)
                if self.stopping:
                    return
                await asyncio.sleep(_RETRY_SECONDS)


@dataclass(eq=False)
class Task:
    """An op of a batch that runs. Its adapter may be removed from the service meanwhile."""

    adapter: LiveAdapter
    op: Op
    finished: bool = False
    in_background: bool = False  # a background task finishes it, even if the rest of its batch fails


# Runs a batch on the device, at once or in steps, when the future has a result.
_Compute = Callable[[Sequence[Task], Future[None]], Awaitable[list[Outcome]]]


class OpRunner:
    """Runs the accepted ops of one training service. Belongs to the event loop."""

    def __init__(
        self,
        context: TrainingContext,
        adapters: LiveAdapters,
        settlement: Settlement,
        snapshots: Snapshots,
        checkpoints: Checkpoints,
    ) -> None:
        self.busy_seconds = 0.0
        self._batch_seconds = 0.0  # how long the last batch took that ran in one piece
        self.loop = ServiceLoop(f"training on {context.model.name}")
        self._context = context
        self._model = context.model
        self._compute = context.compute
        self._scheduler = context.scheduler
        self._gathering = context.gathering
        self._measurements = context.measurements
        self._recorder = context.recorder
        self._running = context.running
        self._background = context.background
        self._adapters = adapters
        self._settlement = settlement
        self._snapshots = snapshots
        self._checkpoints = checkpoints
        self._execution = Execution(context)
        self._images = RequestImages(context.model, context.tenants.pools.images)
        self._turns = LoopTurns()
        self._long_passes = LongPasses(self._compute, self._scheduler, self._execution, self._turns)
        self._stopping = False
        self._wake = asyncio.Event()
        self._turn: asyncio.Future[None] | None = None  # the turn that the next batch of passes has asked for

    def start(self) -> None:
        self.loop.start(self._run())

    async def stop(self) -> None:
        """Finish the running batch and the background tasks, end the loop, and bring snapshots up to date.

        Snapshots are left as they are if the loop has failed, or while the state of an adapter is incomplete.
        """
        self._stopping = self._adapters.stopping = self._settlement.stopping = True
        await self._running.stopping()
        self._wake.set()
        for adapter in self._adapters:
            adapter.op_ended.set()  # no more ops will end: wakes the tasks in next_end, which see that the server stops
        await self.loop.ended()
        await self._background.finish()
        # After a bug in the loop the state of adapters is unknown: the next process starts from the last snapshots.
        for adapter_id in () if self.loop.failed else self._snapshots.noted():
            await self._snapshots.finish_writing()
            await self._adapters.snapshot(adapter_id)
        await self._snapshots.finish_writing()
        await self._measurements.stop()
        await self._running.close()

    @event_loop
    def enqueue(self, adapter: LiveAdapter, op: Op) -> str | None:
        """Hand an op to the scheduler; return the reason if it was not accepted, else None."""
        submitted = self._scheduler.submit(op, time.monotonic())
        if isinstance(submitted, Conflict | TooLate):
            return submitted.message
        if isinstance(submitted, Duplicate) and op.seq not in adapter.ops:
            return f"seq_id {op.seq} was answered long ago, and its result is not kept any more"
        self._recorder.accepted(op)
        if op.kind.is_pass and op.seq not in adapter.ops:
            run = adapter.run
            self._gathering.arrived(run.session_id, run.tenant_id, op.price.cost, time.monotonic())
        adapter.ops.setdefault(op.seq, op)
        adapter.highest_seq = max(adapter.highest_seq, op.seq)
        replay = adapter.replays.get(op.seq)
        if replay is None or not replay.ended:  # otherwise a client that asks gets the outcome from the journal
            self._context.futures.promise(op.request_id, adapter.run.tenant_id)
        self._wake.set()
        return None

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._run_batches()
        finally:
            self._turns.end(idle=True)  # long passes must not wait for turns of this loop any more

    async def _run_batches(self) -> None:
        while not self._stopping:
            self._turns.begin()
            self._wake.clear()
            now = time.monotonic()
            await self._refuse_all(self._scheduler.refusals(now))
            await self._cover_steps()
            self._compute.put_off_sampling(self._gathering.patience())
            held_until = self._held_until()
            batch = self._scheduler.next_batch(hold_passes=held_until is not None)
            tasks = [] if batch is None else [self._task(op) for op in batch.ops]
            if batch is not None and self._model.images is not None:
                tasks = self._without_lost_images(tasks, long=batch.long)
            if batch is not None and batch.long and tasks and self._may_run_beside():
                await self._long_passes.beside.acquire()  # does not wait: _may_run_beside has checked it
                self._background.start(self._run_long(tasks))
            elif batch is not None:
                await self._run_batch(tasks, self._run_in_steps if batch.long else self._run_at_once)
                self._turns.end(idle=False)
                await self._adapters.make_room()
            due = self._snapshots.due(now)
            if due is not None:
                await self._adapters.snapshot(due)
            if batch is None and due is None:
                self._turns.end(idle=True)
                # Background ops that have ended may have kept adapters from being offloaded, and there may be no
                # further batch after which to offload them.
                await self._adapters.make_room()
                await self._sleep(time.monotonic(), held_until)

    def _held_until(self) -> float | None:
        """Return until when the ready passes are held back; None: they start now, or there are none.

        They wait a moment if more are about to arrive (:mod:`~twinkle.server.scheduling.gathering`). If more may come
        while a turn of sampling runs, the passes that start are chosen at the end of that turn. While passes are held
        back, sampling has the device, and barriers run. The passes of a tenant alone are not held back.
        """
        ready = self._scheduler.ready_passes()
        if ready is None:
            return None
        now, cost = time.monotonic(), sum(ready.values())
        adapters = (self._adapters.get(name) for name in ready)
        sessions = {adapter.run.session_id for adapter in adapters if adapter is not None}
        passes = ReadyPasses(sessions, cost, self._model.tokens_per_batch - cost)
        if self._turn is None:
            until = self._gathering.wait_until(passes, now, sampling=self._compute.samples)
            if until is not None:
                return until
            if self._compute.samples and self._gathering.more_come(passes, now):
                self._turn = asyncio.ensure_future(self._compute.training_turn())
                self._turn.add_done_callback(lambda _turn: self._wake.set())
        if self._turn is not None and not self._turn.done():
            return math.inf
        self._turn = None
        self._gathering.started(now)
        return None

    async def _cover_steps(self) -> None:
        """Wait for snapshots of the adapters that may not take one more step without one (``max_replayed_steps``).

        If a snapshot cannot be written, which is logged, the adapter goes on all the same.
        """
        if not self._snapshots.at_step_limit():
            return
        await self._snapshots.finish_writing()
        for adapter_id in self._snapshots.at_step_limit():
            await self._adapters.snapshot(adapter_id)
            await self._snapshots.finish_writing()

    async def _sleep(self, now: float, held_until: float | None) -> None:
        """Wait until there is something to do, or until a refusal, a snapshot or the passes held back are due."""
        deadlines = [self._scheduler.next_deadline(), self._snapshots.next_due(), held_until]
        until = min((each for each in deadlines if each is not None), default=math.inf)
        loop = asyncio.get_running_loop()
        timer = None if until == math.inf else loop.call_later(max(0.0, until - now), self._wake.set)
        await self._wake.wait()
        if timer is not None:
            timer.cancel()

    def _may_run_beside(self) -> bool:
        """Return whether one more long batch may run in the background, between other batches.

        It may not while there are suspects, ops that may have killed the last process. Then only one batch runs at a
        time, so the loop would wait for the long batch, which itself waits for turns of the loop: a deadlock.
        """
        return not self._long_passes.beside.locked() and not self._running.has_suspects

    async def _run_long(self, tasks: Sequence[Task]) -> None:
        """Run a long batch in the background; the loop runs other batches between its steps."""
        try:
            await self._run_batch(tasks, partial(self._run_in_steps, beside=True))
        finally:
            self._long_passes.beside.release()
            self._wake.set()

    def _without_lost_images(self, tasks: list[Task], *, long: bool) -> list[Task]:
        """Return the tasks of a batch without those of adapters that need images decoded again, which run in the
        background.

        Decoding takes long, and waits for its tenant's turn in the pool of threads: other tenants must not wait, too.
        While there are suspects, only one batch runs at a time, so all stay.
        """
        lost = {task.op.adapter_id for task in tasks if self._images.lacks_pixels(task.op)}
        if not lost or self._running.has_suspects:
            return tasks
        # All passes of an adapter stay together, in their order.
        apart = [task for task in tasks if task.op.adapter_id in lost]
        self._background.start(self._run_decoded(apart, long=long))
        return [task for task in tasks if task.op.adapter_id not in lost]

    async def _run_decoded(self, tasks: Sequence[Task], *, long: bool) -> None:
        """Run a batch with images that are decoded again first, in the background."""
        if long:
            async with self._long_passes.beside:
                await self._run_batch(tasks, partial(self._run_in_steps, beside=True))
        else:
            await self._run_batch(tasks, self._run_at_once)
        self._wake.set()

    async def _run_batch(self, tasks: Sequence[Task], compute: _Compute) -> None:
        for part in self._running.apart([task.op.request_id for task in tasks]):
            await self._run_together(tasks[part], compute)

    async def _run_together(self, tasks: Sequence[Task], compute: _Compute) -> None:
        """Run a batch, or a part of one: an op that may have killed the last process is a part of its own."""
        try:
            ready: list[Task] = []
            for task in tasks:
                if self._is_poison(task) or await self._repeat_outcome(task):
                    continue
                if ready and not await self._adapters.make_room_for(task.adapter, creating=task.op.kind.creates):
                    # After the ops before it have run, their adapters can be offloaded to make room for this one.
                    await self._run_tasks(ready, compute)
                    ready = []
                await self._adapters.make_room_for(task.adapter, creating=task.op.kind.creates)
                if await self._has_come(task):
                    ready.append(task)
            await self._run_tasks(ready, compute)
        except Exception as error:  # noqa: BLE001 - an edge of the service: a bug fails its batch, not the server
            for task in tasks:
                if not task.finished and not task.in_background:
                    self._finish(task, unexpected(error, task.op.request_id), ran=False)

    async def _run_tasks(self, tasks: Sequence[Task], compute: _Compute) -> None:
        slow = [task for task in tasks if task.op.kind.takes_files]
        quick = [task for task in tasks if not task.op.kind.takes_files]
        for task in slow:  # these wait for the disk and the database, while other adapters continue
            task.in_background = True
            self._background.start(self._run_slow(task))
        if self._model.images is not None:
            can_run = await asyncio.gather(*map(self._has_images, quick))
            quick = [task for task, can in zip(quick, can_run, strict=True) if can]
        if quick:
            request_ids = [task.op.request_id for task in quick]
            logger.debug("batch: %s", " ".join(request_ids))
            async with self._running.noted(request_ids, waits=False) as noted:
                for task, outcome in zip(quick, await compute(quick, noted), strict=True):
                    self._finish(task, outcome)
                self._measurements.write_soon()

    async def _has_images(self, task: Task) -> bool:
        """Decode the op's images whose features were dropped; return whether the op can run. If not, it alone fails.

        While the server shuts down it does not fail, but stays in the journal for the next process.
        """
        try:
            task.op = await self._images.decode_lost(task.op, task.adapter.run.tenant_id)
        except ShuttingDownError:
            return False
        except Exception as error:  # noqa: BLE001 - an edge of the service: a bug fails this op, not its batch
            self._finish(task, failure_of(error, task.op.request_id), ran=False)
            return False
        return True

    async def _has_come(self, task: Task) -> bool:
        """Load the op's adapter, if it is on disk; return whether the op can run. If not, end the op with a failure.

        The op is recorded as being prepared while its adapter is read from disk, in case that kills the process.
        """
        from_disk = task.adapter.place is Place.DISK
        async with self._running.noted([task.op.request_id], decoding=True) if from_disk else nullcontext():
            if task.op.kind.creates or await self._adapters.load(task.adapter):
                return True
        message = f"model {task.op.adapter_id} could not be created or read from disk; load one of its checkpoints"
        damage = await self._context.store.damage.of_run(task.op.adapter_id)
        self._finish(task, Outcome.failure(message if damage is None else damage.message, "user"))
        return False

    async def _run_at_once(self, tasks: Sequence[Task], noted: Future[None]) -> list[Outcome]:
        """Run a batch as one piece of work of the compute thread, which waits for ``noted`` first."""
        ops = [task.op for task in tasks]
        lane = Lane.STEPS if any(op.is_step for op in ops) else Lane.TRAINING
        stepped = [index for index, task in enumerate(tasks) if task.op.kind.is_pass and _step_waits(task)]

        def step_follows(outcomes: Sequence[Outcome]) -> Lane | None:
            ran = any(not outcomes[index].failed for index in stepped)  # the step after a failed pass may be refused
            return Lane.STEPS if ran else None

        outcomes = await self._compute.run(
            partial(self._execute, ops, noted), lane, _shares(tasks), follows=step_follows
        )
        if ops[0].kind is OpKind.FORWARD_BACKWARD:
            self._gathering.times.measure(sum(op.price.cost for op in ops), self._batch_seconds)
        return outcomes

    async def _run_in_steps(self, tasks: Sequence[Task], noted: Future[None], *, beside: bool = False) -> list[Outcome]:
        """Run a long batch of one tenant in steps, one micro-batch each, after ``noted``.

        ``beside``: it runs in the background, and the loop runs other batches between the steps.
        """
        await asyncio.wrap_future(noted)
        ops = [task.op for task in tasks]
        for op in ops:
            self._recorder.started(op)
        outcomes, seconds = await self._long_passes.run(ops, tasks[0].adapter.run.tenant_id, beside=beside)
        self.busy_seconds += seconds
        self._recorder.stepped(ops, self._model.trainer, seconds)
        return outcomes

    @compute_thread
    def _execute(self, ops: Sequence[Op], noted: Future[None]) -> list[Outcome]:
        """Run a batch in the compute thread, after ``noted``. Where its passes can be interrupted, sampling runs in the
        middle of them; its time does not count as the batch's.
        """
        noted.result()
        clock = self._compute.training_clock
        started = clock()
        with self._recorder.batch(ops, self._model.trainer, clock):
            if ops[0].kind.is_pass:
                outcomes = self._execution.passes(ops, self._compute.let_sampling_run)
            else:
                outcomes = self._execution.short_barriers(ops)
        self._batch_seconds = clock() - started
        self.busy_seconds += self._batch_seconds
        return outcomes

    def _is_poison(self, task: Task) -> bool:
        """Return whether the op is poison: the process died ``MOST_DEATHS`` times during it. If so, fail the op now."""
        request_id = task.op.request_id
        deaths = self._running.deaths(request_id)
        if deaths < MOST_DEATHS:
            return False
        times = "twice" if deaths == 2 else f"{deaths} times"
        message = f"request {request_id}: the server died {times} while running it; it was not run again"
        logger.error("%s", message, extra={"request_id": request_id})
        self._running.forgive(request_id)
        self._finish(task, Outcome.failure(message, "server", Ending.REFUSED))
        return True

    async def _run_slow(self, task: Task) -> None:
        """Run an op that reads or writes files, in a background task."""
        async with self._running.noted([task.op.request_id]):
            self._recorder.started(task.op)
            outcome = await self._checkpoints.run(task.op, task.adapter.run)
            if task.op.kind in (OpKind.LOAD, OpKind.CREATE_FROM) and not outcome.failed:
                await self._compute.run(partial(self._measurements.dropped, task.op.adapter_id))
                await self._keep_loaded(task.op, outcome)
            self._finish(task, outcome)

    async def _keep_loaded(self, op: Op, outcome: Outcome) -> None:
        """Write the outcome and a snapshot of an adapter that has just loaded a checkpoint, before its client is told.

        After that the client may replace or delete the checkpoint, so no replay may need it any more. An error is only
        logged.
        """
        try:
            # In this order: a snapshot may cover only ops whose outcome is in the journal.
            await self._context.store.ops.record_outcomes([(op.adapter_id, op.seq, outcome)], time.time())
            await self._snapshots.take_now(op.adapter_id, op.seq, None)
        except Exception:  # an edge of the service: the weights are loaded, so the load has succeeded
            logger.exception("the snapshot of %s after %s could not be taken", op.adapter_id, op.request_id)

    async def _repeat_outcome(self, task: Task) -> bool:
        """Finish an op whose replay has ``repeated`` set with that outcome, without running it; return whether it is
        set.

        It is set for an op that had ended and is not run again, such as one that only wrote files, and for an op whose
        body is damaged.
        """
        replay = task.adapter.replays.get(task.op.seq)
        if replay is None or replay.repeated is None:
            return False
        if replay.repeated.ending is Ending.DROPPED:
            await self._drop_window(task.adapter)
        self._finish(task, replay.repeated)
        return True

    async def _drop_window(self, adapter: LiveAdapter) -> None:
        """Drop the gradient of the open window. An adapter on disk is loaded first: its snapshot has the gradient."""
        if await self._adapters.load(adapter):
            await self._compute.run(partial(self._execution.drop_window, adapter.run.run_id))

    async def _refuse_all(self, refusals: Sequence[Refusal]) -> None:
        tasks = [(refusal, self._task(refusal.op)) for refusal in refusals]
        for refusal, task in tasks:
            if refusal.op.kind.is_pass:
                self._gathering.ended(task.adapter.run.session_id, time.monotonic())
            if refusal.drops_gradient:
                await self._drop_window(task.adapter)
            ending = Ending.DROPPED if refusal.drops_gradient else Ending.REFUSED
            outcome = Outcome.failure(refusal.message, "user", ending)
            self._running.forgive(task.op.request_id)
            self._settlement.settle(task.adapter, task.op, outcome)
            # Until the next snapshot, a replay after a restart would give up the gap again: take the snapshot soon.
            self._snapshots.schedule(task.op.adapter_id, time.monotonic(), urgent=refusal.reason is RefusalReason.GAP)

    def _task(self, op: Op) -> Task:
        adapter = self._adapters.get(op.adapter_id)
        assert adapter is not None, "an adapter that leaves takes its ops along"
        return Task(adapter, op)

    @event_loop
    def _finish(self, task: Task, outcome: Outcome, *, ran: bool = True) -> None:
        """End an op of a batch.

        If it was to create the adapter and failed, the adapter is removed. ``ran`` is False if a bug failed the whole
        batch: then a failed creation says nothing about the adapter, which is kept.
        """
        task.finished = True
        adapter, op = task.adapter, task.op
        if op.kind.is_pass:
            self._gathering.ended(adapter.run.session_id, time.monotonic())
        if op.changes_weights:
            adapter.changed_seq = op.seq
        if op.kind.creates and not outcome.failed:
            adapter.place = Place.TRAINER
        self._scheduler.finish(op, failed=outcome.failed)
        self._settlement.settle(adapter, op, outcome)
        if ran and op.kind.creates and outcome.failed:
            self._adapters.fail(adapter, f"model {op.adapter_id} could not be created")
        self._wake.set()


def _shares(tasks: Sequence[Task]) -> dict[str, float]:
    """Return each tenant's part of a batch, as a fraction, by the cost of its ops."""
    shares: Counter[str] = Counter()
    for task in tasks:
        shares[task.adapter.run.tenant_id] += 1 + task.op.price.cost  # + 1: an op without tokens takes some time, too
    return {tenant_id: cost / shares.total() for tenant_id, cost in shares.items()}


def _step_waits(task: Task) -> bool:
    """Return whether the op right after this one has arrived and is an optimizer step."""
    following = task.adapter.ops.get(task.op.seq + 1)
    return following is not None and following.is_step
