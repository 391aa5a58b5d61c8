"""What runs in one process of the Ray runtime: a gateway, a model with its adapters, or processors.

Plain classes that know handles only through :mod:`~twinkle.server.runtime.ray.remote_replica`; the Serve deployments
around them are in :mod:`~twinkle.server.runtime.ray.deployments`.
"""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client.metrics_core import Metric

from twinkle import hub
from twinkle.errors import GoneError, UserError
from twinkle.server.app import make_app
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.backends.loading import load_served_model
from twinkle.server.backends.text_codec import HubTextCodec
from twinkle.server.config import ServerConfig
from twinkle.server.config.serving import ServedModelConfig
from twinkle.server.gateway.fleet import Fleet, ModelReport, TenantReport, report_of, tenant_report_of
from twinkle.server.gateway.gateway import Gateway, Services
from twinkle.server.gateway.operator_requests import answer_operators
from twinkle.server.gateway.reporting import Telemetry
from twinkle.server.processors.configured import configured_processors
from twinkle.server.processors.service import Processors, ProcessorService
from twinkle.server.runtime.assembly import services_on
from twinkle.server.runtime.ray.directory import Directory
from twinkle.server.runtime.ray.layout import Layout, layout_of, on_own_gpu
from twinkle.server.runtime.ray.remote_fleet import RemoteFleet, RemoteProcessors
from twinkle.server.runtime.ray.remote_replica import RemoteReplica
from twinkle.server.runtime.ray.remote_sampler import RemoteSampler
from twinkle.server.runtime.ray.replica import Refusal
from twinkle.server.runtime.ray.router import Router
from twinkle.server.runtime.ray.sampler_engine import devices_of, start_engine
from twinkle.server.runtime.ray.trainer_group import load_group
from twinkle.server.state import Claim, Store
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.files.directory_lock import DirectoryLock
from twinkle.server.tenancy.configured_tenants import configured_tenants
from twinkle.server.tenancy.memory_guard import ProcessMemory
from twinkle.server.types import RunRecord, SessionRecord

logger = logging.getLogger(__name__)

_HOUSEKEEPING_SECONDS = 15.0
_LEASE = "housekeeping"
_UNANSWERED_SECONDS = 60.0  # whoever could answer an operator has had the time
_FORGOTTEN_SECONDS = 86_400.0  # nobody writes a checkpoint for so long
_EARLIER_SECONDS = 360.0  # for the same replica before this one, which has less than that to end
_LEASE_SECONDS = 3 * _HOUSEKEEPING_SECONDS
# The longest the compute thread or the event loop may hold the interpreter while the other wants it.
_SWITCH_SECONDS = 0.0005


class Process:
    """What all of them have: the configuration, the shared state, who is where, and the way there."""

    def __init__(self, config: ServerConfig, store: Store) -> None:
        self.config = config
        self.store = store
        self.telemetry = Telemetry(config.telemetry)
        self.tenants = configured_tenants(config)
        self.telemetry.usage = self.tenants.usage
        self.files = DataDir(config.data_dir)
        self.memory = ProcessMemory(config.limits)
        self._guarding: asyncio.Task[None] | None = None
        self.layout: Layout = layout_of(config)
        self.replicas = {name: RemoteReplica(address) for name, address in self.layout.addresses.items()}

    @classmethod
    async def open(cls, config: ServerConfig) -> "Process":
        return cls(config, await Store.open(config.data_dir, config.database_url, shared=True))

    def remote_processors(self) -> Processors | None:
        has_any = bool(self.layout.processors.names)
        return RemoteProcessors(self.layout.processors, self.replicas) if has_any else None

    def remote_fleet(self) -> Fleet:
        return RemoteFleet(self.layout, self.replicas)

    def app_of(self, gateway: Gateway) -> FastAPI:
        """The application, for requests that this process answers itself."""

        @asynccontextmanager
        async def nothing(_app: FastAPI) -> AsyncIterator[None]:
            yield

        app = make_app(nothing, self.telemetry)
        app.state.gateway = gateway
        self.telemetry.export_from(gateway)
        self._guarding = asyncio.create_task(self.memory.guard.watch())
        return app

    async def close(self) -> None:
        if self._guarding is not None:
            self._guarding.cancel()
        await self.telemetry.close()  # it reads the state
        await self.store.close()

    def entrance(self, app: FastAPI, own: str | None = None) -> Router:
        directory = Directory(self.config, self.layout, self.store)
        limit = self.config.limits.max_request_bytes
        return Router(app, directory, self.replicas, max_body_bytes=limit, own=own)


