"""The Serve replicas of a server on Ray: each is a gateway, a model with its adapters, or processors.

Serve runs the constructor of a replica (which may be a coroutine), its methods and its ASGI application on one event
loop. Which of these classes receive HTTP, and with which options they are deployed, is in
:mod:`~twinkle.server.runtime.ray.deployments`.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import ray
from prometheus_client.metrics_core import Metric
from ray import serve
from starlette.types import ASGIApp

from twinkle import hub
from twinkle.environment import set_variable_defaults, set_variables
from twinkle.errors import GoneError, TwinkleServerError, UserError
from twinkle.server.app import make_app
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.loading import load_served_model
from twinkle.server.backends.text_codec import HubTextCodec
from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import ServedModelConfig
from twinkle.server.config.sections import names_this_machine
from twinkle.server.gateway.fleet import ModelReport, TenantReport, report_of, stopped_in, tenant_report_of
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.gateway.operator_requests import answer_operators
from twinkle.server.http import asgi_relay as relay
from twinkle.server.http.asgi_relay import HttpHead, HttpReply, HttpRequest
from twinkle.server.processors.service import Processors, configured_processors
from twinkle.server.runtime.assembly import Process, let_threads_alternate, run_maintenance
from twinkle.server.runtime.ray.actors.group_launch import load_group
from twinkle.server.runtime.ray.actors.remote_sampler import RemoteSampler
from twinkle.server.runtime.ray.actors.sampler_engine import devices_of, start_engine
from twinkle.server.runtime.ray.actors.trainer_rank import ranks_of
from twinkle.server.runtime.ray.directory import Directory
from twinkle.server.runtime.ray.gpu_reservations import Place
from twinkle.server.runtime.ray.layout import layout_of, on_own_gpu
from twinkle.server.runtime.ray.remote_fleet import RemoteFleet, RemoteProcessors
from twinkle.server.runtime.ray.remote_replica import RemoteReplica
from twinkle.server.runtime.ray.replica import Failure
from twinkle.server.runtime.ray.router import Router, answered
from twinkle.server.state.files.guards import DirectoryLock, make_data_dir
from twinkle.server.state.records.coordination import Claim
from twinkle.server.telemetry.logs import configure_logging
from twinkle.server.types import RunRecord, SessionRecord
from twinkle.utils.progress import NO_BARS

logger = logging.getLogger(__name__)

_LEASE = "housekeeping"  # the name in the database of the lease on maintenance
_LEASE_ROUNDS = 3  # of maintenance, until the lease of a gateway that does nothing ends
_UNANSWERED_SECONDS = 60.0  # after this an operator's request is one that no model's replica answers
_FORGOTTEN_SECONDS = 86_400.0  # unfinished files older than this are deleted: no checkpoint takes so long to write
_EARLIER_SECONDS = 360.0  # to wait for this replica's predecessor, which has less time than that to end
_LOG_BYTES = 64 * 2**20
_EVERYWHERE = ("0.0.0.0", "::")


class Host:
    """The base of all replicas: one process of the server, and the methods that Serve and other replicas call."""

    async def _open(self, config: ServerConfig) -> Process:
        """Open the state, which all processes share."""
        self._process = await Process.open(config, shared=True)
        self._layout = layout_of(config)
        self._loopback = LoopbackOnly()
        return self._process

    async def _begin(self, processors: Processors | None = None, name: str = "") -> Gateway:
        """Begin to work and to answer. ``name``: of this replica, if other processes send requests to it by name."""
        process, layout = self._process, self._layout
        replicas = {each: RemoteReplica(each, address) for each, address in layout.addresses.items()}
        if processors is None and layout.processors.names:
            processors = RemoteProcessors(layout.processors, replicas)
        self._app = make_app(telemetry=process.telemetry)
        gateway = process.open_gateway(self._app, processors, RemoteFleet(layout, replicas), name)
        directory = Directory(process.config, layout, process.store)
        limit = process.config.limits.max_request_bytes
        self._entrance = Router(self._app, directory, replicas, max_body_bytes=limit, own=name)
        await process.start()
        process.spare_collections()
        return gateway

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the ASGI application for Serve's proxies. Serve calls this if the replica receives HTTP."""
        return self._entrance

    async def answer(self, request: HttpRequest) -> HttpReply:
        return await answered(self._app, request)

    async def stream(self, request: HttpRequest) -> AsyncGenerator[HttpHead | bytes, None]:
        async with aclosing(relay.stream(self._app, request)) as parts:
            async for part in parts:
                yield part

    async def metrics(self) -> list[Metric]:
        return await self._process.telemetry.families_of_process(self._process.gateway)

    async def check_health(self) -> None:
        """Close Serve's open port, if :class:`LoopbackOnly` asks for it.

        Serve calls this by the clock, and before the first request. An override raises to have the replica replaced.
        """
        self._loopback.enforce()


