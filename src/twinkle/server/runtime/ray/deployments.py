"""Serve deployments: a thin class around each kind of host, and the options that each is deployed with.

Serve runs constructors, which may be coroutines, methods and the ASGI application of a replica on one event loop.
"""

import contextlib
import os
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import ray
from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve import Application

from twinkle.errors import TwinkleServerError
from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import ApplicationSpec, ModelArgs, ProcessorArgs, ServerArgs
from twinkle.server.config.sampler_process import has_own_process, resources_of
from twinkle.server.config.sections import names_this_machine
from twinkle.server.config.serving import ServedModelConfig
from twinkle.server.gateway.fleet import ModelReport, TenantReport
from twinkle.server.http import asgi_relay as relay
from twinkle.server.http.asgi_relay import AsgiApp, HttpHead, HttpReply, HttpRequest
from twinkle.server.runtime.ray.hosts import GatewayHost, ModelHost, Process, ProcessorHost
from twinkle.server.runtime.ray.layout import GATEWAY, replica_names, wanted_replicas
from twinkle.server.runtime.ray.replica import Refusal
from twinkle.server.runtime.ray.router import answered
from twinkle.server.runtime.ray.sampler_engine import devices_of
from twinkle.server.runtime.ray.trainer_group import mesh_of
from twinkle.server.telemetry.json_logs import configure_logging
from twinkle.server.types import RunRecord, SessionRecord

# Each waiting future holds a request here: Serve's own default of 5 would stall everything.
_ONGOING = 4096
# A replica finishes what runs and puts every adapter on disk. Being killed loses nothing either.
_SHUTDOWN_SECONDS = 300.0
# What Serve is told as the configuration says it.
_SERVE_OPTIONS = (
    "max_ongoing_requests",
    "max_queued_requests",
    "health_check_period_s",
    "health_check_timeout_s",
    "graceful_shutdown_wait_loop_s",
    "graceful_shutdown_timeout_s",
)
_LOG_BYTES = 64 * 2**20
_LIGHT_CPUS = 0.1  # gateways, processors and mocks wait more than they work


@serve.ingress()
class GatewayReplica:
    """A front door: of the server itself, or of a sampler, whose engine is with its model or in an actor of its own."""

    async def __init__(self, config: ServerConfig, keeps_house: bool) -> None:  # type: ignore[misc]
        name = f"gateway-{serve.get_replica_context().replica_id.unique_id}"
        _log_to(config, name)
        self._host = GatewayHost(await Process.open(config), name, keeps_house=keeps_house)
        self._loopback = LoopbackOnly()

    def __serve_build_asgi_app__(self) -> AsgiApp:
        return self._host.entrance

    async def check_health(self) -> None:
        """Is called by Serve before the first request, too."""
        self._loopback.enforce()

    async def __del__(self) -> None:
        await self._host.stop()


class ModelReplica:
    """One replica of a base model."""

    async def __init__(  # type: ignore[misc]
        self, config: ServerConfig, served: ServedModelConfig, name: str, *companions: object
    ) -> None:
        """``companions``: the other replicas, which Serve deploys with the first one."""
        _log_to(config, name)
        self._host = await ModelHost.open(config, served, name)
        self._loopback = LoopbackOnly()

    async def answer(self, request: HttpRequest) -> HttpReply:
        return await answered(self._host.app, request)

    async def stream(self, request: HttpRequest) -> AsyncGenerator[HttpHead | bytes, None]:
        async with aclosing(relay.stream(self._host.app, request)) as parts:
            async for part in parts:
                yield part

    async def metrics(self) -> list[Metric]:
        return await self._host.metrics()

    async def report(self) -> ModelReport:
        return self._host.report()

    async def of_tenant(self, tenant_id: str) -> TenantReport:
        return self._host.of_tenant(tenant_id)

    async def release_session(self, session: SessionRecord, state: str) -> None:
        await relay.to_the_end(self._host.release_session(session, state))

    async def park_run(self, run: RunRecord, why: str) -> None:
        await relay.to_the_end(self._host.park_run(run, why))

    async def check_health(self) -> None:
        """Serve replaces a replica that raises here. A step that takes long is reported, but never cut off by this."""
        self._loopback.enforce()
        if not self._host.is_alive:
            raise TwinkleServerError(self._host.report().detail)

    async def __del__(self) -> None:
        await self._host.stop()


@serve.ingress()
class FirstModelReplica(ModelReplica):
    """Serve lets one deployment of an application speak HTTP."""

    def __serve_build_asgi_app__(self) -> AsgiApp:
        return self._host.entrance


class ProcessorReplica:
    """One replica of the processor service."""

    async def __init__(  # type: ignore[misc]
        self, config: ServerConfig, name: str, *companions: object
    ) -> None:
        """``companions``: the other replicas, which Serve deploys with the first one."""
        _log_to(config, name)
        self._host = await ProcessorHost.open(config, name)
        self._loopback = LoopbackOnly()

    async def answer(self, request: HttpRequest) -> HttpReply:
        return await answered(self._host.app, request)

    async def metrics(self) -> list[Metric]:
        return await self._host.metrics()

    async def batch(
        self, tenant_id: str, session_id: str, processor_id: str, number: int
    ) -> list[dict[str, Any]] | Refusal:
        return await self._host.batch(tenant_id, session_id, processor_id, number)

    async def end_session(self, session_id: str) -> None:
        await self._host.end_session(session_id)

    async def check_health(self) -> None:
        """Is called by Serve before the first request, too."""
        self._loopback.enforce()

    async def __del__(self) -> None:
        await self._host.stop()