class GatewayHost:
    """Sessions, runs, checkpoints, listings; the rest it hands on. One gateway at a time keeps house for all."""

    def __init__(self, process: Process, name: str, *, keeps_house: bool) -> None:
        """``name``: unlike that of any other gateway there ever was."""
        self._process = process
        self._name = name
        process.telemetry.replica = name
        self.gateway = Gateway(
            process.config,
            process.store,
            {},
            process.files,
            process.remote_processors(),
            process.tenants,
            fleet=process.remote_fleet(),
            memory=process.memory,
        )
        self.entrance = process.entrance(process.app_of(self.gateway))
        self._housekeeping = asyncio.create_task(self._keep_house(keeps_house))
        self._watching = asyncio.create_task(self.gateway.running_time.watch())

    async def stop(self) -> None:
        self._housekeeping.cancel()
        self._watching.cancel()
        await self.gateway.flush_heartbeats()
        await self._process.store.leases.give_up(_LEASE, self._name)
        await self._process.close()

    async def _keep_house(self, expires: bool) -> None:
        """A failure is logged and tried again."""
        while True:
            try:
                await self.gateway.flush_heartbeats()
                await self.gateway.books.keep(time.time())
                if expires:
                    await self._expire(time.time())
            except Exception:
                logger.exception("housekeeping failed")
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)

    async def _expire(self, now: float) -> None:
        store = self._process.store
        claim = await store.leases.claim(_LEASE, self._name, now, _LEASE_SECONDS)
        if claim is Claim.TAKEN:  # nobody kept house for a while: perhaps nobody could be reached either
            await store.sessions.forgive_downtime(now)
            await store.ops.forgive_downtime(now)
            await asyncio.to_thread(store.keep_reserve)
            await asyncio.to_thread(self._process.files.remove_unfinished, _FORGOTTEN_SECONDS)
        elif claim is Claim.RENEWED:
            await self._holding_the_lease(self._keep_house_for_all(now))

    async def _keep_house_for_all(self, now: float) -> None:
        await self.gateway.expire(now)
        await answer_operators(self.gateway, now, lambda request: request.created_at < now - _UNANSWERED_SECONDS)

    async def _holding_the_lease(self, work: Coroutine[Any, Any, None]) -> None:
        """Many sessions that end at once take longer than a lease."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=_HOUSEKEEPING_SECONDS))[0]:
                await self._process.store.leases.claim(_LEASE, self._name, time.time(), _LEASE_SECONDS)
            task.result()
        finally:
            task.cancel()


class ModelHost:
    """One replica of a base model: its services, and the whole application for what concerns its adapters."""

    def __init__(
        self, process: Process, name: str, services: Services, computes: Sequence[Compute], lock: DirectoryLock
    ) -> None:
        """``lock``: there is no other process of this name."""
        self._process = process
        self._lock = lock
        self._services = services
        self._computes = computes
        self.gateway = Gateway(
            process.config,
            process.store,
            {services.model.name: services},
            process.files,
            process.remote_processors(),
            process.tenants,
            fleet_of_all=process.remote_fleet(),
            replica=name,
            memory=process.memory,
        )
        self.app = process.app_of(self.gateway)
        self.entrance = process.entrance(self.app, own=name)

    @classmethod
    async def open(cls, config: ServerConfig, served: ServedModelConfig, name: str) -> "ModelHost":
        sys.setswitchinterval(_SWITCH_SECONDS)
        model = await asyncio.to_thread(load_replica, config, on_own_gpu(served))
        lock = await asyncio.to_thread(_only_one, config.data_dir, name)
        process = await Process.open(config)
        group = process.layout.models[served.name]

        def is_ours(run: RunRecord) -> bool:
            return group.owner(run.run_id, run.replica) == name

        compute = Compute()
        sampling = Compute() if isinstance(model.sampler, RemoteSampler) else compute
        services = services_on(
            model,
            config,
            process.store,
            compute,
            process.files,
            process.tenants,
            process.telemetry,
            merge=served.model.merge,
            sampling_compute=sampling,
            memory=process.memory,
            is_ours=is_ours,
            replica=name,
        )
        host = cls(process, name, services, (compute, sampling), lock)
        await host._start()
        return host

    async def _start(self) -> None:
        await self.gateway.books.read_key_names()
        await self._services.training.start()
        if self._services.sampling is not None:
            await self._services.sampling.start()
        self._housekeeping = asyncio.create_task(self._keep_house())
        self._watching = asyncio.create_task(self.gateway.running_time.watch())

    async def stop(self) -> None:
        """What runs is finished, and every adapter is on disk."""
        self._housekeeping.cancel()
        self._watching.cancel()
        self.gateway.release_waiters()
        if self._services.sampling is not None:
            await self._services.sampling.stop()
        await self._services.training.stop()
        await self.gateway.books.flush_usage()
        for compute in self._computes:
            compute.close()
        await self._process.close()
        self._lock.release()

    @property
    def is_alive(self) -> bool:
        """Whether its loops run."""
        sampling = self._services.sampling
        return self._services.training.alive and (sampling is None or sampling.alive)

    async def metrics(self) -> list[Metric]:
        return await self._process.telemetry.families_of_process(self.gateway)

    def report(self) -> ModelReport:
        return report_of(self._services, self._process.config.telemetry.stuck_step_seconds)

    def of_tenant(self, tenant_id: str) -> TenantReport:
        return tenant_report_of(self._services, tenant_id)

    async def release_session(self, session: SessionRecord, state: str) -> None:
        await self.gateway.release_session(session, state)

    async def park_run(self, run: RunRecord, why: str) -> None:
        await self.gateway.park(run, why)

    async def _keep_house(self) -> None:
        work = self.gateway.end_what_was_ending()
        while True:
            try:
                await work
            except Exception:
                logger.exception("housekeeping failed")
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)
            work = self._house(time.time())

    async def _house(self, now: float) -> None:
        await self.gateway.tidy(now)
        has = self._services.training.run
        await answer_operators(self.gateway, now, lambda request: has(request.target) is not None)


class ProcessorHost:
    """Datasets and loaders of the sessions that fall to this replica, each session's in a process of its own."""

    def __init__(self, process: Process, name: str, service: ProcessorService) -> None:
        self._process = process
        self._service = service
        self.gateway = Gateway(
            process.config,
            process.store,
            {},
            process.files,
            service,
            process.tenants,
            fleet=process.remote_fleet(),
            memory=process.memory,
        )
        self.app = process.app_of(self.gateway)
        self.entrance = process.entrance(self.app, own=name)

    @classmethod
    async def open(cls, config: ServerConfig, name: str) -> "ProcessorHost":
        process = await Process.open(config)
        service = configured_processors(config, await asyncio.to_thread(_tokenizers, config), name)
        assert service is not None, "there is an application of processors"
        await service.start()
        host = cls(process, name, service)
        await host.gateway.books.read_key_names()
        return host

    async def stop(self) -> None:
        self.gateway.release_waiters()
        await self._service.stop()
        await self._process.close()

    async def metrics(self) -> list[Metric]:
        return await self._process.telemetry.families_of_process(self.gateway)

    async def batch(
        self, tenant_id: str, session_id: str, processor_id: str, number: int
    ) -> list[dict[str, Any]] | Refusal:
        try:
            return await self._service.batch(tenant_id, session_id, processor_id, number)
        except (UserError, GoneError) as error:
            return Refusal(str(error), isinstance(error, UserError))

    async def end_session(self, session_id: str) -> None:
        await self._service.end_session(session_id)


