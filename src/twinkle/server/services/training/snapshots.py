"""Writes snapshots of adapters to disk, beside the tenants' own checkpoints, so that a restart replays only few ops.

A snapshot is due some seconds after the first op that it does not cover, but writing snapshots takes only a share of
the time, so that large ones are written less often. A model may also limit the optimizer steps that a restart repeats
(``max_replayed_steps``, for runs that train all parameters): then a snapshot is due after half of them, whatever share
of the time that takes, and the service loop waits for it rather than run more steps than the limit.
"""

import asyncio
import logging
import time
from collections import Counter

from twinkle.model.types import AdapterSnapshot
from twinkle.server.backends.compute_thread import compute_thread, event_loop
from twinkle.server.services.training.context import TrainingContext
from twinkle.server.state.files.data_dir import write_snapshot
from twinkle.server.types import SnapshotRecord

logger = logging.getLogger(__name__)

# After a snapshot was written, the next due one waits, so that writing them takes about this share of the time.
_SHARE = 0.05


class Snapshots:
    """Schedules and writes the snapshots of one model's adapters, one at a time. Belongs to the event loop."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._store = context.store
        self._files = context.files
        # Adapters that ran ops since their snapshot, with the monotonic time when their next snapshot is due …
        self._due_at: dict[str, float] = {}
        self._changed: set[str] = set()  # … and those of them that an op has changed
        self._postponed: set[str] = set()  # adapters whose state was incomplete, until one of their ops ends
        self._failed_until: dict[str, float] = {}  # after a failure to write: monotonic time of the next attempt
        # Optimizer steps that no snapshot on disk covers: those since the last copy, and those in a copy being written.
        self._steps: Counter[str] = Counter()
        self._steps_being_written: Counter[str] = Counter()
        self._not_before = 0.0  # monotonic time of the earliest next snapshot, so that writing stays within _SHARE
        self._writing: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # held from the copying of an adapter until its snapshot is written

    @event_loop
    def schedule(
        self, adapter_id: str, now: float, *, urgent: bool = False, changed: bool = True, step: bool = False
    ) -> None:
        """Note that an op of this adapter has ended, so that its snapshot will be due.

        ``changed``: the op may have changed the adapter. ``urgent``: the snapshot is due at once, not
        ``snapshot_seconds`` after the first op that it does not cover. ``step``: the op was an optimizer step.
        """
        self._steps[adapter_id] += step
        self._postponed.discard(adapter_id)
        due = now if urgent else now + self._context.snapshot_seconds
        self._due_at[adapter_id] = min(due, self._due_at.get(adapter_id, due))
        if changed:
            self._changed.add(adapter_id)

    @event_loop
    def postpone(self, adapter_id: str, now: float) -> None:
        """Make the adapter's snapshot due ``snapshot_seconds`` from now, because it cannot be taken now.

        If an op of the adapter ends before, and it has taken many steps, the snapshot is due again then.
        """
        self._due_at[adapter_id] = now + self._context.snapshot_seconds
        self._postponed.add(adapter_id)

    @event_loop
    def forget(self, adapter_id: str) -> None:
        """Note that the adapter needs no snapshot at present."""
        self._due_at.pop(adapter_id, None)
        self._changed.discard(adapter_id)
        self._postponed.discard(adapter_id)
        self._failed_until.pop(adapter_id, None)
        self._steps.pop(adapter_id, None)

    def noted(self) -> list[str]:
        """Return the adapters with ended ops that no snapshot covers, neither one on disk nor one being written."""
        return list(self._due_at)

    def due(self, now: float) -> str | None:
        """Return the adapter whose snapshot has been due longest.

        None: none is due, one is being written, or writing the last one was too recent for its share of the time. The
        last reason does not count for an adapter that has taken half of the steps which may be repeated.
        """
        if not self._due_at or self._writing is not None:
            return None
        if (pressing := self._pressing(now)) is not None:
            return pressing
        if now < self._not_before:
            return None
        adapter_id = min(self._due_at, key=self._due_at.__getitem__)
        return adapter_id if self._due_at[adapter_id] <= now else None

    def next_due(self) -> float | None:
        """Return when to call :meth:`due` again; None if no adapter needs a snapshot.

        While a snapshot is being written, this is ``snapshot_seconds`` from now, because the end of writing wakes no
        one.
        """
        if not self._due_at:
            return None
        if self._writing is not None:
            return time.monotonic() + self._context.snapshot_seconds
        if self._pressing(time.monotonic()) is not None:
            return time.monotonic()
        return max(self._not_before, min(self._due_at.values()))

    def _pressing(self, now: float) -> str | None:
        """Return an adapter that has taken half of the optimizer steps that may be repeated since its last copy.

        One whose snapshot cannot be taken at present is not returned: the service loop would try again and again, and
        the tasks that complete its state would never run.
        """
        most = self._context.model.max_replayed_steps
        if most is None:
            return None
        able = (each for each in self._due_at if each not in self._postponed and not self._has_failed(each, now))
        return next((each for each in able if 2 * self._steps[each] >= most), None)

    def _has_failed(self, adapter_id: str, now: float) -> bool:
        return self._failed_until.get(adapter_id, now) > now

    def at_step_limit(self) -> list[str]:
        """Return the adapters that must not step before a snapshot of them is on disk (``max_replayed_steps``).

        Those whose last snapshot could not be written are not among them until the next attempt: they go on.
        """
        most, now = self._context.model.max_replayed_steps, time.monotonic()
        if most is None:
            return []
        stepped = [each for each in {*self._steps, *self._steps_being_written} if not self._has_failed(each, now)]
        return [each for each in stepped if self._steps[each] + self._steps_being_written[each] >= most]

    async def bring_up_to(self, adapter_id: str, seq: int, failed_seq: int | None) -> None:
        """Make the snapshot cover the ops up to ``seq``: :meth:`take` a new one if an op has changed the adapter or
        there is no snapshot yet.

        Otherwise only the record of the present snapshot is advanced. Without this, the journal of a tenant that only
        evaluates would grow with every forward pass and never be pruned.
        """
        if adapter_id not in self._changed:
            self._due_at.pop(adapter_id, None)  # before the await: an op that ends meanwhile must be noted again
            if await self._store.snapshots.advance(adapter_id, seq, failed_seq):
                return
        await self.take(adapter_id, seq, failed_seq)

    async def take(self, adapter_id: str, seq: int, failed_seq: int | None) -> None:
        """Copy the adapter, with all ops up to ``seq`` applied, and write the copy to disk in the background.

        A snapshot that is being written is waited for first. If writing fails, that is logged, and a new snapshot
        becomes due.
        """
        steps = self._steps[adapter_id]
        self.forget(adapter_id)
        self._steps_being_written[adapter_id] += steps
        try:
            await self._turn.acquire()
        except BaseException:
            self._not_written(adapter_id, steps)
            raise
        started = time.monotonic()
        try:
            snapshot, beside = await self._context.compute.run(lambda: self._copy(adapter_id))
        except BaseException:
            self._not_written(adapter_id, steps)
            self._turn.release()
            raise
        directory = self._files.snapshot(adapter_id, seq)
        record = SnapshotRecord(adapter_id, seq, self._files.relative(directory), failed_seq, time.time())

        async def write() -> None:
            try:
                await asyncio.to_thread(write_snapshot, directory, snapshot, beside)
                replaced = await self._store.snapshots.set(record)
                before = None if replaced is None else replaced.directory
                self._end_writing(adapter_id, steps)
                await asyncio.to_thread(self._files.remove_older_snapshots, directory, before)
            except Exception:  # an edge of the service: the journal still has all ops; try again later
                logger.exception("snapshot of %s failed", adapter_id)
                self._not_written(adapter_id, steps)
                again = time.monotonic() + self._context.snapshot_seconds
                self._failed_until[adapter_id] = again
                self._due_at.setdefault(adapter_id, again)
            finally:
                took = time.monotonic() - started
                self._not_before = time.monotonic() + took / _SHARE
                self._writing = None
                self._turn.release()

        self._writing = asyncio.create_task(write())

    def _not_written(self, adapter_id: str, steps: int) -> None:
        """Note that a snapshot was not written: its steps and changes are again among those since the last copy."""
        self._end_writing(adapter_id, steps)
        self._steps[adapter_id] += steps
        self._changed.add(adapter_id)

    def _end_writing(self, adapter_id: str, steps: int) -> None:
        self._steps_being_written[adapter_id] -= steps
        if not self._steps_being_written[adapter_id]:
            del self._steps_being_written[adapter_id]

    @compute_thread
    def _copy(self, adapter_id: str) -> tuple[AdapterSnapshot, bytes | None]:
        context = self._context
        return context.model.trainer.snapshot(adapter_id), context.kinds.find(adapter_id).dump(adapter_id)

    async def take_now(self, adapter_id: str, seq: int, failed_seq: int | None) -> None:
        """Take a snapshot like :meth:`take`, and wait until it is on disk or writing it has failed."""
        await self.take(adapter_id, seq, failed_seq)
        await self.finish_writing()

    async def finish_writing(self) -> None:
        """Wait until the snapshot that is being written, if any, is on disk or has failed."""
        if self._writing is not None:
            await self._writing
