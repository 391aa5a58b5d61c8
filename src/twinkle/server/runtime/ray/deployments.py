"""The Serve deployments for each application of the configuration."""

from collections.abc import Callable, Mapping, Sequence
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
)
from twinkle.server.config.demand import LIGHT_CPUS, model_replica
from twinkle.server.runtime.ray.gpu_reservations import Place
from twinkle.server.runtime.ray.hosts import GatewayReplica, ModelReplica, ProcessorReplica
from twinkle.server.runtime.ray.layout import GATEWAY, deployment_names, given_name, replica_names

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


@serve.ingress()
class FrontDoor(GatewayReplica):
    """A gateway that receives HTTP requests from Serve's proxies."""


@serve.ingress()
class FirstModelReplica(ModelReplica):
    """The first replica of a model. It receives HTTP: Serve lets only one deployment of an application do so."""


@serve.ingress()
class FirstProcessorReplica(ProcessorReplica):
    """The first replica of the processors, the one that receives HTTP."""


def application_for(
    config: ServerConfig, one: ApplicationSpec, has_gpus: bool, places: Sequence[Place] = ()
) -> Application:
    """Return the Serve application for one entry of the configuration.

    ``has_gpus``: whether the cluster has some. ``places``: of the replicas 0, 1, … that name GPUs.
    """
    if isinstance(one.args, ModelArgs):
        (served,) = (each for each in config.served_models if each.model is one.args)
        own = [_place_of(places, number) for number in range(len(replica_names(one)))]
        options = [_model_options(one, one.args, has_gpus, place) for place in own]
        return _replicated(one, FirstModelReplica, ModelReplica, options, lambda at: (config, served, own[at]))
    if isinstance(one.args, ProcessorArgs):
        options = [_options(one, LIGHT_CPUS)] * len(replica_names(one))
        return _replicated(one, FirstProcessorReplica, ProcessorReplica, options, lambda _at: (config,))
    door = _options(one, LIGHT_CPUS) if isinstance(one.args, ServerArgs) else door_options(config, one)
    gateway = serve.deployment(FrontDoor).options(name=given_name(one) or GATEWAY, **door, **_scale(one))
    return gateway.bind(config, isinstance(one.args, ServerArgs))


def _place_of(places: Sequence[Place], number: int) -> Place | None:
    return places[number] if number < len(places) else None


def _replicated(
    one: ApplicationSpec,
    first: type,
    other: type,
    options: Sequence[Mapping[str, Any]],
    arguments: Callable[[int], tuple[object, ...]],
) -> Application:
    """Return an application with a deployment for each replica. The first receives HTTP; Serve deploys all together.

    ``options`` and ``arguments``: of each replica, by its number.
    """
    names = list(zip(replica_names(one), deployment_names(one), strict=True))

    def bound(number: int, cls: type, *companions: object) -> Application:
        name, deployment = names[number]
        deployed = serve.deployment(cls).options(name=deployment, **options[number])
        return deployed.bind(*arguments(number), name, *companions)

    return bound(0, first, *(bound(number, other) for number in range(1, len(names))))


def _model_options(one: ApplicationSpec, args: ModelArgs, has_gpus: bool, place: Place | None) -> dict[str, Any]:
    """Return the options of a model's replica. A GPU that it names is reserved already (see gpu_reservations.py)."""
    needs = model_replica(one, args, has_gpus)
    options = _options(one, needs.cpus)
    actor = {**options["ray_actor_options"], "num_gpus": needs.gpus}
    if place is not None and needs.named_gpus:
        actor |= {"num_gpus": 0.0, "resources": {**actor.get("resources", {}), **place.resources}}
    return {**options, "ray_actor_options": actor}


def _options(one: ApplicationSpec, num_cpus: float) -> dict[str, Any]:
    """Return the options of each replica; those of the configuration replace our defaults."""
    actor: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": 0.0}
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
    options = _options(one, LIGHT_CPUS)
    (model,) = (each.model for each in config.served_models if each.sampler is one.args)
    asked = {} if has_own_process(one, model) else options["ray_actor_options"]
    return {**options, "ray_actor_options": {"num_cpus": LIGHT_CPUS, **asked, "num_gpus": 0.0}}


def _scale(one: ApplicationSpec) -> Mapping[str, Any]:
    """Return the number of gateways as options of Serve. Gateways hold no state, so they may be autoscaled."""
    for given in one.deployments[:1]:
        if given.autoscaling_config is not None:
            return {"autoscaling_config": given.autoscaling_config.model_dump(exclude_none=True)}
        return {"num_replicas": given.num_replicas or 1}
    return {"num_replicas": 1}
