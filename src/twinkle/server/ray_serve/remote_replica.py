"""Replicas in other processes, by Serve handle: what they are asked, and how it ends when one is gone."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from twinkle.errors import GoneError, TwinkleServerError, UserError
from twinkle.server.fleet import ModelReport
from twinkle.server.ray_serve.layout import Layout, ReplicaAddress
from twinkle.server.relay import HttpHead, HttpReply, HttpRequest
from twinkle.server.replicas import Replicas
from twinkle.server.types import SessionRecord

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 2.0  # a replica that says nothing for so long is not healthy
_RELEASE_SECONDS = 60.0


class ReplicaGoneError(TwinkleServerError):
    """The replica died, or there is none yet. Another takes its place soon and knows all that was acknowledged."""


@dataclass(frozen=True)
class Refusal:
    """An answer of a processor that is an error, without its type: errors do not travel well between processes."""

    message: str
    is_users: bool


class RemoteReplica:
    """One replica. Its handle is made at the first use: applications start in any order."""

    def __init__(self, address: ReplicaAddress) -> None:
        self.address = address
        self._made: DeploymentHandle[Any] | None = None

    @property
    def _handle(self) -> DeploymentHandle[Any]:
        if self._made is None:
            self._made = serve.get_deployment_handle(self.address.deployment, self.address.application)
        return self._made

    async def answer(self, request: HttpRequest) -> HttpReply:
        """Whoever cancels this has gone away: the replica hears of it."""
        reply: HttpReply = await self._asked("answer", request)
        return reply

    async def stream(self, request: HttpRequest) -> AsyncGenerator[HttpHead | bytes, None]:
        parts = None
        try:
            parts = self._handle.options(stream=True).stream.remote(request)
            async for part in parts:
                yield part
        except (RayError, RayServeException) as error:
            raise self._gone(error) from error
        finally:
            if parts is not None:
                parts.cancel()

    async def report(self) -> ModelReport:
        report: ModelReport = await self._asked("report")
        return report

    async def release_session(self, session: SessionRecord, state: str) -> None:
        await self._asked("release_session", session, state)

    async def batch(self, tenant_id: str, session_id: str, processor_id: str, number: int) -> list[dict[str, Any]]:
        """Of a processor."""
        rows: list[dict[str, Any]] | Refusal = await self._asked("batch", tenant_id, session_id, processor_id, number)
        if isinstance(rows, Refusal):
            raise UserError(rows.message) if rows.is_users else GoneError(rows.message)
        return rows

    async def end_session(self, session_id: str) -> None:
        """Of a processor."""
        await self._asked("end_session", session_id)

    async def _asked(self, method: str, *arguments: object) -> Any:
        response = None
        try:
            response = getattr(self._handle, method).remote(*arguments)
            return await response
        except asyncio.CancelledError:
            if response is not None:
                response.cancel()
            raise
        except (RayError, RayServeException) as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> Exception:
        """Only what means that the process is not there is made light of: the rest is a bug, and a 500."""
        if isinstance(error, RayActorError | RayServeException):
            return ReplicaGoneError(f"{self.address.deployment} is being replaced")
        return error


class RemoteFleet:
    """All model services of the server, from a process that has none."""

    def __init__(self, layout: Layout, replicas: Mapping[str, RemoteReplica]) -> None:
        self._layout = layout
        self._replicas = replicas
        self._last: dict[str, ModelReport] = {}  # by replica: what is true of a model even while it is away

    async def reports(self) -> dict[str, ModelReport]:
        await asyncio.gather(*(self._refresh(name) for group in self._layout.models.values() for name in group.names))
        return {model: report for model, group in self._layout.models.items() if (report := self._merged(group))}

    async def release_session(self, session: SessionRecord, state: str) -> None:
        """A replica that is away finds the session ended when it comes back."""
        names = [name for group in self._layout.models.values() for name in group.names]
        results = await asyncio.gather(
            *(
                asyncio.wait_for(self._replicas[name].release_session(session, state), _RELEASE_SECONDS)
                for name in names
            ),
            return_exceptions=True,
        )
        for name, result in zip(names, results, strict=True):
            if isinstance(result, BaseException):
                logger.warning("%s did not hear that session %s %s: %s", name, session.session_id, state, result)

    async def _refresh(self, name: str) -> None:
        try:
            self._last[name] = await asyncio.wait_for(self._replicas[name].report(), _REPORT_SECONDS)
        except (ReplicaGoneError, TimeoutError):
            if name in self._last:
                self._last[name] = _away(self._last[name])

    def _merged(self, group: Replicas) -> ModelReport | None:
        known = [self._last[name] for name in group.names if name in self._last]
        return _sum(known) if known else None


class RemoteProcessors:
    """The processor service, from a process that has none."""

    def __init__(self, replicas: Replicas, remote: Mapping[str, RemoteReplica]) -> None:
        self._replicas = replicas
        self._remote = remote

    async def batch(self, tenant_id: str, session_id: str, processor_id: str, number: int) -> list[dict[str, Any]]:
        return await self._of(session_id).batch(tenant_id, session_id, processor_id, number)

    async def end_session(self, session_id: str) -> None:
        try:
            await asyncio.wait_for(self._of(session_id).end_session(session_id), _RELEASE_SECONDS)
        except (ReplicaGoneError, TimeoutError) as error:  # its processors are gone with it
            logger.warning("the processors did not hear that session %s ended: %s", session_id, error)

    def release_waiters(self) -> None:
        """They have their own."""

    def _of(self, session_id: str) -> RemoteReplica:
        return self._remote[self._replicas.chosen(session_id)]


def _away(report: ModelReport) -> ModelReport:
    return ModelReport(
        name=report.name,
        aliases=report.aliases,
        max_context_length=report.max_context_length,
        sampleable=report.sampleable,
        healthy=False,
        detail="a replica does not answer",
        numbers={},
        adapters={},
        busy_sessions=report.busy_sessions,
    )


def _sum(reports: Sequence[ModelReport]) -> ModelReport:
    """Of all replicas of one model. Ratios are those of the busiest."""
    first = reports[0]
    sick = next((report for report in reports if not report.healthy), None)
    tenants = {tenant for report in reports for tenant in report.adapters}
    return ModelReport(
        name=first.name,
        aliases=first.aliases,
        max_context_length=first.max_context_length,
        sampleable=first.sampleable,
        healthy=sick is None,
        detail=first.detail if sick is None else sick.detail,
        numbers=_sum_numbers([report.numbers for report in reports]),
        adapters={tenant: sum(report.adapters.get(tenant, 0) for report in reports) for tenant in tenants},
        busy_sessions=frozenset().union(*(report.busy_sessions for report in reports)),
    )


def _sum_numbers(all_numbers: Sequence[Mapping[str, object]]) -> dict[str, object]:
    total: dict[str, object] = {}
    for numbers in all_numbers:
        for key, value in numbers.items():
            before = total.get(key)
            if key == "merge_ratio" and isinstance(value, int | float) and isinstance(before, int | float):
                total[key] = max(before, value)
            elif isinstance(value, int | float) and isinstance(before, int | float):
                total[key] = before + value
            else:
                total.setdefault(key, value)
    return total
