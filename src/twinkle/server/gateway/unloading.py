"""unload_model: a client that is done with a model gives its adapter back before the session ends.

What was accepted before is done first; then the adapter leaves the device as at the end of its session, its last state
kept as a checkpoint for a while. The wish is on record until it is fulfilled: a restart does not forget it.
"""

import asyncio
from typing import TYPE_CHECKING

from twinkle.errors import NotFoundError
from twinkle.server.ids import RequestId
from twinkle.server.services.training.execution import unexpected
from twinkle.server.types import Outcome, RunRecord
from twinkle.server.wire import responses

if TYPE_CHECKING:
    from twinkle.server.gateway.gateway import Gateway

UNLOADING = "it is being unloaded, as its client asked"  # the note of a live run


class Unloading:
    """Runs of the services of one process that are on their way out."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._released = asyncio.Event()  # the server is about to end: nobody waits any longer

    async def ask(self, model_id: str, tenant_id: str) -> str:
        """The id of the request. A model that has left already, for whatever reason, is no mistake."""
        run = await self._gateway.tinker_run(model_id, tenant_id)
        if self._is_live(run):
            await self._gateway.store.runs.note_live(run.run_id, UNLOADING)
            self.begin(run)
        return str(RequestId.for_unload(run.run_id))

    def begin(self, run: RunRecord) -> None:
        """Once; whoever asks again waits for the same end."""
        task = self._tasks.get(run.run_id)
        if task is None:
            task = self._tasks[run.run_id] = asyncio.create_task(self._unload(run))
            task.add_done_callback(lambda _: self._tasks.pop(run.run_id, None))

    async def resume(self) -> None:
        """With what something came in between: this server's end, or a database away."""
        for run in await self._gateway.store.runs.live_noted(UNLOADING):
            if run.model_name in self._gateway.services:
                self.begin(run)

    async def outcome(self, run: RunRecord, timeout: float) -> Outcome | None:
        """None while it has not left and been kept; NotFoundError if nobody asked it to."""
        request_id = str(RequestId.for_unload(run.run_id))
        if run.run_id not in self._tasks and self._is_live(run):
            record = await self._gateway.store.runs.get(run.run_id)
            if record is None or record.note != UNLOADING:
                raise NotFoundError("request", request_id)
            self.begin(run)  # after a restart
        task = self._tasks.get(run.run_id)
        if task is not None:
            await self._end_of(task, timeout)
            if not task.done():
                return None
            if not task.cancelled() and (error := task.exception()) is not None:
                assert isinstance(error, Exception)
                return unexpected(error, request_id)
        return None if self._is_live(run) else responses.unloaded(run.run_id)

    def release_waiters(self) -> None:
        self._released.set()

    async def _end_of(self, task: asyncio.Task[None], timeout: float) -> None:
        released = asyncio.create_task(self._released.wait())
        try:
            await asyncio.wait((task, released), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            released.cancel()

    def _is_live(self, run: RunRecord) -> bool:
        return run.run_id in self._gateway.serving(run.model_name).training.adapters

    async def _unload(self, run: RunRecord) -> None:
        await self._gateway.serving(run.model_name).training.finish_accepted(run.run_id)
        await self._gateway.evict(run, f"model {run.run_id} was unloaded by its client")
