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
class Refusal:
    """An answer of a processor that is an error, without its type: errors do not travel well between processes."""

    message: str
    is_users: bool


class Replica(Protocol):
    """One replica of a model, or of the processor service. Every method raises :class:`ReplicaGoneError`."""

    async def answer(self, request: HttpRequest) -> HttpReply:
        """Whoever cancels this has gone away: the replica hears of it."""
        ...

    def stream(self, request: HttpRequest) -> AsyncGenerator[HttpHead | bytes, None]: ...

    async def metrics(self) -> Sequence[Metric]:
        """What this process has recorded."""
        ...

    async def report(self) -> ModelReport:
        """Of a model."""
        ...

    async def of_tenant(self, tenant_id: str) -> TenantReport:
        """Of a model."""
        ...

    async def release_session(self, session: SessionRecord, state: str) -> None:
        """Of a model."""
        ...

    async def park_run(self, run: RunRecord, why: str) -> None:
        """Of a model."""
        ...

    async def batch(self, tenant_id: str, session_id: str, processor_id: str, number: int) -> list[dict[str, Any]]:
        """Of a processor."""
        ...

    async def end_session(self, session_id: str) -> None:
        """Of a processor."""
        ...
