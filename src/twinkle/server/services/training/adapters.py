"""The live adapters of one base model in this process: how they are added, moved between trainer and disk, and removed.

    add       add a new run, or one that a restart found        nowhere, or on disk
    load      read the snapshot into the trainer                disk -> trainer
    offload   bring the snapshot up to date, free the memory    trainer -> disk
    evict     remove it from this process; its last state becomes a checkpoint
    fail      remove it from this process, because it could not be created or read

A run that trains all parameters (``train_mode: full``) holds its replica, and is treated as one adapter here, with two
differences. It is never offloaded: its replica stays held, so nobody else could use the memory. And no second one is
added while it is here, nor until its eviction has saved its weights and put those of the base model back.

An adapter on disk is wholly in its snapshot: weights, optimizer state and the gradient of the open window. Its next op
loads it again; its tenant notices no difference. Where the device is a CPU, adapters on the device count as host
memory, too.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Literal

from twinkle.errors import CheckpointError, OverloadedError, UnsupportedError, UserError
from twinkle.model.types import AdapterSnapshot, FullSpec, TrainingSpec
from twinkle.server.backends.backend import TrainingBackend
from twinkle.server.backends.compute_thread import compute_thread, event_loop
from twinkle.server.services.checkpoints.save_and_load import Checkpoints
from twinkle.server.services.training.context import TrainingContext
from twinkle.server.services.training.recovery import Plan, Replay
from twinkle.server.services.training.run_kind import RunKind
from twinkle.server.services.training.snapshots import Snapshots
from twinkle.server.state.files.data_dir import read_snapshot, read_state_beside
from twinkle.server.types import Budget, Ending, Op, Outcome, RunRecord

logger = logging.getLogger(__name__)

# Versions of an adapter's weights that are kept: requests that have not reached the sampler yet may need earlier ones.
_KEPT_VERSIONS = 3

_NO_LIMIT = 2**62  # bytes

# Where an adapter is, as tenants see it. "device": in a slot of the trainer; "host": in the trainer, but in the
# machine's memory; "disk": in its snapshot until its next request; "nowhere": not created yet; "parked": evicted, and
# kept as a checkpoint; "failed": it could not be created or recovered.
Residency = Literal["device", "host", "disk", "nowhere", "parked", "failed"]


@dataclass(frozen=True)
class AdapterStatus:
    """Where a live adapter is, as its tenant sees it, and how many of its ops have not ended."""

    where: Residency
    queued_ops: int  # ops that were accepted and have not ended


@dataclass(frozen=True)
class QueueStatus:
    """The queues of one base model: waiting ops of one tenant and of all tenants, and samples of the one tenant."""

    own: int
    all: int
    queued_samples: int = 0  # samples that the engine has not begun
    running_samples: int = 0


class Place(StrEnum):
    """Where an adapter is, as the service sees it: not created, on disk only, or in the trainer."""

    NOWHERE = "nowhere"  # it was not created yet, or could not be created
    DISK = "disk"  # in its snapshot only
    TRAINER = "trainer"


@dataclass
class LiveAdapter:
    """One live adapter: its run, its place, and its unfinished ops. Belongs to the event loop."""

    run: RunRecord
    place: Place
    kind: RunKind = field(default_factory=RunKind)
    last_request_at: float = 0.0
    highest_seq: int = 0
    unrecorded: set[int] = field(default_factory=set)  # ops whose outcome could not be written to the journal yet
    ops: dict[int, Op] = field(default_factory=dict)  # ops in the scheduler that have not ended, by sequence number
    replays: dict[int, Replay] = field(default_factory=dict)  # journalled ops still to be replayed, in order
    op_ended: asyncio.Event = field(default_factory=asyncio.Event)  # set whenever one of its ops ends
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it is loaded or offloaded
    numbering: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while an op without a number gets one
    numbered_here: bool | None = None  # whether the server numbers its ops; None: no op since its creation is known
    changed_seq: int = 0  # the last op that may have changed its weights
    used_at: float = 0.0  # monotonic time when it was last loaded, or when its last op ended
    users: int = 0  # requests other than its ops that need it in the trainer
    versions: list[str] = field(default_factory=list)  # versions for sampling, the newest last
    born: float = 0.0  # monotonic time of its creation; an earlier process's time by the wall clock
    refusing: str | None = None  # why it accepts no new ops; None while it does

    @property
    def repeats(self) -> bool:
        """Return whether ops that had ended before a restart are still to be replayed."""
        return any(replay.ended for replay in self.replays.values())

    @property
    def unfinished(self) -> set[int]:
        """Return the numbers of all ops that have not ended, including those that are still to be replayed."""
        return {*self.ops, *self.replays}

    def take_undecoded(self) -> list[Op]:
        """Remove the replays that were not decoded yet, and return their ops, without bodies."""
        left = [seq for seq in self.replays if seq not in self.ops]
        return [self.replays.pop(seq).without_body() for seq in left]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Prevent offloading for the duration of a ``with`` block. This does not load the adapter."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    async def next_end(self) -> None:
        """Wait until one more of its ops has ended, or until the server stops."""
        self.op_ended.clear()
        await self.op_ended.wait()

    def residency(self, resident: bool) -> Residency:
        """Return where the adapter is, as its tenant sees it. ``resident``: the trainer has it on the device."""
        if self.place is Place.TRAINER:
            return "device" if resident else "host"
        return "disk" if self.place is Place.DISK else "nowhere"


@dataclass(frozen=True)
class LiveVersion:
    """A version of an adapter's present weights. ``outdated``: earlier versions that new requests no longer use."""

    version_id: str
    outdated: tuple[str, ...]


