"""unload_model: a client that is done with a model evicts its adapter before the session ends.

Ops that were accepted earlier are executed first. Then the adapter is evicted as at the end of its session: its last
state is kept as a checkpoint for a while. The request is in the database until it is done, so that it survives a
restart.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from twinkle.errors import NotFoundError
from twinkle.server.gateway.fleet import Services
from twinkle.server.ids import RequestId
from twinkle.server.services.training.execution import unexpected
from twinkle.server.state.store import Store
from twinkle.server.types import Outcome, RunRecord
from twinkle.server.wire import responses

UNLOADING = "it is being unloaded, as its client asked"  # stored as the note of a live run


class Host(Protocol):
    """The part of the gateway that :class:`Unloading` uses."""

    @property
    def store(self) -> Store: ...

    @property
    def services(self) -> Mapping[str, Services]: ...

    def serving(self, model_name: str) -> Services: ...

    async def tinker_run(self, run_id: str, tenant_id: str) -> RunRecord: ...

    async def evict(self, run: RunRecord, why: str) -> None: ...


class Unloading:
    """The runs of this process that are being unloaded, one task for each."""

    def __init__(self, gateway: Host) -> None:
        self._gateway = gateway
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._released = asyncio.Event()  # set when the server is about to end, so that long polls return

    async def ask(self, model_id: str, tenant_id: str) -> str:
        """Begin to unload a model and return the id of the request. A model that is no longer live is no error."""
        run = await self._gateway.tinker_run(model_id, tenant_id)
        if self._is_live(run):
            await self._gateway.store.runs.note_live(run.run_id, UNLOADING)
            self.begin(run)
        return str(RequestId.for_unload(run.run_id))

    def begin(self, run: RunRecord) -> None:
        """Start the task that unloads a run, unless it is running already."""
        task = self._tasks.get(run.run_id)
        if task is None:
            task = self._tasks[run.run_id] = asyncio.create_task(self._unload(run))
            task.add_done_callback(lambda _: self._tasks.pop(run.run_id, None))

    async def resume(self) -> None:
        """Continue unloads that were interrupted by a restart, or by a database that was unavailable."""
        for run in await self._gateway.store.runs.live_noted(UNLOADING):
            if run.model_name in self._gateway.services:
                self.begin(run)

    async def outcome(self, run: RunRecord, timeout: float) -> Outcome | None:
        """Return the outcome of an unload request, waiting up to ``timeout`` seconds; None while it is not done.

        NotFoundError if the run is live and its client has not asked to unload it.
        """
        request_id = str(RequestId.for_unload(run.run_id))
        if run.run_id not in self._tasks and self._is_live(run):
            record = await self._gateway.store.runs.get(run.run_id)
            if record is None or record.note != UNLOADING:
                raise NotFoundError("request", request_id)
            self.begin(run)  # it was asked for before a restart, and maintenance has not resumed it yet
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
