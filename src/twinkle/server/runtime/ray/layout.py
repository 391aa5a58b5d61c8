"""The layout of a server on Ray: the replicas of every model and of the processors, and how one is chosen."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import (
    ApplicationSpec,
    ModelArgs,
    ProcessorArgs,
    ServedModelConfig,
    wanted_replicas,
)


@dataclass(frozen=True)
class Replicas:
    """The names of the replicas of one base model, or of the processors. They are the same in every process."""

    names: tuple[str, ...]
    model: str = ""  # the name under which the model is served; empty for processors

    def owner(self, identifier: str, recorded: str) -> str:
        """Return the replica that has a run or a sampling session. ``recorded``: the replica in its record.

        If the configuration has changed and that replica does not exist any more, another takes over the run. Every
        process chooses the same one, and it finds all that it needs in the shared state.
        """
        return recorded if recorded in self.names else self.chosen(identifier)

    def chosen(self, identifier: str) -> str:
        """Return the replica that an identifier's hash selects: always the same one, and each for about as many."""
        number = int.from_bytes(hashlib.blake2b(identifier.encode(), digest_size=8).digest())
        return self.names[number % len(self.names)]

    def emptiest(self, identifier: str, runs: Mapping[str, int]) -> str:
        """Return the replica for a new run: one of those with the fewest. ``runs``: live runs by replica."""
        fewest = min(runs.get(name, 0) for name in self.names)
        return Replicas(tuple(name for name in self.names if runs.get(name, 0) == fewest)).chosen(identifier)


GATEWAY = "Gateway"  # the deployment of an application whose replicas are interchangeable, if the file names none


@dataclass(frozen=True)
class ServeAddress:
    """Where a Serve handle finds a replica."""

    application: str
    deployment: str


@dataclass(frozen=True)
class Layout:
    """All replicas of a server that are addressed by name."""

    models: Mapping[str, Replicas]  # by the name of the served model
    processors: Replicas
    addresses: Mapping[str, ServeAddress]  # by replica


def layout_of(config: ServerConfig) -> Layout:
    """Return which replica serves which model. The configuration decides, so all processes agree."""
    trained = [one for one in config.applications if isinstance(one.args, ModelArgs)]
    models = {
        served.name: Replicas(replica_names(one), served.name)
        for served, one in zip(config.served_models, trained, strict=True)
    }
    processing = [one for one in config.applications if isinstance(one.args, ProcessorArgs)]
    processors = Replicas(tuple(name for one in processing for name in replica_names(one)))
    addresses = {
        name: ServeAddress(one.name, deployment)
        for one in (*trained, *processing)
        for name, deployment in zip(replica_names(one), deployment_names(one), strict=True)
    }
    return Layout(models, processors, addresses)


def replica_names(application: ApplicationSpec) -> tuple[str, ...]:
    """Return the names of the replicas in records, log files and metrics. No other application has them."""
    return tuple(f"{application.name}-{number}" for number in range(wanted_replicas(application)))


def deployment_names(application: ApplicationSpec) -> tuple[str, ...]:
    """Return the Serve deployment of each replica: the configured name, with a number if there are several replicas.

    Without a configured name it is the replica's. Two applications may have the same deployment names.
    """
    given = given_name(application)
    names = replica_names(application)
    if given is None:
        return names
    return (given,) if len(names) == 1 else tuple(f"{given}-{number}" for number in range(len(names)))


def given_name(application: ApplicationSpec) -> str | None:
    return application.deployments[0].name if application.deployments else None


def on_own_gpu(served: ServedModelConfig) -> ServedModelConfig:
    """Return the model's configuration with device ``cuda`` for ``cuda:N``: Ray shows a process only its own GPU."""
    device = served.model.compute_device
    if device is None or not device.startswith("cuda:"):
        return served
    return replace(served, model=served.model.model_copy(update={"device": "cuda"}))
