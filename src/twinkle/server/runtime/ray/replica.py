"""What processes of the Ray runtime ask of each other. Nothing here knows how they reach one another."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client.metrics_core import Metric

from twinkle.errors import TwinkleServerError
from twinkle.server.gateway.fleet import ModelReport, TenantReport
from twinkle.server.http.asgi_relay import HttpHead, HttpReply, HttpRequest
from twinkle.server.types import RunRecord, SessionRecord


class ReplicaGoneError(TwinkleServerError):
    """The replica died, or there is none yet. Another takes its place soon and knows all that was acknowledged."""


@dataclass(frozen=True)
class Failure:
    """An error as the value of a remote call: Ray would wrap one that is raised, with a traceback for its message."""

    error: Exception


def raised(answer: object) -> Any:
    """Return what a remote call answered, or raise the error that it answered with."""
    if isinstance(answer, Failure):
        raise answer.error
    return answer


class Replica(Protocol):
    """One replica of a model, or of the processor service. Every method raises :class:`ReplicaGoneError`."""

    async def answer(self, request: HttpRequest) -> HttpReply:
        """Answer a request of a client. The replica hears of it when this is cancelled: the client has left."""
        ...

    def stream(self, request: HttpRequest) -> AsyncGenerator[HttpHead | bytes, None]: ...

    async def metrics(self) -> Sequence[Metric]:
        """Return what the replica's process has recorded."""
        ...

    async def report(self) -> ModelReport:
        """Return how a model's replica is doing."""
        ...

    async def of_tenant(self, tenant_id: str) -> TenantReport:
        """Return what a tenant has on a model's replica."""
        ...

    async def release_session(self, session: SessionRecord, state: str) -> None:
        """Let go of what a session that ended has on a model's replica."""
        ...

    async def park_run(self, run: RunRecord, why: str) -> None:
        """Evict an adapter from a model's replica."""
        ...

    async def batch(self, tenant_id: str, session_id: str, processor_id: str, number: int) -> list[dict[str, Any]]:
        """Return the rows of a batch that a processor of a session holds."""
        ...

    async def end_session(self, session_id: str) -> None:
        """End all processors of a session."""
        ...
