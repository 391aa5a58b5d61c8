"""The fleet: all model services of a server, in this process or in others.

A gateway asks the fleet for status reports and metrics, and tells it that a session has ended or a run is evicted. A
gateway whose process has the services, as in the embedded runtime, is its own fleet; on Ray the fleet asks the other
processes. Clients' requests about one adapter do not pass here: they go to the service that holds the adapter.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from twinkle.server.backends.backend import ServedModel
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.services.training.adapters import AdapterStatus, QueueStatus
from twinkle.server.services.training.model_service import ModelService
from twinkle.server.types import RunRecord, SessionRecord
from twinkle.server.verbs.runs import NativeRuns

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


@dataclass(frozen=True)
class Services:
    """The services of one base model in this process. ``sampling`` is None where the model is only trained."""

    model: ServedModel
    training: ModelService
    sampling: SamplerService | None
    native: NativeRuns

    def release_versions(self, version_ids: Iterable[str]) -> None:
        """Tell the sampler, if there is one, to drop these versions as soon as no request uses them."""
        if self.sampling is not None:
            for version_id in version_ids:
                self.sampling.release_version(version_id)


@dataclass(frozen=True)
class ModelReport:
    """The current status of one base model. ``numbers`` are about all tenants together."""

    name: str
    aliases: tuple[str, ...]
    max_context_length: int
    sampleable: bool
    healthy: bool
    recovering: bool  # some adapters are still being replayed after a restart, or a replica does not answer
    detail: str  # explains the health, for people to read
    numbers: Mapping[str, object]
    adapters: Mapping[str, int]  # number of live adapters by tenant
    busy_sessions: frozenset[str]  # ids of the sessions that have ops which are not finished
    sampled_sessions: frozenset[str] = frozenset()  # ids of the sampling sessions that have unfinished requests
    device: str = "cpu"  # what the model computes on
    architecture: str = ""  # the family of the model, which decides what its adapters look like in files
    replicas: Mapping[str, bool] = field(default_factory=lambda: {"": True})  # by name: whether it answers now

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def silent_replicas(self) -> list[str]:
        """Return the names of the replicas that do not answer now."""
        return [name for name, answers in self.replicas.items() if not answers]


@dataclass(frozen=True)
class TenantReport:
    """The live adapters of one tenant on one base model, and what waits there."""

    adapters: Mapping[str, AdapterStatus]  # live adapters by run id
    queue: QueueStatus


class Fleet(Protocol):
    """How a gateway reaches all model services of the server."""

    async def reports(self) -> Mapping[str, ModelReport]:
        """Return the status of base models by name, in configured order. A model never heard from is left out."""

    async def of_tenant(self, tenant_id: str) -> Mapping[str, TenantReport]:
        """Return what a tenant has on each base model, by the model's name."""

    async def metrics(self) -> "Mapping[str, Sequence[Metric]]":
        """Return the metrics of replicas in other processes, by the name of the replica; empty if there are none."""

    async def release_session(self, session: SessionRecord, state: str) -> None:
        """Evict the adapters and release the versions of a session that has ended."""

    async def evict(self, run: RunRecord, why: str) -> None:
        """Evict one adapter, on whichever replica it is. Later errors about the run quote ``why``."""


def stopped_in(services: Services, *, ending: bool = False) -> str | None:
    """Return the first service loop of a model that has stopped, as text for people; None if all run.

    Requests that are accepted for a stopped loop would wait for ever. ``ending``: the server is shutting down, so that
    only a loop that failed counts as stopped.
    """
    loops = {"training": services.training.loop}
    if services.sampling is not None:
        loops["sampling"] = services.sampling.loop
    for name, loop in loops.items():
        if loop.failed or not (loop.alive or ending):
            return f"{name} has stopped"
    return None


def report_of(services: Services, longest_step: float) -> ModelReport:
    """Return the report of one model that runs in this process.

    It reads only the state of the event loop and does not wait for the compute thread, which may be busy for a while.
    ``longest_step``: seconds after which a running step counts as stuck, and the model as unhealthy.
    """
    model, training, sampling = services.model, services.training, services.sampling
    healthy, detail = True, "trains" if sampling is None else "trains and samples"
    stopped = stopped_in(services)
    if stopped is not None:
        healthy, detail = False, stopped
    elif (seconds := training.context.compute.step_seconds) > longest_step:
        healthy, detail = False, f"a step has been running for {seconds:.0f} s"
    return ModelReport(
        name=model.name,
        aliases=model.aliases,
        max_context_length=model.max_context_length,
        sampleable=sampling is not None,
        healthy=healthy,
        recovering=any(adapter.repeats for adapter in training.adapters),
        detail=detail,
        numbers=training.status() | ({} if sampling is None else sampling.status()),
        adapters=dict(Counter(adapter.run.tenant_id for adapter in training.adapters)),
        busy_sessions=frozenset(adapter.run.session_id for adapter in training.adapters if adapter.unfinished),
        sampled_sessions=frozenset() if sampling is None else sampling.sessions_under_way(),
        device=model.device,
        architecture=model.architecture,
    )


def tenant_report_of(services: Services, tenant_id: str) -> TenantReport:
    """Return what one tenant has on one model that runs in this process."""
    waiting = services.training.context.scheduler.numbers().waiting
    samples = (0, 0) if services.sampling is None else services.sampling.counts(tenant_id)
    queue = QueueStatus(waiting.get(tenant_id, 0), sum(waiting.values()), *samples)
    return TenantReport(services.training.adapters.statuses(tenant_id), queue)
