"""All model services of a server, wherever they run: what they report of themselves, and that a session has ended.

A gateway beside its services (the embedded runtime) asks them; one in a process of its own asks other processes. All
that concerns one adapter goes to the service that has it and never passes here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from twinkle.server.types import SessionRecord

if TYPE_CHECKING:
    from twinkle.server.gateway import Services


@dataclass(frozen=True)
class ModelReport:
    """One base model, as it is now. ``numbers`` are sums over all tenants."""

    name: str
    aliases: tuple[str, ...]
    max_context_length: int
    sampleable: bool
    healthy: bool
    detail: str  # of its health, for people
    numbers: Mapping[str, object]
    adapters: Mapping[str, int]  # live ones by tenant
    busy_sessions: frozenset[str]  # those of which something waits to run

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class Fleet(Protocol):
    async def reports(self) -> Mapping[str, ModelReport]:
        """By name, in the order of the configuration."""
        ...

    async def release_session(self, session: SessionRecord, state: str) -> None:
        """Take what a session has off the devices: it ended."""
        ...


def report_of(services: "Services") -> ModelReport:
    """Of what runs in this process, without asking the compute thread: it may be busy for a while."""
    model, training, sampling = services.model, services.training, services.sampling
    healthy, detail = True, "trains" if sampling is None else "trains and samples"
    if not training.alive:
        healthy, detail = False, "training has stopped"
    elif sampling is not None and not sampling.alive:
        healthy, detail = False, "sampling has stopped"
    return ModelReport(
        name=model.name,
        aliases=model.aliases,
        max_context_length=model.max_context_length,
        sampleable=sampling is not None,
        healthy=healthy,
        detail=detail,
        numbers=training.status() | ({} if sampling is None else sampling.status()),
        adapters=training.adapters_by_tenant(),
        busy_sessions=training.busy_sessions(),
    )
