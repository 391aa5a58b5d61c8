"""Values that are read at a scrape: usage of tenants, and an unavailable database."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from twinkle.server.config import TelemetryConfig
from twinkle.server.gateway import reporting
from twinkle.server.gateway.reporting import Telemetry
from twinkle.server.state.errors import DatabaseUnavailableError
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.tenancy.tenants import Tenants


@dataclass
class Counts:
    trained_tokens: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    optim_steps: int = 0
    requests: int = 0


class Usage:
    def __init__(self) -> None:
        self.counts = {"tenant-1": Counts(), "tenant-2": Counts()}

    def totals(self) -> dict[str, Counts]:
        return self.counts


def gateway(tmp_path: Path, active: Callable[[], Awaitable[int]]) -> SimpleNamespace:
    """Return a gateway without models."""
    sessions = SimpleNamespace(active=active)
    store = SimpleNamespace(sessions=sessions, sampling_sessions=sessions)
    config = SimpleNamespace(served_models=())
    return SimpleNamespace(
        started_at=0.0, services={}, config=config, store=store, files=DataDir(tmp_path), budgets=[], tenants=Tenants()
    )


def values(telemetry: Telemetry, of: SimpleNamespace) -> dict[tuple[str, ...], float]:
    readings = asyncio.run(telemetry.read(of))  # type: ignore[arg-type]
    found: dict[tuple[str, ...], float] = {}
    for reading in readings:
        key = (reading.instrument.name, *reading.labels)
        found[key] = found.get(key, 0) + reading.value
    return found


async def three() -> int:
    return 3


@pytest.mark.parametrize("most", [0, 1])
def test_usage_is_told_where_it_is_allowed(tmp_path: Path, most: int) -> None:
    telemetry = Telemetry(TelemetryConfig(tenants_in_metrics=most))
    usage = telemetry.usage = Usage()
    of = gateway(tmp_path, three)
    usage.counts["tenant-1"].trained_tokens = 1
    values(telemetry, of)
    usage.counts["tenant-1"].trained_tokens += 40
    usage.counts["tenant-2"].trained_tokens = 2
    seen = values(telemetry, of)
    tenants = {key[1]: value for key, value in seen.items() if key[0] == "twinkle_tenant_trained_tokens_total"}
    assert tenants == ({"tenant-1": 40, "other": 1 + 2} if most else {})
    assert seen["twinkle_sessions_active",] == 3


async def away() -> int:
    raise DatabaseUnavailableError


async def hangs() -> int:
    await asyncio.sleep(60)
    return 0


@pytest.mark.parametrize("active", [away, hangs])
def test_a_database_that_is_away_costs_only_its_own_numbers(
    tmp_path: Path, active: Callable[[], Awaitable[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_DATABASE_SECONDS", 0.05)
    seen = values(Telemetry(), gateway(tmp_path, active))
    assert seen["twinkle_state_up",] == 0
    assert ("twinkle_sessions_active",) not in seen
    assert seen["twinkle_disk_free_bytes",] > 0
