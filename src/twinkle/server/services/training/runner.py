"""Running ops: from tickets of the scheduler to outcomes, for all adapters of one base model.

One loop, the pump, takes batches to the compute thread. Ops that wait for disk and database run beside it: other
adapters go on meanwhile. An outcome settles its future at once and goes to the journal behind that.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from twinkle.errors import CheckpointError
from twinkle.model.types import AdapterSnapshot
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.ids import is_native_run
from twinkle.server.scheduling.scheduler import Batch, Scheduler
from twinkle.server.scheduling.sequence import Conflict, Duplicate, Refusal, RefusalReason, Ticket, TooLate
from twinkle.server.services.checkpoints.save_and_load import Checkpoints
from twinkle.server.services.futures import Futures
from twinkle.server.services.running_ops import MOST_DEATHS, RunningOps
from twinkle.server.services.service_loop import Pump
from twinkle.server.services.training.adapter_memory import AdapterMemory
from twinkle.server.services.training.execution import Execution, unexpected
from twinkle.server.services.training.live_adapter import LiveAdapter, Place, Task
from twinkle.server.services.training.measurements import RunMeasurements
from twinkle.server.services.training.snapshots import Snapshots
from twinkle.server.services.training.turns import PumpTurns
from twinkle.server.state import DatabaseUnavailableError, StorageFullError, Store
from twinkle.server.state.files.data_dir import DataDir, read_native_state, read_snapshot
from twinkle.server.telemetry.recording import TrainingRecorder
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.types import Ending, NativePass, NativeVerb, Op, OpKind, Outcome
from twinkle.server.verbs.host import NativeHost
from twinkle.server.verbs.templates import Templates
from twinkle.server.wire import responses

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0
_MOST_LONG_BATCHES = 4  # at once: each holds what it has computed so far
_CONTENDED_PART = 16  # of a batch: what a tenant gets at most while others have work, if these ask for less


class OpRunner:
    """Runs what was accepted. ``adapters`` are those that live here, by run id."""

    def __init__(
        self,
        model: ServedModel,
        templates: Templates,
        store: Store,
        compute: Compute,
        files: DataDir,
        futures: Futures,
        tenants: Tenants,
        *,
        merge: bool,
        allowed_dirs: Sequence[Path],
        recorder: TrainingRecorder,
        running: RunningOps,
        gap_seconds: float,
        adapter_bytes: int = 2**62,
    ) -> None:
        """``running`` notes on disk what runs; ``gap_seconds``: how long ops wait for a number that is missing.

        ``adapter_bytes``: host memory for adapters; beyond it they are on disk between their ops.
        """
        self.adapters: dict[str, LiveAdapter] = {}
        self.scheduler = Scheduler(
            model.tokens_per_batch,
            tenants.share,
            merge=merge,
            gap_timeout=gap_seconds,
            contended_tokens=min(model.cheap_tokens, model.tokens_per_batch // _CONTENDED_PART),
        )
        self.native = NativeHost(model, templates)
        self.checkpoints = Checkpoints(model, self.native, store, compute, files, tenants, allowed_dirs)
        self.snapshots = Snapshots(model, self.native, store, compute, files)
        self.measurements = RunMeasurements(store.run_metrics)
        self.adapter_memory = AdapterMemory(model.trainer, adapter_bytes)
        self.busy_seconds = 0.0
        self._turns = PumpTurns()
        self._long_batches = 0  # that run now, between those of others
        self.stopping = False
        self.running = running
        self.on_settled: Callable[[Op], None] = lambda _op: None
        self.on_recorded: Callable[[str, int], None] = lambda _tenant_id, _size: None
        self._model = model
        self._store = store
        self._compute = compute
        self._files = files
        self._futures = futures
        self._recorder = recorder
        self._usage = tenants.usage
        self._execution = Execution(model, self.native, self.measurements, recorder)
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.pump = Pump(f"training on {model.name}")

    def start(self) -> None:
        self.pump.start(self._run())

    async def stop(self) -> None:
        """Finish what is on the device, put every changed adapter on disk, and end."""
        self.stopping = True
        self.running.stopping()
        self._wake.set()
        for adapter in self.adapters.values():
            adapter.op_ended.set()  # whoever waits for the next one waits in vain
        await self.pump.ended()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # After a bug nobody knows what state adapters are in: the next server begins at the last snapshots.
        for adapter_id in () if self.pump.failed else self.snapshots.noted():
            await self.snapshots.finish_writing()
            await self._snapshot(adapter_id)
        await self.snapshots.finish_writing()
        await self.measurements.stop()
        self.running.close()

    def enqueue(self, adapter: LiveAdapter, op: Op) -> str | None:
        """Hand an op to the scheduler; returns why it was not taken, if so."""
        ticket = Ticket(op.adapter_id, op.seq, op.kind, op.tokens, op.digest, op.price.work, _native_verb(op))
        submitted = self.scheduler.submit(ticket, time.monotonic())
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

    # --- the pump -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._run_batches()
        finally:
            self._turns.end(idle=True)  # nobody waits for it any more

    async def _run_batches(self) -> None:
        while not self.stopping:
            self._turns.begin()
            self._wake.clear()
            now = time.monotonic()
            await self._refuse_all(self.scheduler.refusals(now))
            batch = self.scheduler.next_batch()
            if batch is not None and batch.long and self._may_run_beside():
                self._background(self._run_long(batch))
            elif batch is not None:
                await self._run_batch(batch)
                self._turns.end(idle=False)
                await self._make_room()
            due = self.snapshots.due(now)
            if due is not None:
                await self._snapshot(due)
            if batch is None and due is None:
                self._turns.end(idle=True)
                # Ops that ended beside the pump may have kept adapters here; nobody may come who runs another batch.
                await self._make_room()
                await self._sleep(time.monotonic())

    async def _sleep(self, now: float) -> None:
        deadlines = [t for t in (self.scheduler.next_deadline(), self.snapshots.next_due()) if t is not None]
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(max(0.0, min(deadlines) - now), self._wake.set)] if deadlines else []
        await self._wake.wait()
        for timer in timers:
            timer.cancel()

    def _may_run_beside(self) -> bool:
        """Whether one more long batch may run between those of others.

        Not while an op may have killed the last process: suspects run alone, and a batch would hold the pump up for
        the very turns that it waits for.
        """
        return self._long_batches < _MOST_LONG_BATCHES and not self.running.has_suspects

    async def _run_long(self, batch: Batch) -> None:
        """A batch that takes long: the pump goes on with those of other tenants between its steps."""
        self._long_batches += 1
        try:
            await self._run_batch(batch, beside=True)
        finally:
            self._long_batches -= 1
            self._wake.set()

    async def _run_batch(self, batch: Batch, *, beside: bool = False) -> None:
        """``beside``: the pump does not wait for it."""
        tasks = [self._task(ticket) for ticket in batch.tickets]
        for part in self.running.apart([task.op.request_id for task in tasks]):
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
                if ready and not await self._has_room(task):
                    # Once they have run, their adapters may go to disk, and this one has room.
                    await self._run_tasks(ready, in_steps=in_steps, beside=beside)
                    ready = []
                await self._has_room(task)
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
            self._background(self._run_slow(task))
        if quick:
            async with self.running.noted([task.op.request_id for task in quick]):
                await self._run_quick(quick, in_steps=in_steps, beside=beside)

    async def _has_come(self, task: Task) -> bool:
        """Whether the op can run; an adapter that comes from disk does so under a note of what the process works on."""
        if task.adapter.place is not Place.DISK:
            return await self._is_here(task)
        async with self.running.noted([task.op.request_id], decoding=True):
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
                self.give_up(task.adapter, _not_created(task.adapter))
        self.measurements.write_soon()

    def give_up(self, adapter: LiveAdapter, note: str) -> None:
        """An adapter that could not be created or brought back leaves, and what waits for it fails with the note."""
        run_id = adapter.run.run_id
        if self.adapters.pop(run_id, None) is None:
            return  # its session ended meanwhile
        waiting = [adapter.ops[ticket.seq] for ticket in self.scheduler.remove_adapter(run_id)]
        failure = replace(responses.failed(note, "user"), ending=Ending.REFUSED)
        for op in (*waiting, *adapter.take_undecoded()):
            self.settle(adapter, op, failure)
        self.snapshots.forget(run_id)
        self._background(self._store.runs.set_state(run_id, "failed", note))

    async def _run_in_steps(self, ops: Sequence[Op], tenant_id: str, *, beside: bool) -> list[Outcome]:
        """One micro-batch at a time, each about as long as what others ask for: they wait for one step at most."""
        limit = self.scheduler.step_tokens(tenant_id)
        steps = self._execution.passes_in_steps(ops, lambda: limit)
        seconds = 0.0

        def step() -> list[Outcome] | None:
            """In the compute thread; None while there is more to do."""
            nonlocal seconds
            started = time.perf_counter()
            try:
                next(steps)
                return None
            except StopIteration as end:
                ended: list[Outcome] = end.value
                return ended
            finally:
                seconds += time.perf_counter() - started

        for op in ops:
            self._recorder.started(op)
        while (outcomes := await self._compute.run(step)) is None:
            if beside:
                await self._turns.others()
            limit = self.scheduler.step_tokens(tenant_id)
        self.busy_seconds += seconds
        self._recorder.stepped(ops, self._model.trainer, seconds)
        return outcomes

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
        deaths = self.running.deaths(request_id)
        if deaths < MOST_DEATHS:
            return False
        times = "twice" if deaths == 2 else f"{deaths} times"
        message = f"request {request_id}: the server died {times} while running it; it was not run again"
        logger.error("%s", message, extra={"request_id": request_id})
        self.running.forgive(request_id)
        self._finish(task, replace(responses.failed(message, "server"), ending=Ending.REFUSED))
        if task.op.kind.creates:
            self.give_up(task.adapter, _not_created(task.adapter))
        return True

    async def _run_slow(self, task: Task) -> None:
        async with self.running.noted([task.op.request_id]):
            if await self._is_here(task):
                await self._run_with_files(task)

    async def _run_with_files(self, task: Task) -> None:
        kind = task.op.kind
        self._recorder.started(task.op)
        outcome = await self.checkpoints.run(task.op, task.adapter.run)
        if kind.creates and not outcome.failed:
            task.adapter.place = Place.TRAINER
        if kind in (OpKind.LOAD, OpKind.CREATE_FROM) and not outcome.failed:
            self.measurements.dropped(task.op.adapter_id)
            await self._keep_loaded(task.op, outcome)
        self._finish(task, outcome)
        if kind.creates and outcome.failed:
            self.give_up(task.adapter, _not_created(task.adapter))

    async def _keep_loaded(self, op: Op, outcome: Outcome) -> None:
        """Once the client hears of a load, its source may be replaced or deleted: no replay may need it any more."""
        try:
            # In this order: a snapshot covers only ops whose outcome is on record.
            await self._store.ops.record_outcomes([(op.adapter_id, op.seq, outcome)], time.time())
            await self.snapshots.take_now(op.adapter_id, op.seq, None)
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
        if task.op.kind.creates or await self.load(task.adapter):
            return True
        message = f"model {task.op.adapter_id} could not be created or read from disk; load one of its checkpoints"
        damage = await self._store.damage.of_run(task.op.adapter_id)
        message = message if damage is None else damage.message
        self._finish(task, responses.failed(message, "user"))
        return False

    async def load(self, adapter: LiveAdapter) -> bool:
        """Bring an adapter from its snapshot to the trainer, if it is there; returns whether it is in the trainer."""
        run_id = adapter.run.run_id
        async with adapter.loading:
            if adapter.place is Place.DISK:
                try:
                    record = await self._store.snapshots.get(run_id)
                    assert record is not None, "an adapter that is on disk has a snapshot"
                    directory = self._files.root / record.directory
                    snapshot = await asyncio.to_thread(read_snapshot, directory)
                    native = await asyncio.to_thread(read_native_state, directory)
                    await self._compute.run(lambda: self._restore(run_id, snapshot, native))
                    adapter.place = Place.TRAINER
                    adapter.used_at = time.monotonic()
                except Exception as error:  # the trainer loop is an edge: ops of other adapters are in the same batch
                    logger.exception("snapshot of %s cannot be restored", run_id)
                    if isinstance(error, CheckpointError):
                        what = "its snapshot on the server's disk is damaged"
                        await self._store.damage.fail_run(run_id, adapter.run.tenant_id, what)
        return adapter.place is Place.TRAINER

    def _restore(self, run_id: str, snapshot: AdapterSnapshot, native: bytes | None) -> None:
        self._model.trainer.restore(run_id, snapshot)
        if native is not None:
            self.native.adapters.put_back(run_id, native)

    # --- adapters that go to disk -------------------------------------------------------------------------------------
    # All of this runs in the pump, between batches: no op starts meanwhile.

    async def _has_room(self, task: Task) -> bool:
        """Make room for the adapter of an op, if the op brings it to the trainer; returns whether there is any now."""
        comes = task.op.kind.creates or task.adapter.place is Place.DISK
        return not comes or await self._make_room(self.adapter_memory.size_of(task.adapter.run.spec))

    async def _make_room(self, size: int = 0) -> bool:
        """Send idle adapters to disk until ``size`` more bytes fit into host memory; returns whether they do."""
        tried: set[str] = set()

        def may_leave(adapter: LiveAdapter) -> bool:
            return adapter.run.run_id not in tried and self._may_leave(adapter)

        while self.adapter_memory.lacks(size):
            adapter = self.adapter_memory.next_to_leave(self.adapters.values(), may_leave)
            if adapter is None:
                return False
            tried.add(adapter.run.run_id)
            await self._send_to_disk(adapter)
        return True

    def _may_leave(self, adapter: LiveAdapter) -> bool:
        """Not while an op of it runs, or while something of it is only in memory that no snapshot has."""
        run_id = adapter.run.run_id
        is_idle = self.scheduler.position(run_id) is not None and not adapter.users and not adapter.repeats
        return is_idle and not adapter.unrecorded and self.native.is_settled(run_id)

    async def _send_to_disk(self, adapter: LiveAdapter) -> None:
        """Bring the snapshot up to date and take the adapter out of the trainer; it stays if that fails."""
        run_id = adapter.run.run_id
        async with adapter.loading:
            try:
                await self.snapshots.finish_writing()
                position = self.scheduler.position(run_id)
                if position is not None and run_id in self.snapshots.noted():
                    await self.snapshots.bring_up_to(run_id, position.seq, position.failed_seq)
                    await self.snapshots.finish_writing()
                has_snapshot = await self._store.snapshots.get(run_id) is not None
                if not has_snapshot or run_id in self.snapshots.noted() or not self._may_leave(adapter):
                    return
                await self._compute.run(partial(self._take_out, run_id))
                adapter.place = Place.DISK
                logger.debug("%s went to disk: host memory for adapters is full", run_id)
            except Exception:  # the trainer loop is an edge; the adapter is where it was
                logger.exception("%s could not go to disk", run_id)

    def _take_out(self, run_id: str) -> None:
        """In the compute thread."""
        self._model.trainer.remove_adapter(run_id)
        self.native.remove(run_id)

    async def _drop_window(self, adapter: LiveAdapter) -> None:
        """Forget the gradient since the last optim_step, also where it is still in a snapshot."""
        if await self.load(adapter):
            await self._compute.run(partial(self._execution.drop_window, adapter.run.run_id))

    async def _refuse_all(self, refusals: Sequence[Refusal]) -> None:
        tasks = [(refusal, self._task(refusal.ticket)) for refusal in refusals]
        for refusal, task in tasks:
            if refusal.drops_gradient:
                await self._drop_window(task.adapter)
            ending = Ending.DROPPED if refusal.drops_gradient else Ending.REFUSED
            outcome = replace(responses.failed(refusal.message, "user"), ending=ending)
            self.running.forgive(task.op.request_id)
            self.settle(task.adapter, task.op, outcome)
            # A gap that was given up is forgotten with the next snapshot; until then a replay repeats it.
            self.snapshots.note(task.op.adapter_id, time.monotonic(), urgent=refusal.reason is RefusalReason.GAP)

    def _task(self, ticket: Ticket) -> Task:
        adapter = self.adapters[ticket.adapter_id]
        return Task(ticket, adapter, adapter.ops[ticket.seq])

    def _finish(self, task: Task, outcome: Outcome) -> None:
        task.finished = True
        if task.op.changes_weights:
            task.adapter.changed_seq = task.op.seq
        self.scheduler.finish(task.ticket, failed=outcome.failed)
        self.settle(task.adapter, task.op, outcome)
        self._wake.set()

    def settle(self, adapter: LiveAdapter, op: Op, outcome: Outcome) -> None:
        """Tell whoever waits, then write it down. What is lost in between is computed again."""
        adapter.ops.pop(op.seq, None)
        adapter.used_at = time.monotonic()
        replay = adapter.replays.pop(op.seq, None)
        repeated = replay is not None and replay.ended
        self._recorder.settled(op, outcome, repeated=repeated)
        self.on_settled(op)
        if replay is not None and repeated:
            if outcome.failed and not replay.record.failed:
                logger.error("replay of %s failed, though it had succeeded before", op.request_id)
        else:
            self._background(self._record(adapter, op, outcome))
            if not outcome.failed:
                tenant_id, steps = adapter.run.tenant_id, int(op.is_step)
                self._usage.add(tenant_id, trained_tokens=op.tokens, optim_steps=steps, requests=1)
            self._futures.settle(op.request_id, outcome, time.time())
        adapter.op_ended.set()
        # A forward pass of Tinker's protocol changes nothing: its number is covered by the snapshot there is.
        changed = op.kind is not OpKind.FORWARD or is_native_run(op.adapter_id)
        self.snapshots.note(op.adapter_id, time.monotonic(), changed=changed)

    async def _record(self, adapter: LiveAdapter, op: Op, outcome: Outcome) -> None:
        """Write an outcome down, however long the disk is full or the database away."""
        while True:
            try:
                await self._store.ops.record_outcomes([(op.adapter_id, op.seq, outcome)], time.time())
                adapter.unrecorded.discard(op.seq)
                self._futures.recorded(op.request_id)
                self.on_recorded(adapter.run.tenant_id, len(outcome.body))
                return
            except (StorageFullError, DatabaseUnavailableError) as error:
                adapter.unrecorded.add(op.seq)
                logger.error("outcome of %s is not on record: %s", op.request_id, error)
                if self.stopping:
                    return
                await asyncio.sleep(_RETRY_SECONDS)

    async def _snapshot(self, adapter_id: str) -> None:
        adapter = self.adapters.get(adapter_id)
        if adapter is None or adapter.place is not Place.TRAINER:
            self.snapshots.forget(adapter_id)
            return
        position = self.scheduler.position(adapter_id)
        # One of its ops is running and may change it, or has an outcome that only a replay could bring back; or a
        # forward pass waits for its backward pass, which needs both.
        if position is None or adapter.unrecorded or not self.native.is_settled(adapter_id):
            self.snapshots.postpone(adapter_id, time.monotonic())
            return
        try:
            await self.snapshots.bring_up_to(adapter_id, position.seq, position.failed_seq)
        except Exception:  # the trainer loop is an edge; the journal still has everything
            logger.exception("no snapshot of %s", adapter_id)
            self.snapshots.postpone(adapter_id, time.monotonic())

    def _background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        """What could not be written down is lost at most until it is computed again."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("background work failed", exc_info=task.exception())


def _not_created(adapter: LiveAdapter) -> str:
    return f"model {adapter.run.run_id} could not be created"


def _native_verb(op: Op) -> str | None:
    """The verb of a native op; empty where it is refused or about files."""
    if isinstance(op.payload, NativePass | NativeVerb):
        return op.payload.verb
    return "" if is_native_run(op.adapter_id) else None
