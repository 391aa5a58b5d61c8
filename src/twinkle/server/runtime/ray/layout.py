"""Who is where: the replicas of every model and of the processors, as Serve's applications and deployments."""

from collections.abc import Mapping
from dataclasses import dataclass

from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import ApplicationSpec, ModelArgs, ProcessorArgs
from twinkle.server.runtime.ray.replicas import Replicas

GATEWAY = "Gateway"  # the deployment of an application that has no replicas to tell apart


@dataclass(frozen=True)
class ReplicaAddress:
    """How a Serve handle finds a replica."""

    application: str
    deployment: str


@dataclass(frozen=True)
class Layout:
    models: Mapping[str, Replicas]  # by the name of the served model
    processors: Replicas
    addresses: Mapping[str, ReplicaAddress]  # by the name of the replica


def layout_of(config: ServerConfig) -> Layout:
    """The same in every process: it follows from the configuration."""
    trained = [one for one in config.applications if isinstance(one.args, ModelArgs)]
    models = {
        served.name: Replicas(replica_names(one)) for served, one in zip(config.served_models, trained, strict=True)
    }
    processing = [one for one in config.applications if isinstance(one.args, ProcessorArgs)]
    processors = Replicas(tuple(name for one in processing for name in replica_names(one)))
    addresses = {name: ReplicaAddress(one.name, name) for one in (*trained, *processing) for name in replica_names(one)}
    return Layout(models, processors, addresses)


def replica_names(application: ApplicationSpec) -> tuple[str, ...]:
    return tuple(f"{application.name}-{number}" for number in range(wanted_replicas(application)))


def wanted_replicas(application: ApplicationSpec) -> int:
    """Whoever holds adapters or processors does not come and go with the load: the most there may be, at once."""
    said = application.deployments[0].replicas if application.deployments else None
    in_args = application.args.processes if isinstance(application.args, ProcessorArgs) else 1
    return said or in_args
