"""Submits journalled ops to the scheduler again after a restart, each when its turn comes.

For each adapter only a few ops are decoded ahead, and no further op is decoded while the decoded ones fill a memory
budget. So the memory for bodies that a start needs does not depend on how many ops there are to replay.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from twinkle.server.services.images import RequestImages
from twinkle.server.services.running_ops import MOST_DEATHS
from twinkle.server.services.training.adapters import LiveAdapter, LiveAdapters
from twinkle.server.services.training.context import TrainingContext
from twinkle.server.services.training.custom_losses import LossGraphs
from twinkle.server.services.training.recovery import Replay, decode
from twinkle.server.state.errors import Damage, DatabaseUnavailableError
from twinkle.server.types import Budget, Ending, Op, Outcome, RunRecord
from twinkle.utils.progress import Progress

logger = logging.getLogger(__name__)

_AHEAD = 16  # decoded ops of one adapter: enough for the chunks of one call, which run in one batch
_RETRY_SECONDS = 5.0  # between two tries while the database is unavailable
_MOST_BYTES = 64 * 2**20  # of all decoded ops together; a larger op is decoded alone


class ReplayFeed:
    """Decodes and submits the replays of all adapters of one base model. Belongs to one event loop."""

    def __init__(
        self,
        context: TrainingContext,
        graphs: LossGraphs,
        images: RequestImages,
        adapters: LiveAdapters,
        enqueue: Callable[[LiveAdapter, Op], str | None],
    ) -> None:
        """``enqueue`` hands an op to the scheduler; it returns the reason if the op was not accepted."""
        self._store = context.store
        self._model = context.model.name
        self._running = context.running
        self._graphs = graphs
        self._images = images
        self._adapters = adapters
        self._enqueue = enqueue
        self._lines: dict[str, tuple[LiveAdapter, list[Replay]]] = {}  # by run: replays not decoded yet, in reverse
        self._held: dict[str, int] = {}  # bytes of decoded ops, by request id
        self._wake = asyncio.Event()

    def add(self, adapter: LiveAdapter) -> None:
        """Line up all replays of an adapter, which are in order of their sequence numbers."""
        if adapter.replays:
            self._lines[adapter.run.run_id] = (adapter, [*reversed(adapter.replays.values())])

    def ended(self, op: Op) -> None:
        """Note that an op was settled, so that there may be room to decode another."""
        self._held.pop(op.request_id, None)
        self._wake.set()

    def stop(self) -> None:
        """Wake :meth:`run`, which sees that the server stops."""
        self._wake.set()

    def budget(self) -> Budget:
        return Budget("replayed_ops", sum(self._held.values()), _MOST_BYTES)

    async def run(self) -> None:
        """Submit the replays of all adapters in turns; return when all have run, or when the server stops."""
        total = self._left()
        if not total:
            return
        with Progress(f"recovery of {self._model}") as progress:
            while (left := self._left()) and not self._adapters.stopping:
                progress.reached(total - left, total, "ops")
                self._wake.clear()
                if not [run_id for run_id in list(self._lines) if await self._feed(run_id)]:
                    await self._wake.wait()
            if left:  # the server stops
                progress.give_up()
            else:
                self._lines.clear()  # of adapters that were removed

    def _left(self) -> int:
        """Return how many replays have not run yet. Those of adapters that were removed will never run."""
        return sum(len(adapter.replays) for adapter in self._adapters)

    async def _feed(self, run_id: str) -> bool:
        """Decode and submit the next op of an adapter, if there is room; return whether there was progress."""
        adapter, line = self._lines[run_id]
        if not line or self._adapters.get(run_id) is not adapter:
            del self._lines[run_id]
            return True
        if self._adapters.stopping or len(adapter.ops.keys() & adapter.replays.keys()) >= _AHEAD:
            return False
        replay = line[-1]
        held = sum(self._held.values())
        if held and held + replay.record.body.length > _MOST_BYTES:
            return False
        line.pop()
        op, replay = await self._read(adapter, replay)
        if self._adapters.get(run_id) is not adapter or replay.seq not in adapter.replays:
            return True  # the adapter was removed meanwhile, and its ops were settled
        adapter.replays[replay.seq] = replay
        self._held[op.request_id] = op.price.held_bytes
        message = self._enqueue(adapter, op)
        assert message is None, f"{op.request_id} has a place in the sequence: {message}"
        return True

    async def _read(self, adapter: LiveAdapter, replay: Replay) -> tuple[Op, Replay]:
        """Read and decode an op. It is recorded as running meanwhile, because decoding may crash the process, too."""
        request_id = replay.without_body().request_id
        if self._running.deaths(request_id) >= MOST_DEATHS:
            return replay.without_body(), replay  # it is poison: the runner fails it, and needs no body for that
        while True:
            try:
                async with self._running.noted([request_id], decoding=True):
                    op, decoded = await decode(self._store, adapter.run, adapter.kind, replay)
                    return await self._resolved(op, adapter.run), decoded
            except DatabaseUnavailableError as error:
                logger.error("request %s waits for the database: %s", request_id, error)
                await asyncio.sleep(_RETRY_SECONDS)
            except Exception as error:  # noqa: BLE001 - an edge: an unreadable op affects its own adapter alone
                return await self._unreadable(adapter, replay, error)

    async def _resolved(self, op: Op, run: RunRecord) -> Op:
        """Return an op with its images and its custom loss, as they were when the op was accepted."""
        if op.waits_for_images:
            placed = await self._images.place(op, run.tenant_id, None)
            op = await self._images.decode(placed, run.tenant_id, None)
        return await self._graphs.resolved(op, run)

    async def _unreadable(self, adapter: LiveAdapter, replay: Replay, error: Exception) -> tuple[Op, Replay]:
        """Fail what an unreadable journal entry affects.

        An op that had not ended before the restart fails alone. An op that had ended may be a part of the adapter's
        state, which cannot be rebuilt without it, so that the whole run fails.
        """
        op, run = replay.without_body(), adapter.run
        logger.error("damaged: request %s of tenant %s in the journal", op.request_id, run.tenant_id, exc_info=error)
        if replay.ended:
            what = f"its journal on the server's disk is damaged at op {op.seq}"
            self._adapters.fail(adapter, await self._store.damage.fail_run(run.run_id, run.tenant_id, what))
            return op, replay
        message = f"request {op.request_id}: its body in the journal is damaged; send it again"
        damage = Damage(f"request {op.request_id}", message, time.time(), run.tenant_id, run.run_id)
        await self._store.damage.record(damage)
        return op, replace(replay, repeated=Outcome.failure(message, "server", Ending.REFUSED))
