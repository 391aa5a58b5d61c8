"""When and how adapters go to disk between the tenants' own checkpoints, so that a restart replays little."""

import asyncio
import logging
import time

from twinkle.model.types import AdapterSnapshot
from twinkle.server.backends.compute_thread import compute_thread, event_loop
from twinkle.server.services.training.context import TrainingContext
from twinkle.server.state.files.data_dir import write_snapshot
from twinkle.server.types import SnapshotRecord

logger = logging.getLogger(__name__)

# A changed adapter is due this long after its first change, so that a burst of steps costs one snapshot …
_INTERVAL_SECONDS = 5.0
# … and all snapshots together take at most this share of the time.
_SHARE = 0.05


class Snapshots:
    """The snapshots of one model's adapters. One is written at a time."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._store = context.store
        self._files = context.files
        self._due_at: dict[str, float] = {}  # adapters that ran something since their snapshot …
        self._changed: set[str] = set()  # … and were changed by it
        self._not_before = 0.0
        self._writing: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # held from copying an adapter until it is written

    @event_loop
    def note(self, adapter_id: str, now: float, *, urgent: bool = False, changed: bool = True) -> None:
        """An op of this adapter ended, and ``changed`` it or not."""
        due = now if urgent else now + _INTERVAL_SECONDS
        self._due_at[adapter_id] = min(due, self._due_at.get(adapter_id, due))
        if changed:
            self._changed.add(adapter_id)

    @event_loop
    def postpone(self, adapter_id: str, now: float) -> None:
        self._due_at[adapter_id] = now + _INTERVAL_SECONDS

    @event_loop
    def forget(self, adapter_id: str) -> None:
        self._due_at.pop(adapter_id, None)
        self._changed.discard(adapter_id)

    def noted(self) -> list[str]:
        """The adapters whose snapshot does not cover all their ops."""
        return list(self._due_at)

    def due(self, now: float) -> str | None:
        """The adapter that has waited longest, if its time has come."""
        if not self._due_at or now < self._not_before or self._writing is not None:
            return None
        adapter_id = min(self._due_at, key=self._due_at.__getitem__)
        return adapter_id if self._due_at[adapter_id] <= now else None

    def next_due(self) -> float | None:
        """When to ask again; None if nothing changed. The end of one that is being written wakes nobody: look later."""
        if not self._due_at:
            return None
        if self._writing is not None:
            return time.monotonic() + _INTERVAL_SECONDS
        return max(self._not_before, min(self._due_at.values()))

    async def bring_up_to(self, adapter_id: str, seq: int, failed_seq: int | None) -> None:
        """:meth:`take`, or let the snapshot that there is cover the ops up to ``seq`` if none of them changed anything.

        Whoever only evaluates would otherwise never get rid of a journal that grows with every pass.
        """
        if adapter_id not in self._changed:
            self._due_at.pop(adapter_id, None)  # before anything else: another op may end meanwhile
            if await self._store.snapshots.advance(adapter_id, seq, failed_seq):
                return
        await self.take(adapter_id, seq, failed_seq)

    async def take(self, adapter_id: str, seq: int, failed_seq: int | None) -> None:
        """Copy the adapter now, with all ops up to ``seq`` applied, and write it behind the scenes."""
        self.forget(adapter_id)
        await self._turn.acquire()
        started = time.monotonic()
        try:
            snapshot, beside = await self._context.compute.run(lambda: self._copy(adapter_id))
        except BaseException:
            self._turn.release()
            raise
        directory = self._files.snapshot(adapter_id, seq)
        record = SnapshotRecord(adapter_id, seq, self._files.relative(directory), failed_seq, time.time())

        async def write() -> None:
            try:
                await asyncio.to_thread(write_snapshot, directory, snapshot, beside)
                replaced = await self._store.snapshots.set(record)
                before = None if replaced is None else replaced.directory
                await asyncio.to_thread(self._files.remove_older_snapshots, directory, before)
            except Exception:  # part of the trainer loop; the journal still has everything: try again later
                logger.exception("snapshot of %s failed", adapter_id)
                self._changed.add(adapter_id)
                self._due_at.setdefault(adapter_id, time.monotonic() + _INTERVAL_SECONDS)
            finally:
                took = time.monotonic() - started
                self._not_before = time.monotonic() + took / _SHARE
                self._writing = None
                self._turn.release()

        self._writing = asyncio.create_task(write())

    @compute_thread
    def _copy(self, adapter_id: str) -> tuple[AdapterSnapshot, bytes | None]:
        context = self._context
        return context.model.trainer.snapshot(adapter_id), context.kinds.find(adapter_id).dump(adapter_id)

    async def take_now(self, adapter_id: str, seq: int, failed_seq: int | None) -> None:
        """:meth:`take`, and return when it is on disk."""
        await self.take(adapter_id, seq, failed_seq)
        await self.finish_writing()

    async def finish_writing(self) -> None:
        if self._writing is not None:
            await self._writing