def _only_one(data_dir: Path, name: str) -> DirectoryLock:
    """A replica that is being replaced puts its adapters on disk before the next one reads them. Blocks."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return DirectoryLock(data_dir, name=f"lock.{name}", wait_seconds=_EARLIER_SECONDS)


def _tokenizers(config: ServerConfig) -> dict[str, str | None]:
    """Folders by the name of the served model; the models themselves are elsewhere."""
    folders: dict[str, str | None] = {}
    for served in config.served_models:
        is_mock = served.model.backend == "mock"
        folder = None if is_mock else str(hub.resolve(served.model.model_id).path)
        folders |= dict.fromkeys(served.names, folder)
    return folders


def load_replica(config: ServerConfig, served: ServedModelConfig) -> ServedModel:
    """Blocks, for as long as loading takes and other processes need to start."""
    devices = devices_of(config, served)
    if devices is None:
        return load_group(served) if served.model.processes > 1 else load_served_model(served)
    starting = start_engine(served, devices)  # it loads while the trainer does
    alone = replace(served, sampler=None)
    model = load_group(alone) if served.model.processes > 1 else load_served_model(alone)
    engine, memory = starting.ready()
    return replace(
        model,
        sampler=RemoteSampler(engine, lambda: start_engine(served, devices).ready()[0], model.trainer),
        memory=f"{model.memory}; in a process of its own: {memory}",
        text=HubTextCodec(hub.load_tokenizer(served.model.model_id)),
    )
