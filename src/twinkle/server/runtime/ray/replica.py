"""What processes of the Ray runtime ask of each other. Nothing here knows how they reach one another."""

import logging
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from prometheus_client.metrics_core import Metric

from twinkle.errors import TwinkleError, TwinkleServerError
from twinkle.server.gateway.fleet import ModelReport, TenantReport
from twinkle.server.http.asgi_relay import HttpHead, HttpReply, HttpRequest
from twinkle.server.types import RunRecord, SessionRecord

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ReplicaGoneError(TwinkleServerError):
    """The replica died, or there is none yet. Another takes its place soon and knows all that was acknowledged."""


@dataclass(frozen=True)
class Failure:
    """An error as the value of a remote call: Ray would wrap one that is raised, with a traceback for its message."""

    error: Exception


def tried(work: Callable[[], T]) -> T | Failure:
    """Return what the work returns, or the error that a remote call is to answer with."""
    try:
        return work()
    except TwinkleError as error:
        return Failure(error)


def raised(answer: object) -> Any:
    """Return what a remote call answered, or raise the error that it answered with."""
    if isinstance(answer, Failure):
        raise answer.error
    return answer


def end_process(why: str) -> NoReturn:
    """End this process at once. Serve starts another one in its place, which finds all that was acknowledged."""
    logger.critical("%s: this process ends, and Serve starts another one", why)
    logging.shutdown()
    os._exit(70)  # EX_SOFTWARE


class Replica(Protocol):
    """One replica of a model, or of the processor service. Every method raises :class:`ReplicaGoneError`."""

    async def answer(self, request: HttpRequest) -> HttpReply:
        """Answer a request of a client. The replica hears of it when this is cancelled: the client has left."""

    def stream(self, request: HttpRequest) -> AsyncGenerator[HttpHead | bytes, None]: ...

    async def metrics(self) -> Sequence[Metric]:
        """Return what the replica's process has recorded."""

    async def report(self) -> ModelReport:
        """Return how a model's replica is doing."""

    async def of_tenant(self, tenant_id: str) -> TenantReport:
        """Return what a tenant has on a model's replica."""

    async def release_session(self, session: SessionRecord, state: str) -> None:
        """Let go of what a session that ended has on a model's replica."""

    async def evict_run(self, run: RunRecord, why: str) -> None:
        """Evict an adapter from a model's replica."""

    async def batch(self, tenant_id: str, session_id: str, processor_id: str, number: int) -> list[dict[str, Any]]:
        """Return the rows of a batch that a processor of a session holds."""

    async def end_session(self, session_id: str) -> None:
        """End all processors of a session."""
