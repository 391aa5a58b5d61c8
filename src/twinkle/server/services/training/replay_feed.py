"""Brings journalled ops back to the scheduler after a restart, each when its turn comes.

Of every adapter a few ops at most are decoded ahead, and all that are decoded together take no more memory than a
budget: a start never holds all bodies, however many there are.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from twinkle.server.services.running_ops import MOST_DEATHS
from twinkle.server.services.training.adapters import LiveAdapter, LiveAdapters
from twinkle.server.services.training.context import TrainingContext
from twinkle.server.services.training.custom_losses import LossGraphs
from twinkle.server.services.training.recovery import Replay, decode
from twinkle.server.state.errors import Damage, DatabaseUnavailableError
from twinkle.server.types import Budget, Ending, Op, Outcome

logger = logging.getLogger(__name__)

_AHEAD = 16  # decoded ops of one adapter: the chunks of a call run in one batch
_RETRY_SECONDS = 5.0
_MOST_BYTES = 64 * 2**20  # of all decoded ops; one that is larger is decoded alone


class ReplayFeed:
    """Belongs to one event loop."""

    def __init__(
        self,
        context: TrainingContext,
        graphs: LossGraphs,
        adapters: LiveAdapters,
        enqueue: Callable[[LiveAdapter, Op], str | None],
    ) -> None:
        """``enqueue`` hands an op to the scheduler, and returns why it was not taken, if so."""
        self._store = context.store
        self._running = context.running
        self._graphs = graphs
        self._adapters = adapters
        self._enqueue = enqueue
        self._lines: dict[str, tuple[LiveAdapter, list[Replay]]] = {}  # by run: what is not decoded yet, last first
        self._held: dict[str, int] = {}  # bytes of decoded ops, by request id
        self._wake = asyncio.Event()

    def add(self, adapter: LiveAdapter) -> None:
        """All replays of the adapter, which are in order."""
        if adapter.replays:
            self._lines[adapter.run.run_id] = (adapter, [*reversed(adapter.replays.values())])

    def ended(self, op: Op) -> None:
        """An op was settled, or its adapter left: there may be room for another."""
        self._held.pop(op.request_id, None)
        self._wake.set()

    def stop(self) -> None:
        self._wake.set()

    def budget(self) -> Budget:
        return Budget("replayed_ops", sum(self._held.values()), _MOST_BYTES)

    async def run(self) -> None:
        """Returns when nothing is left to be brought back, or when the server ends."""
        while self._lines and not self._adapters.stopping:
            self._wake.clear()
            if not [run_id for run_id in list(self._lines) if await self._feed(run_id)]:
                await self._wake.wait()

    async def _feed(self, run_id: str) -> bool:
        """Decode the next op of an adapter, if there is room; returns whether there is less to do now."""
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
            return True  # it left meanwhile, and who waited was told
        adapter.replays[replay.seq] = replay
        self._held[op.request_id] = op.price.held_bytes
        message = self._enqueue(adapter, op)
        assert message is None, f"{op.request_id} has a place in the sequence: {message}"
        return True

    async def _read(self, adapter: LiveAdapter, replay: Replay) -> tuple[Op, Replay]:
        """Reading and decoding count as running: they may end the process, too."""
        request_id = replay.without_body().request_id
        if self._running.deaths(request_id) >= MOST_DEATHS:
            return replay.without_body(), replay  # it will not run
        while True:
            try:
                async with self._running.noted([request_id], decoding=True):
                    op, decoded = await decode(self._store, adapter.run, adapter.kind, replay)
                    return await self._graphs.resolved(op, adapter.run), decoded
            except DatabaseUnavailableError as error:
                logger.error("request %s waits for the database: %s", request_id, error)
                await asyncio.sleep(_RETRY_SECONDS)
            except Exception as error:  # noqa: BLE001 - an edge: what cannot be read costs its own adapter alone
                return await self._unreadable(adapter, replay, error)

    async def _unreadable(self, adapter: LiveAdapter, replay: Replay, error: Exception) -> tuple[Op, Replay]:
        """Damage costs an op that has not run, or the adapter, if what it is now cannot be found out any more."""
        op, run = replay.without_body(), adapter.run
        logger.error("damaged: request %s of tenant %s in the journal", op.request_id, run.tenant_id, exc_info=error)
        if replay.ended:
            what = f"its journal on the server's disk is damaged at op {op.seq}"
            self._adapters.fail(adapter, await self._store.damage.fail_run(run.run_id, run.tenant_id, what))
            return op, replay
        message = f"request {op.request_id}: its body in the journal is damaged; send it again"
        damage = Damage(f"request {op.request_id}", message, time.time(), run.tenant_id, run.run_id)
        await self._store.damage.note(damage)
        return op, replace(replay, repeated=Outcome.failure(message, "server", Ending.REFUSED))
