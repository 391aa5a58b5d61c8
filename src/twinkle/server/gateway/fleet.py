"""All model services of a server, wherever they run: what they report of themselves, and that a session has ended.

A gateway beside its services (the embedded runtime) answers for them itself; one in a process of its own asks other
processes. All that concerns one adapter goes to the service that has it and never passes here.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from twinkle.server.services.training.adapters import AdapterStatus, QueueStatus
from twinkle.server.types import RunRecord, SessionRecord

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from twinkle.server.gateway.gateway import Services


@dataclass(frozen=True)
class ModelReport:
    """One base model, as it is now. ``numbers`` are sums over all tenants."""

    name: str
    aliases: tuple[str, ...]
    max_context_length: int
    sampleable: bool
    healthy: bool
    recovering: bool  # adapters are being brought back after a restart
    detail: str  # of its health, for people
    numbers: Mapping[str, object]
    adapters: Mapping[str, int]  # live ones by tenant
    busy_sessions: frozenset[str]  # those of which something waits to run

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class TenantReport:
    """What one tenant has on one base model, as it is now."""

    adapters: Mapping[str, AdapterStatus]  # live ones by run
    queue: QueueStatus


class Fleet(Protocol):
    async def reports(self) -> Mapping[str, ModelReport]:
        """By name, in the order of the configuration."""

    async def of_tenant(self, tenant_id: str) -> Mapping[str, TenantReport]:
        """By name of the model."""

    async def metrics(self) -> "Mapping[str, Sequence[Metric]]":
        """What other processes have recorded, by their names."""

    async def release_session(self, session: SessionRecord, state: str) -> None:
        """Take what a session has off the devices: it ended."""

    async def evict(self, run: RunRecord, why: str) -> None:
        """Take one adapter off its device, wherever it is, and keep its state; ``why`` is for errors about it."""


def stopped_in(services: "Services", *, ending: bool = False) -> str | None:
    """Which of its loops does not run, for people; None if all do. What is accepted for it would wait for ever.

    ``ending``: a server that ends lets its loops end, unless an error did.
    """
    loops = {"training": services.training.loop}
    if services.sampling is not None:
        loops["sampling"] = services.sampling.loop
    for name, loop in loops.items():
        if loop.failed or not (loop.alive or ending):
            return f"{name} has stopped"
    return None


def report_of(services: "Services", longest_step: float) -> ModelReport:
    """Of what runs in this process, without asking the compute thread: it may be busy for a while.

    ``longest_step``: seconds after which it counts as stuck.
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
    )


def tenant_report_of(services: "Services", tenant_id: str) -> TenantReport:
    waiting = services.training.context.scheduler.numbers().waiting
    queue = QueueStatus(waiting.get(tenant_id, 0), sum(waiting.values()))
    return TenantReport(services.training.adapters.statuses(tenant_id), queue)
