"""The model services and processors of a server, for other processes, which call them in their replicas."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import astuple, replace
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

_REPORT_SECONDS = 2.0  # a replica that does not answer within this time counts as unhealthy
_LARGEST = ("merge_ratio", "oldest_sample_wait")  # numbers of a model of which the largest of its replicas is shown
_RELEASE_SECONDS = 60.0


class RemoteFleet:
    """All model services of the server, called in their replicas."""

    def __init__(self, layout: Layout, replicas: Mapping[str, Replica]) -> None:
        self._layout = layout
        self._replicas = replicas
        self._of_models = [name for group in layout.models.values() for name in group.names]
        self._last: dict[str, ModelReport] = {}  # the last report of each replica, for while it does not answer

    async def reports(self) -> dict[str, ModelReport]:
        found = await self._answers(self._of_models, lambda replica: replica.report())
        self._last = {**{name: _away(last) for name, last in self._last.items()}, **found}
        return {
            model: _sum(known, {name: name in found for name in group.names})
            for model, group in self._layout.models.items()
            if (known := [self._last[name] for name in group.names if name in self._last])
        }

    async def of_tenant(self, tenant_id: str) -> dict[str, TenantReport]:
        """Return what a tenant has on each model. Replicas that do not answer are left out."""
        found = await self._answers(self._of_models, lambda replica: replica.of_tenant(tenant_id))
        return {
            model: _joined([found[name] for name in group.names if name in found])
            for model, group in self._layout.models.items()
        }

    async def metrics(self) -> dict[str, Sequence[Metric]]:
        """Return metrics by replica, except of replicas that do not answer, and of gateways, which cannot be called."""
        return await self._answers(list(self._replicas), lambda replica: replica.metrics())

    async def release_session(self, session: SessionRecord, state: str) -> None:
        """Tell the replicas of all models that a session ended. One that does not answer learns it when it is back."""
        told = [self._replicas[name].release_session(session, state) for name in self._of_models]
        results = await asyncio.gather(
            *(asyncio.wait_for(each, _RELEASE_SECONDS) for each in told), return_exceptions=True
        )
        for name, result in zip(self._of_models, results, strict=True):
            if isinstance(result, BaseException):
                logger.warning("%s could not be told that session %s %s: %s", name, session.session_id, state, result)

    async def evict(self, run: RunRecord, why: str) -> None:
        """Evict a run in the replica that has it. If it does not answer, the run stays live: the caller checks."""
        group = self._layout.models.get(run.model_name)
        if group is None:
            return  # its base model is not served now
        name = group.owner(run.run_id, run.replica)
        try:
            await asyncio.wait_for(self._replicas[name].evict_run(run, why), _RELEASE_SECONDS)
        except (ReplicaGoneError, TimeoutError) as error:
            logger.warning("%s did not evict %s: %s", name, run.run_id, error)

    async def _answers(self, names: Sequence[str], ask: Callable[[Replica], Awaitable[T]]) -> dict[str, T]:
        """Return the answers of replicas by name. Those that do not answer within two seconds are left out."""

        async def in_time(name: str) -> T | None:
            try:
                return await asyncio.wait_for(ask(self._replicas[name]), _REPORT_SECONDS)
            except (ReplicaGoneError, TimeoutError):
                return None

        answers = await asyncio.gather(*map(in_time, names))
        return {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}


class RemoteProcessors:
    """The processor service, called in the replicas of the processors."""

    def __init__(self, replicas: Replicas, remote: Mapping[str, Replica]) -> None:
        self._replicas = replicas
        self._remote = remote

    async def batch(self, tenant_id: str, session_id: str, processor_id: str, number: int) -> list[dict[str, Any]]:
        try:
            return await self._of(session_id).batch(tenant_id, session_id, processor_id, number)
        except ReplicaGoneError as error:  # the client tries again, and the next replica answers
            raise ShuttingDownError from error

    async def end_session(self, session_id: str) -> None:
        try:
            await asyncio.wait_for(self._of(session_id).end_session(session_id), _RELEASE_SECONDS)
        except (ReplicaGoneError, TimeoutError) as error:  # if the replica is gone, so are its processors
            logger.warning("the processors could not be told that session %s ended: %s", session_id, error)

    def release_waiters(self) -> None:
        """Do nothing: the replicas of the processors release their own waiters."""

    def _of(self, session_id: str) -> Replica:
        return self._remote[self._replicas.chosen(session_id)]


def _away(last: ModelReport) -> ModelReport:
    """Return the last report of a replica that does not answer now: unhealthy, recovering, without numbers."""
    return replace(last, healthy=False, recovering=True, detail="a replica does not answer", numbers={}, adapters={})


def _sum(reports: Sequence[ModelReport], replicas: Mapping[str, bool]) -> ModelReport:
    """Return a model's report from those of its replicas: numbers are added, except those in ``_LARGEST``.

    ``replicas``: whether each replica answers now, also those that have never answered this process.
    """
    silent = [name for name, answers in replicas.items() if not answers]
    first = reports[0]
    sick = next((report for report in reports if not report.healthy), None)
    detail = first.detail if sick is None else sick.detail
    tenants = {tenant for report in reports for tenant in report.adapters}
    return replace(
        first,
        healthy=sick is None and not silent,
        recovering=any(report.recovering for report in reports) or bool(silent),
        detail=f"no answer from {', '.join(silent)}" if silent else detail,
        replicas=replicas,
        numbers=_sum_numbers([report.numbers for report in reports]),
        adapters={tenant: sum(report.adapters.get(tenant, 0) for report in reports) for tenant in tenants},
        busy_sessions=frozenset().union(*(report.busy_sessions for report in reports)),
        sampled_sessions=frozenset().union(*(report.sampled_sessions for report in reports)),
    )


def _joined(reports: Sequence[TenantReport]) -> TenantReport:
    adapters = {run_id: status for report in reports for run_id, status in report.adapters.items()}
    counts = zip(*(astuple(report.queue) for report in reports), strict=True)
    return TenantReport(adapters, QueueStatus(*map(sum, counts)))


def _sum_numbers(all_numbers: Sequence[Mapping[str, object]]) -> dict[str, object]:
    total: dict[str, object] = {}
    for numbers in all_numbers:
        for key, value in numbers.items():
            before = total.get(key)
            if not isinstance(value, int | float) or not isinstance(before, int | float):
                total.setdefault(key, value)
            else:
                total[key] = max(before, value) if key in _LARGEST else before + value
    return total
