"""Model services and processors of a server, from a process that has none of them."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric

from twinkle.errors import ShuttingDownError
from twinkle.server.gateway.fleet import ModelReport, TenantReport
from twinkle.server.runtime.ray.layout import Layout, Replicas
from twinkle.server.runtime.ray.replica import Replica, ReplicaGoneError
from twinkle.server.services.training.adapter_status import QueueStatus
from twinkle.server.types import RunRecord, SessionRecord

logger = logging.getLogger(__name__)

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
        """Without replicas that are away."""
        names = [name for group in self._layout.models.values() for name in group.names]
        answers = await asyncio.gather(*(self._tenant_report(name, tenant_id) for name in names))
        found = {name: report for name, report in zip(names, answers, strict=True) if report is not None}
        return {
            model: _joined([found[name] for name in group.names if name in found])
            for model, group in self._layout.models.items()
        }

    async def metrics(self) -> dict[str, Sequence[Metric]]:
        """Without replicas that are away, and without gateways: Serve gives those no names."""
        answers = await asyncio.gather(*(self._metrics_of(name) for name in self._replicas))
        return {name: families for name, families in zip(self._replicas, answers, strict=True) if families is not None}

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

    async def park_run(self, run: RunRecord, why: str) -> None:
        """On the replica that has it. One that is away keeps it: the caller looks whether it has left."""
        group = self._layout.models.get(run.model_name)
        if group is None:
            return  # its base model is not served now
        name = group.owner(run.run_id, run.replica)
        try:
            await asyncio.wait_for(self._replicas[name].park_run(run, why), _RELEASE_SECONDS)
        except (ReplicaGoneError, TimeoutError) as error:
            logger.warning("%s did not park %s: %s", name, run.run_id, error)

    async def _metrics_of(self, name: str) -> Sequence[Metric] | None:
        try:
            return await asyncio.wait_for(self._replicas[name].metrics(), _REPORT_SECONDS)
        except (ReplicaGoneError, TimeoutError):
            return None

    async def _tenant_report(self, name: str, tenant_id: str) -> TenantReport | None:
        try:
            return await asyncio.wait_for(self._replicas[name].of_tenant(tenant_id), _REPORT_SECONDS)
        except (ReplicaGoneError, TimeoutError):
            return None

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
        """They have their own."""

    def _of(self, session_id: str) -> Replica:
        return self._remote[self._replicas.chosen(session_id)]


def _away(report: ModelReport) -> ModelReport:
    return ModelReport(
        name=report.name,
        aliases=report.aliases,
        max_context_length=report.max_context_length,
        sampleable=report.sampleable,
        healthy=False,
        recovering=True,
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
