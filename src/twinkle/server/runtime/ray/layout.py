"""The layout of a server on Ray: the replicas of every model and of the processors, and how one is chosen."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import ApplicationSpec, ModelArgs, ProcessorArgs, ServedModelConfig


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


GATEWAY = "Gateway"  # the deployment of an application whose replicas are interchangeable


@dataclass(frozen=True)
class Layout:
    """All replicas of a server that are addressed by name."""

    models: Mapping[str, Replicas]  # by the name of the served model
    processors: Replicas
    applications: Mapping[str, str]  # the application of each replica; a replica has the name of its deployment


def layout_of(config: ServerConfig) -> Layout:
    """Return which replica serves which model. The configuration decides, so all processes agree."""
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
    """Return the number of replicas. It is fixed, not autoscaled, because replicas hold adapters or processors."""
    said = application.deployments[0].replicas if application.deployments else None
    in_args = application.args.processes if isinstance(application.args, ProcessorArgs) else 1
    return said or in_args


def on_own_gpu(served: ServedModelConfig) -> ServedModelConfig:
    """Return the model's configuration with device ``cuda`` for ``cuda:N``: Ray shows a process only its own GPU."""
    device = served.model.compute_device
    if device is None or not device.startswith("cuda:"):
        return served
    return replace(served, model=served.model.model_copy(update={"device": "cuda"}))
