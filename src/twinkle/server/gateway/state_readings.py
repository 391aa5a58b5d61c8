"""The instruments that are read: everything a gateway and its services know when somebody asks."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

from twinkle.model.types import TrainerNumbers
from twinkle.server.gateway.gateway import Gateway, Services
from twinkle.server.state import DatabaseUnavailableError
from twinkle.server.telemetry import instruments
from twinkle.server.telemetry.machine import machine_readings
from twinkle.server.telemetry.metrics import Reading
from twinkle.server.telemetry.tenant_series import TenantSeries, UsageTotals

__all__ = ["read_process", "read_state"]

_DATABASE_SECONDS = 1.0  # a scrape does not wait for a database that is away


async def read_process(gateway: Gateway, tenants: TenantSeries | None, usage: UsageTotals | None) -> list[Reading]:
    """What this process knows. ``tenants`` is None where no series may tell them apart."""
    readings = [Reading(instruments.UPTIME, time.time() - gateway.started_at)]
    for name, entry in gateway.services.items():
        readings += _of_model(name, entry)
    for budget in gateway.budgets:
        readings.append(Reading(instruments.BUDGET_USED, budget.used, (budget.resource,)))
        readings.append(Reading(instruments.BUDGET_LIMIT, budget.limit, (budget.resource,)))
    if tenants is not None:
        if usage is not None:
            readings += tenants.usage(usage.totals())
        waiting: Counter[str] = Counter()
        for entry in gateway.services.values():
            waiting.update(entry.training.readings().waiting)
        readings += tenants.waiting(waiting)
    monitoring = gateway.tenants.pools.monitoring
    return readings + await monitoring.in_thread("", partial(machine_readings, gateway.files.root))


def _of_model(model: str, entry: Services) -> Iterator[Reading]:
    training = entry.training.readings()
    yield Reading(instruments.QUEUE_DEPTH, sum(training.waiting.values()), (model, "training"))
    yield Reading(instruments.LONG_POLLS, training.long_polls, (model, "training"))
    yield Reading(instruments.UNFETCHED, training.unfetched_bytes, (model, "training"))
    yield Reading(instruments.COMPUTE_SECONDS, training.busy_seconds, (model, "training"))
    yield Reading(instruments.COMPUTE_STEP, training.step_seconds, (model,))
    yield Reading(instruments.MERGE_RATIO, training.merge_ratio, (model,))
    yield Reading(instruments.ADAPTERS, training.adapters_on_disk, (model, "disk"))
    if training.trainer is not None:
        yield from _of_trainer(model, training.trainer)
    if entry.sampling is not None:
        sampling = entry.sampling.readings()
        yield Reading(instruments.QUEUE_DEPTH, sampling.waiting, (model, "sampling"))
        yield Reading(instruments.LONG_POLLS, sampling.long_polls, (model, "sampling"))
        yield Reading(instruments.UNFETCHED, sampling.unfetched_bytes, (model, "sampling"))
        yield Reading(instruments.COMPUTE_SECONDS, sampling.busy_seconds, (model, "sampling"))


def _of_trainer(model: str, numbers: TrainerNumbers) -> Iterator[Reading]:
    yield Reading(instruments.ADAPTERS, numbers.resident_adapters, (model, "device"))
    yield Reading(instruments.ADAPTERS, numbers.paged_adapters, (model, "host"))
    rows = numbers.token_rows + numbers.padding_rows
    yield Reading(instruments.PADDING_SHARE, numbers.padding_rows / rows if rows else 0.0, (model,))
    if numbers.memory is not None:
        yield Reading(instruments.DEVICE_MEMORY, numbers.memory.allocated, (model, "allocated"))
        yield Reading(instruments.DEVICE_MEMORY, numbers.memory.reserved, (model, "reserved"))
        yield Reading(instruments.DEVICE_MEMORY, numbers.memory.total, (model, "total"))


async def read_state(gateway: Gateway) -> list[Reading]:
    """What all processes of a server share."""
    try:
        async with asyncio.timeout(_DATABASE_SECONDS):
            sessions = await gateway.store.sessions.active()
            sampling = await gateway.store.sampling_sessions.active()
    except (TimeoutError, DatabaseUnavailableError):
        return [Reading(instruments.STATE_UP, 0)]
    return [
        Reading(instruments.STATE_UP, 1),
        Reading(instruments.SESSIONS, sessions),
        Reading(instruments.SAMPLING_SESSIONS, sampling),
    ]
