"""The Serve deployments for each application of the configuration, and the GPUs that they need."""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application

from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import (
    ApplicationSpec,
    ModelArgs,
    ProcessorArgs,
    ServerArgs,
    has_own_process,
    resources_of,
)
from twinkle.server.runtime.ray.hosts import GatewayReplica, ModelReplica, ProcessorReplica
from twinkle.server.runtime.ray.layout import GATEWAY, replica_names, wanted_replicas
from twinkle.server.runtime.ray.sampler_engine import devices_of
from twinkle.server.runtime.ray.trainer_group import mesh_of

# Requests in progress on one replica. Each long poll holds one, so Serve's default of 5 would stall everything.
_ONGOING = 4096
# For a replica to finish its work and write snapshots. If it is killed instead, no acknowledged op is lost either.
_SHUTDOWN_SECONDS = 300.0
# Options that are passed from the configuration to Serve unchanged.
_SERVE_OPTIONS = (
    "max_ongoing_requests",
    "max_queued_requests",
    "health_check_period_s",
    "health_check_timeout_s",
    "graceful_shutdown_wait_loop_s",
    "graceful_shutdown_timeout_s",
)
_LIGHT_CPUS = 0.1  # gateways, processors and mocks wait more than they work


@serve.ingress()
class FrontDoor(GatewayReplica):
    """A gateway that receives HTTP requests from Serve's proxies."""


@serve.ingress()
class FirstModelReplica(ModelReplica):
    """The first replica of a model. It receives HTTP: Serve lets only one deployment of an application do so."""


@serve.ingress()
class FirstProcessorReplica(ProcessorReplica):
    """The first replica of the processors, the one that receives HTTP."""


def application_for(config: ServerConfig, one: ApplicationSpec, has_gpus: bool) -> Application:
    """Return the Serve application for one entry of the configuration. ``has_gpus``: whether the cluster has some."""
    if isinstance(one.args, ModelArgs):
        (served,) = (each for each in config.served_models if each.model is one.args)
        cpus = _LIGHT_CPUS if one.args.backend == "mock" else 1.0
        options = _options(one, cpus, gpus_of_replica(one, one.args, has_gpus))
        return _replicated(one, FirstModelReplica, ModelReplica, options, config, served)
    if isinstance(one.args, ProcessorArgs):
        return _replicated(one, FirstProcessorReplica, ProcessorReplica, _options(one, _LIGHT_CPUS), config)
    options = _options(one, _LIGHT_CPUS) if isinstance(one.args, ServerArgs) else door_options(config, one)
    gateway = serve.deployment(FrontDoor).options(name=GATEWAY, **options, **_scale(one))
    return gateway.bind(config, isinstance(one.args, ServerArgs))


def _replicated(
    one: ApplicationSpec, first: type, other: type, options: Mapping[str, Any], *arguments: object
) -> Application:
    """Return an application with a deployment for each replica. The first receives HTTP; Serve deploys all together."""
    names = replica_names(one)
    others = [serve.deployment(other).options(name=name, **options).bind(*arguments, name) for name in names[1:]]
    return serve.deployment(first).options(name=names[0], **options).bind(*arguments, names[0], *others)


def _options(one: ApplicationSpec, num_cpus: float, num_gpus: float = 0.0) -> dict[str, Any]:
    """Return the options of each replica; those of the configuration replace our defaults."""
    actor: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    options: dict[str, Any] = {"max_ongoing_requests": _ONGOING, "graceful_shutdown_timeout_s": _SHUTDOWN_SECONDS}
    for given in one.deployments[:1]:
        said = given.model_dump(mode="json", exclude_none=True)
        actor |= said.get("ray_actor_options", {})
        options |= {name: said[name] for name in _SERVE_OPTIONS if name in said}
    return {**options, "ray_actor_options": actor}


def door_options(config: ServerConfig, one: ApplicationSpec) -> dict[str, Any]:
    """Return the options of a sampler's front door, which computes nothing.

    If the sampler's engine has its own process, that process gets the resources that the application asks for.
    """
    options = _options(one, _LIGHT_CPUS)
    (model,) = (each.model for each in config.served_models if each.sampler is one.args)
    asked = {} if has_own_process(one, model) else options["ray_actor_options"]
    return {**options, "ray_actor_options": {"num_cpus": _LIGHT_CPUS, **asked, "num_gpus": 0.0}}


def _scale(one: ApplicationSpec) -> Mapping[str, Any]:
    """Return the number of gateways as options of Serve. Gateways hold no state, so they may be autoscaled."""
    for given in one.deployments[:1]:
        if given.autoscaling_config is not None:
            return {"autoscaling_config": given.autoscaling_config.model_dump(exclude_none=True)}
        return {"num_replicas": given.num_replicas or 1}
    return {"num_replicas": 1}


def gpus_wanted(config: ServerConfig, has_gpus: bool) -> float:
    """Return how many GPUs the configuration asks for. A launch on a cluster with fewer waits for more.

    Counted are the replicas of all models, the processes that train for them and those that sample for them.
    """
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
    """Return the GPUs of a model's replica: the configured number, else one if the model computes on a GPU.

    It does if its device says so, or if no device is configured and the cluster has GPUs. By default a replica
    with a mock, or with a group of processes that compute for it, has none itself.
    """
    given = resources_of(one).num_gpus
    if given is not None:
        return given
    if args.backend == "mock" or args.processes > 1:  # the processes of a group have their own
        return 0.0
    wanted = args.compute_device
    return 1.0 if (has_gpus if wanted is None else wanted.startswith("cuda")) else 0.0