class GatewayReplica(Host):
    """A gateway: the front door of the server, or of a sampler, whose engine is in the model's process or in an actor.

    It answers requests for which the state is enough, and sends on others. Of the server's front doors one at a time,
    the one with the lease, expires sessions and checkpoints for the whole server.
    """

    async def __init__(self, config: ServerConfig, runs_maintenance: bool) -> None:  # type: ignore[misc]
        # Unique, also among earlier gateways: the name holds the lease.
        self._name = f"gateway-{serve.get_replica_context().replica_id.unique_id}"
        log_to(config, self._name)
        process = await self._open(config)
        process.telemetry.replica = self._name
        self._gateway = await self._begin()
        self._runs_maintenance = runs_maintenance
        self._lease_seconds = _LEASE_ROUNDS * process.config.timings.maintenance
        process.run(run_maintenance(self._maintain(time.time()), self._maintain, process.config.timings.maintenance))

    async def __del__(self) -> None:
        self._process.cancel_tasks()
        await self._gateway.flush_heartbeats()
        await self._process.store.leases.give_up(_LEASE, self._name)
        await self._process.close()

    async def _maintain(self, now: float) -> None:
        await self._gateway.flush_heartbeats()
        await self._gateway.usage_recorder.maintain(now)
        if self._runs_maintenance:
            await self._expire(now)

    async def _expire(self, now: float) -> None:
        store = self._process.store
        claim = await store.leases.claim(_LEASE, self._name, now, self._lease_seconds)
        if claim is Claim.TAKEN:  # no gateway held the lease for a while: perhaps clients could reach none either
            await store.sessions.extend_deadlines_after_downtime(now)
            await store.ops.extend_deadlines_after_downtime(now)
            await asyncio.to_thread(store.keep_reserve)
            await asyncio.to_thread(self._process.files.remove_unfinished, _FORGOTTEN_SECONDS)
        elif claim is Claim.RENEWED:
            await self._holding_the_lease(self._maintain_for_all(now))

    async def _maintain_for_all(self, now: float) -> None:
        await self._gateway.expire(now)
        await answer_operators(self._gateway, now, lambda request: request.created_at < now - _UNANSWERED_SECONDS)

    async def _holding_the_lease(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work and renew the lease meanwhile: evicting many sessions at once takes longer than a lease."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._process.config.timings.maintenance))[0]:
                await self._process.store.leases.claim(_LEASE, self._name, time.time(), self._lease_seconds)
            task.result()
        finally:
            task.cancel()


class ModelReplica(Host):
    """One replica of a base model: its services, and the HTTP application for requests about its adapters."""

    async def __init__(  # type: ignore[misc]
        self, config: ServerConfig, served: ServedModelConfig, place: Place | None, name: str, *companions: object
    ) -> None:
        """Load the model. ``companions``: the other replicas, which Serve deploys as arguments of the first.

        ``place``: the machine and the ids of the GPUs, if the model or its sampler names some.
        """
        log_to(config, name)
        let_threads_alternate()
        if place is not None and served.model.processes == 1 and served.model.named_gpus:
            set_variables(place.variables(served.model.named_gpus))  # before torch looks at them
        model = await asyncio.to_thread(load_replica, config, on_own_gpu(served), place)
        self._lock = await asyncio.to_thread(_only_one, config.data_dir, name)
        process = await self._open(config)
        group = self._layout.models[served.name]
        self._services = process.add_model(
            model,
            merge=served.model.merge,
            sampling=served.sampler,
            sampler_apart=isinstance(model.sampler, RemoteSampler),
            is_ours=lambda run: group.owner(run.run_id, run.replica) == name,
            replica=name,
        )
        self._gateway = await self._begin(name=name)
        seconds = process.config.timings.maintenance
        process.run(run_maintenance(self._gateway.resume_interrupted_evictions(), self._maintain, seconds))

    async def report(self) -> ModelReport:
        return report_of(self._services, self._process.config.telemetry.stuck_step_seconds)

    async def of_tenant(self, tenant_id: str) -> TenantReport:
        return tenant_report_of(self._services, tenant_id)

    async def release_session(self, session: SessionRecord, state: str) -> None:
        await relay.shielded(self._gateway.release_session(session, state))

    async def evict_run(self, run: RunRecord, why: str) -> None:
        await relay.shielded(self._gateway.evict(run, why))

    async def check_health(self) -> None:
        """Raise if a service loop has stopped. A step that takes long is reported elsewhere and never cut off here."""
        await super().check_health()
        if stopped_in(self._services) is not None:
            raise TwinkleServerError((await self.report()).detail)

    async def __del__(self) -> None:
        """Finish the work that runs, and write a snapshot of every changed adapter."""
        self._process.cancel_tasks()
        self._gateway.release_waiters()
        await self._process.stop()
        await self._process.close()
        self._lock.release()

    async def _maintain(self, now: float) -> None:
        await self._gateway.maintain_services(now)
        adapters = self._services.training.adapters
        await answer_operators(self._gateway, now, lambda request: request.target in adapters)


class ProcessorReplica(Host):
    """One replica of the processor service: processors of some sessions, with a worker process for each session."""

    async def __init__(self, config: ServerConfig, name: str, *companions: object) -> None:  # type: ignore[misc]
        """Start the service. ``companions``: the other replicas, which Serve deploys as arguments of the first."""
        log_to(config, name)
        await self._open(config)
        service = configured_processors(config, await asyncio.to_thread(_tokenizers, config), name)
        assert service is not None, "there is an application of processors"
        self._service = service
        await service.start()
        gateway = await self._begin(service, name)
        seconds = self._process.config.timings.maintenance
        self._process.run(run_maintenance(gateway.flush_heartbeats(), lambda _now: gateway.flush_heartbeats(), seconds))

    async def batch(
        self, tenant_id: str, session_id: str, processor_id: str, number: int
    ) -> list[dict[str, Any]] | Failure:
        try:
            return await self._service.batch(tenant_id, session_id, processor_id, number)
        except (UserError, GoneError) as error:
            return Failure(error)

    async def end_session(self, session_id: str) -> None:
        await self._service.end_session(session_id)

    async def __del__(self) -> None:
        self._process.cancel_tasks()
        await self._process.gateway.flush_heartbeats()
        self._process.gateway.release_waiters()
        await self._service.stop()
        await self._process.close()


# --- starting a process -----------------------------------------------------------------------------------------------


def load_replica(config: ServerConfig, served: ServedModelConfig, place: Place | None = None) -> ServedModel:
    """Load the model of one replica, here or in a group of processes, and its sampler, here or in its own process.

    Blocks until everything is loaded and all processes have started.
    """
    if served.model.processes > 1:
        load = partial(load_group, processes=ranks_of(config, served, place))
    else:
        load = partial(load_served_model, timings=config.timings)
    devices = devices_of(config, served, place)
    if devices is None:
        return load(served)
    starting = start_engine(served, devices)  # it loads while the trainer is loaded here
    model = load(replace(served, sampler=None))
    engine, memory = starting.ready()
    whole = served.model.train_mode == "full"
    return replace(
        model,
        sampler=RemoteSampler(engine, lambda: start_engine(served, devices).ready()[0], model.trainer, whole=whole),
        memory=f"{model.memory}; in a process of its own: {memory}",
        text=HubTextCodec(hub.load_tokenizer(served.model.model_id)),
    )


def _only_one(data_dir: Path, name: str) -> DirectoryLock:
    """Take the lock of this replica's name. Blocks until its predecessor has ended; DataDirInUseError after 360 s."""
    make_data_dir(data_dir)
    return DirectoryLock(data_dir, name=f"lock.{name}", wait_seconds=_EARLIER_SECONDS)


def _tokenizers(config: ServerConfig) -> dict[str, str | None]:
    """Return the tokenizer folders of served models by name, None for a mock. The models are in other processes."""
    folders: dict[str, str | None] = {}
    for served in config.served_models:
        is_mock = served.model.backend == "mock"
        folder = None if is_mock else str(hub.resolve(served.model.model_id).path)
        folders |= dict.fromkeys(served.names, folder)
    return folders


def log_to(config: ServerConfig, name: str) -> None:
    """Log to a file of the data directory: replicas have no terminal, and may be on any machine."""
    directory = config.data_dir / "logs"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = RotatingFileHandler(directory / f"{name}.log", maxBytes=_LOG_BYTES, backupCount=2)
    configure_logging(config.logging.level, config.logging.format, file)
    set_variable_defaults(NO_BARS)  # before the libraries that read them are imported
    logger.info("%s starts as process %d on %s", name, os.getpid(), ray.util.get_node_ip_address())


class LoopbackOnly:
    """Keeps a replica from listening on the network if its cluster is for this machine only.

    Every Serve replica opens a port on all interfaces for calls over gRPC. According to Serve only its own tests make
    such calls, and there is no setting for the port. On a cluster that listens on the loopback address the port is
    closed before the replica is used; on other clusters nothing is done.
    """

    def __init__(self) -> None:
        self._is_done = not names_this_machine(ray.util.get_node_ip_address())

    def enforce(self) -> None:
        """Close the port, once. Called by ``check_health``, which Serve calls after opening it, before any request."""
        if not self._is_done:
            self._is_done = _close_open_listeners() > 0


def _close_open_listeners() -> int:
    """Shut down all sockets of this process that listen on every interface, and return how many there were."""
    closed = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it is not a socket, or closed meanwhile
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as listener:
                if _listens_everywhere(listener):
                    listener.shutdown(socket.SHUT_RDWR)
                    closed += 1
    return closed


def _listens_everywhere(one: socket.socket) -> bool:
    is_listener = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return bool(is_listener) and one.family != socket.AF_UNIX and one.getsockname()[0] in _EVERYWHERE