class AdapterMemory:
    """Counts the host memory of adapters, and chooses which adapter to offload next. Belongs to the event loop."""

    def __init__(self, trainer: TrainingBackend, limit: int) -> None:
        self.limit = limit
        self._trainer = trainer
        self._stuck = False  # memory was above the limit, and no adapter could be offloaded

    @property
    def budget(self) -> Budget:
        return Budget("host_adapters", self._trainer.host_bytes(), self.limit)

    async def size_of(self, spec: TrainingSpec) -> int:
        """Return the most host memory that an adapter of this shape takes; 0 if the trainer refuses the shape.

        A trainer of several processes asks one of them for a shape that it does not know yet, which may have to end its
        present call first. So another thread waits for it.
        """
        try:
            return await asyncio.to_thread(self._trainer.host_bytes_of, spec)
        except UserError:
            return 0

    def growth(self, size: int) -> int:
        """Return by how much host memory grows with one more adapter of this size, after others were offloaded if
        necessary.
        """
        return max(0, min(size, self.limit - self._trainer.host_bytes()))

    def lacks(self, size: int = 0) -> bool:
        """Return whether ``size`` more bytes would exceed the limit. False while no memory is used: a single adapter
        may exceed the limit.
        """
        used = self._trainer.host_bytes()
        return used > 0 and used + size > self.limit

    def check(self) -> None:
        """Raise OverloadedError if memory is above its limit and no adapter could be offloaded when that was last
        tried.
        """
        budget = self.budget
        if self._stuck and budget.used > budget.limit:
            raise OverloadedError(
                "bytes of adapters in host memory", budget.used, budget.limit, "max_host_adapter_bytes"
            )

    def next_to_leave(
        self, adapters: Sequence[LiveAdapter], may_leave: Callable[[LiveAdapter], bool]
    ) -> LiveAdapter | None:
        """Return the adapter to offload next, or None if no adapter in the trainer ``may_leave``.

        Of those that may, it is one of the tenant that has the most adapters in the trainer: the least recently used.
        """
        here = [adapter for adapter in adapters if adapter.place is Place.TRAINER]
        counts = Counter(adapter.run.tenant_id for adapter in here)
        candidates = [adapter for adapter in here if may_leave(adapter)]
        self._stuck = not candidates
        return min(candidates, key=lambda a: (-counts[a.run.tenant_id], a.used_at), default=None)


