"""Evictions before the end of the session: a client unloads its model, or an adapter reaches its longest lifetime.

Ops that were accepted earlier are executed first. Then the adapter is evicted as at the end of its session: its last
state is kept as a checkpoint for a while. A client's request (unload_model) is in the database until it is done, so
that it survives a restart. The age of an adapter is known from its record when it is added to this process; from then
on it grows with the monotonic clock, so that setting the wall clock ages no adapter.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from twinkle.errors import NotFoundError
from twinkle.server.config import ServerConfig
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
    def config(self) -> ServerConfig: ...

    @property
    def store(self) -> Store: ...

    @property
    def services(self) -> Mapping[str, Services]: ...

    def serving(self, model_name: str) -> Services: ...

    async def tinker_run(self, run_id: str, tenant_id: str) -> RunRecord: ...

    async def evict(self, run: RunRecord, why: str) -> None: ...


class Unloading:
    """The runs of this process that are being evicted before their session ends, one task for each."""

    def __init__(self, gateway: Host) -> None:
        self._gateway = gateway
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._released = asyncio.Event()  # set when the server is about to end, so that long polls return

    async def ask(self, model_id: str, tenant_id: str) -> str:
        """Begin to unload a model and return the id of the request. A model that is no longer live is no error."""
        run = await self._gateway.tinker_run(model_id, tenant_id)
        if self._is_live(run):
            await self._gateway.store.runs.note_live(run.run_id, UNLOADING)
            self._begin_unload(run)
        return str(RequestId.for_unload(run.run_id))

    async def end_lifetimes(self, now: float) -> None:
        """Begin to evict the adapters of this process that are older than ``adapter_max_lifetime_seconds``.

        An eviction that was interrupted, because the database was unavailable, say, is continued. ``now``: by the
        monotonic clock.
        """
        seconds = self._gateway.config.limits.adapter_max_lifetime_seconds
        if seconds is None:
            return
        of_models = [entry.training.adapters for entry in self._gateway.services.values()]
        here = [adapter for adapters in of_models for adapter in (*adapters, *adapters.leaving)]
        for run in [adapter.run for adapter in here if adapter.born <= now - seconds]:
            if run.run_id in self._tasks:
                continue
            why = f"{run.run_id} is older than an adapter may be (adapter_max_lifetime_seconds: {seconds:g})"
            # For requests that come while the checkpoint is being written; then the note names the checkpoint.
            note = f"{why}; its state is being saved; a request in a few seconds says how to resume"
            await self._gateway.store.runs.note_live(run.run_id, note)
            self._begin(run, why, ends_lifetime=True)

    async def resume(self) -> None:
        """Continue unloads that were interrupted by a restart, or by a database that was unavailable."""
        for run in await self._gateway.store.runs.live_noted(UNLOADING):
            if run.model_name in self._gateway.services:
                self._begin_unload(run)

    async def outcome(self, run: RunRecord, timeout: float) -> Outcome | None:
        """Return the outcome of an unload request, waiting up to ``timeout`` seconds; None while it is not done.

        NotFoundError if the run is live and its client has not asked to unload it.
        """
        request_id = str(RequestId.for_unload(run.run_id))
        if run.run_id not in self._tasks and self._is_live(run):
            record = await self._gateway.store.runs.get(run.run_id)
            if record is None or record.note != UNLOADING:
                raise NotFoundError("request", request_id)
            self._begin_unload(run)  # it was asked for before a restart, and maintenance has not resumed it yet
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

    def _begin_unload(self, run: RunRecord) -> None:
        self._begin(run, f"model {run.run_id} was unloaded by its client")

    def _begin(self, run: RunRecord, why: str, *, ends_lifetime: bool = False) -> None:
        """Start the task that evicts a run, unless it is running already."""
        if run.run_id not in self._tasks:
            task = self._tasks[run.run_id] = asyncio.create_task(
                self._end_lifetime(run, why) if ends_lifetime else self._finish_and_evict(run, why)
            )
            task.add_done_callback(lambda _: self._tasks.pop(run.run_id, None))

    async def _finish_and_evict(self, run: RunRecord, why: str) -> None:
        await self._gateway.serving(run.model_name).training.finish_accepted(run.run_id)
        await self._gateway.evict(run, why)

    async def _end_lifetime(self, run: RunRecord, why: str) -> None:
        await self._gateway.serving(run.model_name).training.finish_ready(run.run_id, why)
        await self._gateway.evict(run, why)
        if not self._is_live(run):  # a run that was saved is not live in the database either, and keeps its note
            failed = f"{why}, and its last state could not be saved as a checkpoint; the server's log says why"
            resume = "continue from your last checkpoint; the server tries to save it again when it is started again"
            await self._gateway.store.runs.note_live(run.run_id, f"{failed}: {resume}")
