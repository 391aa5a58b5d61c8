"""Adapters that leave the device for good, while their last state is kept as a checkpoint."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from twinkle.server.services.training.live_adapter import LiveAdapter
from twinkle.server.services.training.runner import OpRunner
from twinkle.server.state import Store
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.types import Op, Outcome, RunRecord

logger = logging.getLogger(__name__)


@dataclass
class _Leaving:
    """An adapter on its way out: nobody can give it anything to do any more."""

    adapter: LiveAdapter
    waiting: list[Op]  # what never began
    note: str | None = None  # where it is kept, once it is
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Parking:
    """Of one model service. Whatever comes in between, whoever asks again goes on from there."""

    def __init__(self, runner: OpRunner, store: Store, files: DataDir) -> None:
        self._runner = runner
        self._store = store
        self._files = files
        self._leaving: dict[str, _Leaving] = {}  # by run

    async def park(self, run: RunRecord, why: str, keep_seconds: float) -> Sequence[str]:
        """``why``: what happened.

        What was done before a restart is done again first, what runs is finished, what still waits fails. Returns the
        versions of the adapter as it was that the sampler may hold: nobody will be sent to them again.
        """
        adapter = self._runner.adapters.get(run.run_id)
        while adapter is not None and adapter.repeats and not self._runner.stopping:
            await adapter.next_end()
        if self._runner.stopping:
            return ()
        leaving = self._leaving.get(run.run_id) or self._taken_out(run.run_id)
        if leaving is None:
            return ()
        async with leaving.turn:
            if self._leaving.get(run.run_id) is leaving:  # nobody finished it meanwhile
                await self._finish(leaving, why, keep_seconds)
                del self._leaving[run.run_id]
        return leaving.adapter.versions

    def _taken_out(self, run_id: str) -> _Leaving | None:
        adapter = self._runner.adapters.pop(run_id, None)
        if adapter is None:
            return None
        waiting = [adapter.ops.pop(ticket.seq) for ticket in self._runner.scheduler.remove_adapter(run_id)]
        waiting += adapter.take_undecoded()
        leaving = self._leaving[run_id] = _Leaving(adapter, waiting)
        return leaving

    async def _finish(self, leaving: _Leaving, why: str, keep_seconds: float) -> None:
        run_id = leaving.adapter.run.run_id
        if leaving.note is None:
            await self._keep(leaving, why, keep_seconds)
        if leaving.note is None:  # its journal and snapshot stay: the next start tries again
            logger.error("%s could not be kept as a checkpoint: %s", run_id, why)
            return
        await self._store.runs.set_state(run_id, "parked", leaving.note)
        self._runner.measurements.dropped(run_id)
        self._runner.snapshots.forget(run_id)
        await self._runner.snapshots.finish_writing()
        last = await self._store.snapshots.delete(run_id)
        await asyncio.to_thread(self._files.remove_snapshots, run_id, None if last is None else last.directory)
        logger.info("%s left the device: %s", run_id, why)

    async def _keep(self, leaving: _Leaving, why: str, keep_seconds: float) -> None:
        """Whoever waits is told in any case."""
        adapter = leaving.adapter
        try:
            while adapter.ops:
                await adapter.next_end()
            if await self._runner.load(adapter):
                leaving.note = await self._runner.checkpoints.park(adapter.run, why, keep_seconds)
        finally:
            message = leaving.note or f"{why}, and its adapter could not be kept"
            while leaving.waiting:
                self._runner.settle(adapter, leaving.waiting.pop(0), Outcome.failure(message, "user"))