@dataclass
class _Eviction:
    """An eviction that has begun: the adapter accepts no more ops."""

    adapter: LiveAdapter
    waiting: list[Op]  # ops that never started
    note: str | None = None  # for the tenant: how to continue; set when the checkpoint is saved
    failed_because: str | None = None  # the reason of an eviction whose save has failed, and is to be tried again
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while one caller works on this eviction


class LiveAdapters:
    """Owns the live adapters of one base model. Belongs to the event loop; calls the trainer in the compute thread."""

    def __init__(
        self,
        context: TrainingContext,
        snapshots: Snapshots,
        checkpoints: Checkpoints,
        settle: Callable[[LiveAdapter, Op, Outcome], None],
        most_bytes: int,
    ) -> None:
        """``settle`` ends an op with an outcome. ``most_bytes``: the host memory above which adapters are offloaded; it
        has no effect on a run that trains all parameters.
        """
        full = context.model.train_mode == "full"
        self.memory = AdapterMemory(context.model.trainer, _NO_LIMIT if full else most_bytes)
        self.stopping = False
        self._adapters: dict[str, LiveAdapter] = {}
        self._evictions: dict[str, _Eviction] = {}
        self._context = context
        self._model = context.model
        self._store = context.store
        self._compute = context.compute
        self._scheduler = context.scheduler
        self._snapshots = snapshots
        self._checkpoints = checkpoints
        self._settle = settle

    def get(self, run_id: str) -> LiveAdapter | None:
        return self._adapters.get(run_id)

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._adapters

    def __iter__(self) -> Iterator[LiveAdapter]:
        return iter(list(self._adapters.values()))

    @property
    def leaving(self) -> list[LiveAdapter]:
        """Return the adapters whose eviction has begun and not ended."""
        return [eviction.adapter for eviction in self._evictions.values()]

    def __len__(self) -> int:
        return len(self._adapters)

    @property
    def holder(self) -> RunRecord | None:
        """Return the run that trains all parameters of this replica, or is being evicted from it; None: it is free."""
        here = [adapter.run for adapter in (*self._adapters.values(), *self.leaving)]
        return next((run for run in here if isinstance(run.spec, FullSpec)), None)

    def statuses(self, tenant_id: str) -> dict[str, AdapterStatus]:
        """Return the status of the tenant's live adapters, by run id."""
        resident = frozenset(self._model.trainer.resident_adapter_ids())
        return {
            run_id: AdapterStatus(adapter.residency(run_id in resident), len(adapter.unfinished))
            for run_id, adapter in self._adapters.items()
            if adapter.run.tenant_id == tenant_id
        }

    # --- adding and loading -------------------------------------------------------------------------------------------

    @event_loop
    def add(self, run: RunRecord, plan: Plan | None = None) -> LiveAdapter:
        """Add an adapter: a new one, or one that a restart found, with the plan of its recovery."""
        plan = plan or Plan()
        # Without a snapshot, the replay begins with the op that creates the adapter.
        place = Place.DISK if plan.has_snapshot else Place.NOWHERE
        replays = {replay.seq: replay for replay in plan.replays}
        adapter = LiveAdapter(run, place, self._context.kinds.find(run.run_id), highest_seq=plan.last, replays=replays)
        adapter.born = time.monotonic() - max(0.0, time.time() - run.created_at)
        self._adapters[run.run_id] = adapter
        self._scheduler.add_adapter(
            run.run_id,
            run.tenant_id,
            plan.next_seq,
            plan.failed_seq,
            plan.passed,
            replays,
            failed_pass_spoils=adapter.kind.failed_pass_spoils,
        )
        return adapter

    async def load(self, adapter: LiveAdapter) -> bool:
        """Load an adapter into the trainer if it is on disk; return whether the trainer has it now.

        If the snapshot cannot be read or restored, that is logged, not raised; a damaged one is also recorded as
        damage.
        """
        run_id = adapter.run.run_id
        async with adapter.loading:
            if adapter.place is Place.DISK:
                try:
                    record = await self._store.snapshots.get(run_id)
                    assert record is not None, "an adapter that is on disk has a snapshot"
                    directory = self._context.files.root / record.directory
                    snapshot = await asyncio.to_thread(read_snapshot, directory)
                    beside = await asyncio.to_thread(read_state_beside, directory)
                    await self._compute.run(partial(self._restore, adapter, snapshot, beside))
                    adapter.place = Place.TRAINER
                    adapter.used_at = time.monotonic()
                except Exception as error:  # an edge of the service: the batch has ops of other adapters, too
                    logger.exception("snapshot of %s cannot be restored", run_id)
                    if isinstance(error, CheckpointError):
                        what = "its snapshot on the server's disk is damaged"
                        await self._store.damage.fail_run(run_id, adapter.run.tenant_id, what)
        return adapter.place is Place.TRAINER

    @compute_thread
    def _restore(self, adapter: LiveAdapter, snapshot: AdapterSnapshot, beside: bytes | None) -> None:
        """Restore a snapshot in the trainer, and the state that its run kind keeps beside it (compute thread)."""
        self._model.trainer.restore(adapter.run.run_id, snapshot)
        if beside is not None:
            adapter.kind.restore(adapter.run.run_id, beside)

    # --- memory -------------------------------------------------------------------------------------------------------
    # The service loop calls these methods between batches, so that no op starts meanwhile.

    async def make_room_for(self, adapter: LiveAdapter, *, creating: bool) -> bool:
        """Make room for an op's adapter, if the op creates it or it must be loaded; return False if there is none."""
        comes = creating or adapter.place is Place.DISK
        return not comes or await self.make_room(await self.memory.size_of(adapter.run.spec))

    async def make_room(self, size: int = 0) -> bool:
        """Offload idle adapters until ``size`` more bytes fit into host memory; return whether they do."""
        tried: set[str] = set()

        def may_leave(adapter: LiveAdapter) -> bool:
            return adapter.run.run_id not in tried and self._may_leave(adapter)

        while self.memory.lacks(size):
            adapter = self.memory.next_to_leave(list(self._adapters.values()), may_leave)
            if adapter is None:
                return False
            tried.add(adapter.run.run_id)
            await self.offload(adapter)
        return True

    def _may_leave(self, adapter: LiveAdapter) -> bool:
        """Return whether an adapter may be offloaded: no op of it runs, no request uses it, no op that had ended before
        a restart is still to be replayed, and a snapshot would be complete.
        """
        run_id = adapter.run.run_id
        is_idle = self._scheduler.position(run_id) is not None and not adapter.users and not adapter.repeats
        return is_idle and not adapter.unrecorded and adapter.kind.is_settled(run_id)

    async def offload(self, adapter: LiveAdapter) -> None:
        """Bring the snapshot up to date and remove the adapter from the trainer.

        It stays there after an error, which is logged, and if it is used meanwhile.
        """
        run_id = adapter.run.run_id
        async with adapter.loading:
            try:
                await self._snapshots.finish_writing()
                position = self._scheduler.position(run_id)
                if position is not None and run_id in self._snapshots.noted():
                    await self._snapshots.bring_up_to(run_id, position.seq, position.failed_seq)
                    await self._snapshots.finish_writing()
                has_snapshot = await self._store.snapshots.get(run_id) is not None
                if not has_snapshot or run_id in self._snapshots.noted() or not self._may_leave(adapter):
                    return
                await self._compute.run(partial(self._take_out, adapter))
                adapter.place = Place.DISK
                logger.debug("offloaded %s: host memory for adapters is full", run_id)
            except Exception:  # an edge of the service: the adapter stays in the trainer
                logger.exception("%s could not be offloaded", run_id)

    @compute_thread
    def _take_out(self, adapter: LiveAdapter) -> None:
        """Remove an adapter from the trainer and from its run kind (compute thread)."""
        self._model.trainer.remove_adapter(adapter.run.run_id)
        adapter.kind.remove(adapter.run.run_id)

    async def snapshot(self, run_id: str) -> None:
        """Bring the snapshot of an adapter that is in the trainer up to date; new files are written in the background.

        If its state is incomplete now, or after an error, the snapshot is postponed.
        """
        adapter = self._adapters.get(run_id)
        if adapter is None or adapter.place is not Place.TRAINER:
            self._snapshots.forget(run_id)
            return
        position = self._scheduler.position(run_id)
        # The state is incomplete while an op runs (position is None); while an outcome is not in the journal, because
        # only a replay of the op could compute it again; and between a forward pass and its backward pass.
        if position is None or adapter.unrecorded or not adapter.kind.is_settled(run_id):
            self._snapshots.postpone(run_id, time.monotonic())
            return
        try:
            await self._snapshots.bring_up_to(run_id, position.seq, position.failed_seq)
        except Exception:  # an edge of the service: the journal still has all ops, so nothing is lost
            logger.exception("the snapshot of %s could not be taken", run_id)
            self._snapshots.postpone(run_id, time.monotonic())

    # --- removing -----------------------------------------------------------------------------------------------------

    @event_loop
    def fail(self, adapter: LiveAdapter, note: str) -> None:
        """Remove an adapter that could not be created or recovered; its waiting ops fail with the note."""
        run_id = adapter.run.run_id
        if self._adapters.get(run_id) is not adapter:
            return  # the run was evicted meanwhile
        for op in self._remove(adapter):
            self._settle(adapter, op, Outcome.failure(note, "user", Ending.REFUSED))
        self._snapshots.forget(run_id)
        self._context.background.start(self._store.runs.set_state(run_id, "failed", note))

    @event_loop
    def drop(self, run_id: str) -> None:
        """Remove an adapter that cannot be recovered at the start because of damage. None of its ops waits yet."""
        if self._adapters.pop(run_id, None) is not None:
            self._scheduler.remove_adapter(run_id)

    def _remove(self, adapter: LiveAdapter) -> list[Op]:
        """Remove an adapter from the service and the scheduler; return its ops that never started."""
        run_id = adapter.run.run_id
        del self._adapters[run_id]
        waiting = [adapter.ops.pop(op.seq) for op in self._scheduler.remove_adapter(run_id)]
        return [*waiting, *adapter.take_undecoded()]

    async def evict(self, run: RunRecord, why: str, keep_seconds: float) -> Sequence[str]:
        """Evict a run: save its last state as a checkpoint and remove its adapter. ``why`` is the reason, for tenants.

        First the ops that had ended before a restart are replayed and running ops finish; waiting ops fail. If the
        save fails, the run stays live in the database, and the next start recovers it. If this call is cancelled, the
        next call for the same run continues the eviction. Return the versions of the adapter that the sampler may still
        hold, so that the caller can release them; none if the adapter is not here or the server stops.
        """
        adapter = self._adapters.get(run.run_id)
        while adapter is not None and adapter.repeats and not self.stopping:
            await adapter.next_end()
        if self.stopping:
            return ()
        eviction, adapter = self._evictions.get(run.run_id), self._adapters.get(run.run_id)
        if eviction is None:
            if adapter is None:
                return ()
            eviction = self._evictions[run.run_id] = _Eviction(adapter, self._remove(adapter))
        async with eviction.turn:
            if self._evictions.get(run.run_id) is eviction:  # no other caller has finished it meanwhile
                await self._finish_eviction(eviction, why, keep_seconds)
                if eviction.failed_because is None:
                    del self._evictions[run.run_id]
        return eviction.adapter.versions

    def failed_evictions(self) -> list[tuple[RunRecord, str]]:
        """Return the runs whose eviction is to be tried again, because their last state could not be saved; and why
        they are evicted.
        """
        failed = [each for each in self._evictions.values() if not each.turn.locked()]
        return [(each.adapter.run, each.failed_because) for each in failed if each.failed_because is not None]

    async def _finish_eviction(self, eviction: _Eviction, why: str, keep_seconds: float) -> None:
        run_id = eviction.adapter.run.run_id
        if eviction.note is None:
            await self._keep(eviction, why, keep_seconds)
        # If that failed, its journal and snapshot stay, and the run stays live: the next start recovers it. A run that
        # holds the replica stays in the trainer, too: maintenance tries again, as nobody can train there meanwhile.
        holds = isinstance(eviction.adapter.run.spec, FullSpec)
        eviction.failed_because = why if eviction.note is None and holds else None
        if eviction.note is None:
            logger.error("%s could not be saved as a checkpoint before its eviction: %s", run_id, why)
            return
        await self._store.runs.set_state(run_id, "parked", eviction.note)
        await self._compute.run(partial(self._context.measurements.dropped, run_id))
        self._snapshots.forget(run_id)
        await self._snapshots.finish_writing()
        last = await self._store.snapshots.delete(run_id)
        directory = None if last is None else last.directory
        await asyncio.to_thread(self._context.files.remove_snapshots, run_id, directory)
        logger.info("evicted %s: %s", run_id, why)

    async def _keep(self, eviction: _Eviction, why: str, keep_seconds: float) -> None:
        """Save a checkpoint of an adapter that is evicted. Its waiting ops fail, whether the save succeeds or not."""
        adapter = eviction.adapter
        try:
            while adapter.ops:
                await adapter.next_end()
            if await self.load(adapter):
                eviction.note = await self._checkpoints.save_before_eviction(adapter.run, why, keep_seconds)
        finally:
            message = eviction.note or f"{why}, and its adapter could not be saved"
            while eviction.waiting:
                self._settle(adapter, eviction.waiting.pop(0), Outcome.failure(message, "user"))

    # --- sampling from it ---------------------------------------------------------------------------------------------

    async def live_version(self, run_id: str) -> LiveVersion | None:
        """Publish the adapter's present weights, if they are not published yet, and return their version.

        Return None if the adapter is not in this process, or cannot be loaded. UnsupportedError: its base model has no
        sampler.
        """
        adapter = self._adapters.get(run_id)
        if adapter is None:
            return None
        if self._model.sampler is None:
            raise UnsupportedError(f"{self._model.name} is served for training only")
        # Wait until the adapter is created, and until a replay has brought it to its state before the restart.
        while (adapter.repeats or (adapter.place is Place.NOWHERE and 0 in adapter.unfinished)) and not self.stopping:
            await adapter.next_end()
        with adapter.in_use():
            if not await self.load(adapter):
                return None
            version_id = f"{run_id}@{adapter.changed_seq}"
            if not await self._compute.run(partial(self._publish, version_id, run_id)):
                return None
        if version_id not in adapter.versions:
            adapter.versions.append(version_id)
        outdated, adapter.versions = adapter.versions[:-_KEPT_VERSIONS], adapter.versions[-_KEPT_VERSIONS:]
        return LiveVersion(version_id, tuple(outdated))

    @compute_thread
    def _publish(self, version_id: str, run_id: str) -> bool:
        """Publish the weights in the compute thread, where no optimizer step can run at the same time.

        Return False if the trainer does not have the adapter.
        """
        sampler = self._model.sampler
        assert sampler is not None, "checked before"
        if run_id not in self._model.trainer.adapter_ids():
            return False
        if version_id not in sampler.version_ids():
            sampler.publish(version_id, run_id)
        return True
