"""Model services and processors of a server, from a process that has none of them."""

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from prometheus_client.metrics_core import Metric

from twinkle.errors import ShuttingDownError
from twinkle.server.gateway.fleet import ModelReport, TenantReport
from twinkle.server.runtime.ray.layout import Layout, Replicas
from twinkle.server.runtime.ray.replica import Replica, ReplicaGoneError
from twinkle.server.services.training.adapters import QueueStatus
from twinkle.server.types import RunRecord, SessionRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

_REPORT_SECONDS = 2.0  # a replica that says nothing for so long is not healthy
_RELEASE_SECONDS = 60.0


class RemoteFleet:
    """All model services of the server, from a process that has none."""

    def __init__(self, layout: Layout, replicas: Mapping[str, Replica]) -> None:
        self._layout = layout
        self._replicas = replicas
        self._last: dict[str, ModelReport] = {}  # by replica: what is true of a model even while it is away

    async def reports(self) -> dict[str, ModelReport]:
        await asyncio.gather(*(self._refresh(name) for group in self._layout.models.values() for name in group.names))
        return {model: report for model, group in self._layout.models.items() if (report := self._merged(group))}

    async def of_tenant(self, tenant_id: str) -> dict[str, TenantReport]:
        """Return what a tenant has, by model, without replicas that are away."""
        names = [name for group in self._layout.models.values() for name in group.names]
        answers = await asyncio.gather(*(_answer_in_time(self._replicas[name].of_tenant(tenant_id)) for name in names))
        found = {name: report for name, report in zip(names, answers, strict=True) if report is not None}
        return {
            model: _joined([found[name] for name in group.names if name in found])
            for model, group in self._layout.models.items()
        }

    async def metrics(self) -> dict[str, Sequence[Metric]]:
        """Return metrics by replica, without those that are away, and without gateways: Serve gives those no names."""
        answers = await asyncio.gather(*(_answer_in_time(one.metrics()) for one in self._replicas.values()))
        return {name: families for name, families in zip(self._replicas, answers, strict=True) if families is not None}

    async def release_session(self, session: SessionRecord, state: str) -> None:
        """Tell all replicas that a session ended. One that is away finds that out when it comes back."""
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

    async def park(self, run: RunRecord, why: str) -> None:
        """Evict an adapter from the replica that has it. One that is away keeps it: the caller looks."""
        group = self._layout.models.get(run.model_name)
        if group is None:
            return  # its base model is not served now
        name = group.owner(run.run_id, run.replica)
        try:
            await asyncio.wait_for(self._replicas[name].park_run(run, why), _RELEASE_SECONDS)
        except (ReplicaGoneError, TimeoutError) as error:
            logger.warning("%s did not park %s: %s", name, run.run_id, error)

    async def _refresh(self, name: str) -> None:
        report = await _answer_in_time(self._replicas[name].report())
        if report is not None:
            self._last[name] = report
        elif name in self._last:
            away = "a replica does not answer"
            self._last[name] = replace(
                self._last[name], healthy=False, recovering=True, detail=away, numbers={}, adapters={}
            )

    def _merged(self, group: Replicas) -> ModelReport | None:
        known = [self._last[name] for name in group.names if name in self._last]
        return _sum(known) if known else None


class RemoteProcessors:
    """The processor service, from a process that has none."""

    def __init__(self, replicas: Replicas, remote: Mapping[str, Replica]) -> None:
        self._replicas = replicas
        self._remote = remote

    async def batch(self, tenant_id: str, session_id: str, processor_id: str, number: int) -> list[dict[str, Any]]:
        try:
            return await self._of(session_id).batch(tenant_id, session_id, processor_id, number)
        except ReplicaGoneError as error:  # the next one can say what is left of the session's processors
            raise ShuttingDownError from error

    async def end_session(self, session_id: str) -> None:
        try:
            await asyncio.wait_for(self._of(session_id).end_session(session_id), _RELEASE_SECONDS)
        except (ReplicaGoneError, TimeoutError) as error:  # its processors are gone with it
            logger.warning("the processors did not hear that session %s ended: %s", session_id, error)

    def release_waiters(self) -> None:
        """Do nothing: the replicas of the processors release their own."""

    def _of(self, session_id: str) -> Replica:
        return self._remote[self._replicas.chosen(session_id)]


async def _answer_in_time(asked: Awaitable[T]) -> T | None:
    """Return what a replica answers; None if it is away."""
    try:
        return await asyncio.wait_for(asked, _REPORT_SECONDS)
    except (ReplicaGoneError, TimeoutError):
        return None


def _sum(reports: Sequence[ModelReport]) -> ModelReport:
    """Return the report of a model from those of its replicas. Ratios are those of the busiest."""
    first = reports[0]
    sick = next((report for report in reports if not report.healthy), None)
    tenants = {tenant for report in reports for tenant in report.adapters}
    return replace(
        first,
        healthy=sick is None,
        recovering=any(report.recovering for report in reports),
        detail=first.detail if sick is None else sick.detail,
        numbers=_sum_numbers([report.numbers for report in reports]),
        adapters={tenant: sum(report.adapters.get(tenant, 0) for report in reports) for tenant in tenants},
        busy_sessions=frozenset().union(*(report.busy_sessions for report in reports)),
    )


def _joined(reports: Sequence[TenantReport]) -> TenantReport:
    adapters = {run_id: status for report in reports for run_id, status in report.adapters.items()}
    own, everyone = sum(report.queue.own for report in reports), sum(report.queue.all for report in reports)
    return TenantReport(adapters, QueueStatus(own, everyone))


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