@serve.ingress()
class FirstProcessorReplica(ProcessorReplica):
    """As above."""

    def __serve_build_asgi_app__(self) -> AsgiApp:
        return self._host.entrance


def application_for(config: ServerConfig, one: ApplicationSpec, has_gpus: bool) -> Application:
    """What Serve is to run for one entry of the configuration. ``has_gpus``: the cluster."""
    if isinstance(one.args, ModelArgs):
        (served,) = (each for each in config.served_models if each.model is one.args)
        options = _options(
            one, _LIGHT_CPUS if one.args.backend == "mock" else 1.0, gpus_of_replica(one, one.args, has_gpus)
        )
        names = replica_names(one)
        others = [
            serve.deployment(ModelReplica).options(name=name, **options).bind(config, served, name)
            for name in names[1:]
        ]
        first = serve.deployment(FirstModelReplica).options(name=names[0], **options)
        return first.bind(config, served, names[0], *others)
    if isinstance(one.args, ProcessorArgs):
        options = _options(one, _LIGHT_CPUS)
        names = replica_names(one)
        others = [
            serve.deployment(ProcessorReplica).options(name=name, **options).bind(config, name) for name in names[1:]
        ]
        first = serve.deployment(FirstProcessorReplica).options(name=names[0], **options)
        return first.bind(config, names[0], *others)
    options = _options(one, _LIGHT_CPUS) if isinstance(one.args, ServerArgs) else door_options(config, one)
    gateway = serve.deployment(GatewayReplica).options(name=GATEWAY, **options, **_scale(one))
    return gateway.bind(config, isinstance(one.args, ServerArgs))


def _options(one: ApplicationSpec, num_cpus: float, num_gpus: float = 0.0) -> dict[str, Any]:
    """Of each replica; what the configuration says wins."""
    actor: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    options: dict[str, Any] = {"max_ongoing_requests": _ONGOING, "graceful_shutdown_timeout_s": _SHUTDOWN_SECONDS}
    for given in one.deployments[:1]:
        said = given.model_dump(mode="json", exclude_none=True)
        actor |= said.get("ray_actor_options", {})
        options |= {name: said[name] for name in _SERVE_OPTIONS if name in said}
    return {**options, "ray_actor_options": actor}


def door_options(config: ServerConfig, one: ApplicationSpec) -> dict[str, Any]:
    """Of a sampler's front door, which computes nothing: an engine of its own takes what the application asks for."""
    options = _options(one, _LIGHT_CPUS)
    (model,) = (each.model for each in config.served_models if each.sampler is one.args)
    asked = {} if has_own_process(one, model) else options["ray_actor_options"]
    return {**options, "ray_actor_options": {"num_cpus": _LIGHT_CPUS, **asked, "num_gpus": 0.0}}


def _scale(one: ApplicationSpec) -> Mapping[str, Any]:
    """Gateways keep nothing, and so may come and go."""
    for given in one.deployments[:1]:
        if given.autoscaling_config is not None:
            return {"autoscaling_config": given.autoscaling_config.model_dump(exclude_none=True)}
        return {"num_replicas": given.num_replicas or 1}
    return {"num_replicas": 1}


def _log_to(config: ServerConfig, name: str) -> None:
    """A file of the data directory: replicas have no terminal, and may be on any machine."""
    directory = config.data_dir / "logs"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = RotatingFileHandler(directory / f"{name}.log", maxBytes=_LOG_BYTES, backupCount=2)
    configure_logging(config.logging.level, config.logging.format, file)


def gpus_wanted(config: ServerConfig, has_gpus: bool) -> float:
    """By the replicas of all models, the processes that train for them and those that sample for them."""
    total = 0.0
    for one in config.applications:
        if isinstance(one.args, ModelArgs):
            (served,) = (each for each in config.served_models if each.model is one.args)
            engine = devices_of(config, served)
            ranks = one.args.processes if one.args.processes > 1 and mesh_of(one.args).device_type == "cuda" else 0
            each = gpus_of_replica(one, one.args, has_gpus) + ranks + (0.0 if engine is None else engine.num_gpus)
            total += wanted_replicas(one) * each
    return total


def gpus_of_replica(one: ApplicationSpec, args: ModelArgs, has_gpus: bool) -> float:
    """What is given, else one for a model that is to be on a GPU: it says so, or says nothing and there are some."""
    given = resources_of(one).num_gpus
    if given is not None:
        return given
    if args.backend == "mock" or args.processes > 1:  # the processes of a group have their own
        return 0.0
    wanted = args.compute_device
    return 1.0 if (has_gpus if wanted is None else wanted.startswith("cuda")) else 0.0


__all__ = ["LoopbackOnly"]

_EVERYWHERE = ("0.0.0.0", "::")


class LoopbackOnly:
    """Closes that port once, on a cluster whose address is the loopback one; elsewhere it does nothing."""

    def __init__(self) -> None:
        self._is_done = not names_this_machine(ray.util.get_node_ip_address())

    def enforce(self) -> None:
        """To be called from ``check_health``: Serve asks for it after the port was opened and before any request."""
        if not self._is_done:
            self._is_done = close_open_listeners() > 0


def close_open_listeners() -> int:
    """Stop all sockets of this process that listen on every interface; return how many there were."""
    closed = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # no socket, or gone
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
