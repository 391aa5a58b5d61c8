"""The methods that processes of the Ray runtime call in each other, independent of how such a call is made."""

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
    """The replica died or has not started yet. Its successor comes soon, and has all acknowledged ops."""


@dataclass(frozen=True)
class Failure:
    """An error returned as a value of a remote call. Ray would wrap a raised error, with a traceback as its message."""

    error: Exception


def tried(work: Callable[[], T]) -> T | Failure:
    """Return the result of the work, or its TwinkleError as a :class:`Failure`. Used in the process that is called."""
    try:
        return work()
    except TwinkleError as error:
        return Failure(error)


def raised(answer: object) -> Any:
    """Return the answer of a remote call, or raise the error in it. Used in the process that calls."""
    if isinstance(answer, Failure):
        raise answer.error
    return answer


def end_process(why: str) -> NoReturn:
    """End this process at once. Serve starts another in its place, which recovers all acknowledged ops."""
    logger.critical("%s: this process ends, and Serve starts another one", why)
    logging.shutdown()
    os._exit(70)  # EX_SOFTWARE


class Replica(Protocol):
    """One replica of a model, or of the processor service. Calls raise :class:`ReplicaGoneError` if it is gone."""

    async def answer(self, request: HttpRequest) -> HttpReply:
        """Answer a client's request. If the client disconnects, the call is cancelled, and the replica notices."""

    def stream(self, request: HttpRequest) -> AsyncGenerator[HttpHead | bytes, None]: ...

    async def metrics(self) -> Sequence[Metric]:
        """Return the metrics of the replica's process."""

    async def report(self) -> ModelReport:
        """Return the health and numbers of a model's replica."""

    async def of_tenant(self, tenant_id: str) -> TenantReport:
        """Return what a tenant has on a model's replica."""

    async def release_session(self, session: SessionRecord, state: str) -> None:
        """Release what an ended session has on a model's replica."""

    async def evict_run(self, run: RunRecord, why: str) -> None:
        """Evict a run from a model's replica."""

    async def batch(self, tenant_id: str, session_id: str, processor_id: str, number: int) -> list[dict[str, Any]]:
        """Return the rows of a batch that a processor of a session holds."""

    async def end_session(self, session_id: str) -> None:
        """End all processors of a session."""
