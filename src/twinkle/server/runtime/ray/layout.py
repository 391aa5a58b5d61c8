"""Who is where: the replicas of every model and of the processors, as Serve's applications and deployments."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import ApplicationSpec, ModelArgs, ProcessorArgs, ServedModelConfig


@dataclass(frozen=True)
class Replicas:
    """The replicas of one base model, or of the processors, by name. Every process of a server knows the same ones."""

    names: tuple[str, ...]
    model: str = ""  # the name under which it is served

    def owner(self, identifier: str, recorded: str) -> str:
        """Return which replica has a run or a sampling session that is on record as ``recorded``'s.

        Where that one is not there any more, because the configuration has changed, another takes its place: all find
        the same one, and what it needs is in the state that they share.
        """
        return recorded if recorded in self.names else self.chosen(identifier)

    def chosen(self, identifier: str) -> str:
        """Return the same replica for the same identifier, and all of them alike often."""
        number = int.from_bytes(hashlib.blake2b(identifier.encode(), digest_size=8).digest())
        return self.names[number % len(self.names)]

    def emptiest(self, identifier: str, runs: Mapping[str, int]) -> str:
        """Return where a new run is to go, given how many runs each replica has."""
        fewest = min(runs.get(name, 0) for name in self.names)
        return Replicas(tuple(name for name in self.names if runs.get(name, 0) == fewest)).chosen(identifier)


GATEWAY = "Gateway"  # the deployment of an application that has no replicas to tell apart


@dataclass(frozen=True)
class Layout:
    models: Mapping[str, Replicas]  # by the name of the served model
    processors: Replicas
    applications: Mapping[str, str]  # of each replica, whose name is also that of its deployment


def layout_of(config: ServerConfig) -> Layout:
    """Return the layout, the same in every process: it follows from the configuration."""
    trained = [one for one in config.applications if isinstance(one.args, ModelArgs)]
    models = {
        served.name: Replicas(replica_names(one), served.name)
        for served, one in zip(config.served_models, trained, strict=True)
    }
    processing = [one for one in config.applications if isinstance(one.args, ProcessorArgs)]
    processors = Replicas(tuple(name for one in processing for name in replica_names(one)))
    applications = {name: one.name for one in (*trained, *processing) for name in replica_names(one)}
    return Layout(models, processors, applications)


def replica_names(application: ApplicationSpec) -> tuple[str, ...]:
    return tuple(f"{application.name}-{number}" for number in range(wanted_replicas(application)))


def wanted_replicas(application: ApplicationSpec) -> int:
    """Return how many replicas there are. They hold adapters or processors, and do not come and go with the load."""
    said = application.deployments[0].replicas if application.deployments else None
    in_args = application.args.processes if isinstance(application.args, ProcessorArgs) else 1
    return said or in_args


def on_own_gpu(served: ServedModelConfig) -> ServedModelConfig:
    """Return the model on device ``cuda``: Ray shows a process its own GPU alone, as number 0."""
    device = served.model.compute_device
    if device is None or not device.startswith("cuda:"):
        return served
    return replace(served, model=served.model.model_copy(update={"device": "cuda"}))
