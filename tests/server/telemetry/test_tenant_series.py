"""Usage by tenant: a bounded number of series, and no total that ever decreases."""

import random
from dataclasses import dataclass

from twinkle.server.telemetry import instruments
from twinkle.server.telemetry.tenant_series import OTHER, TenantSeries


@dataclass
class Counts:
    trained_tokens: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    optim_steps: int = 0
    requests: int = 0


def trained(series: TenantSeries, totals: dict[str, Counts]) -> dict[str, float]:
    found: dict[str, float] = {}
    for reading in series.usage(totals):
        if reading.instrument is instruments.TENANT_TRAINED:
            found[reading.labels[0]] = found.get(reading.labels[0], 0) + reading.value
    return found


def test_the_busiest_have_their_own() -> None:
    totals = {name: Counts(trained_tokens=tokens) for name, tokens in (("a", 1), ("b", 50), ("c", 9), ("d", 3))}
    series = TenantSeries(2)
    trained(series, totals)
    totals["b"].trained_tokens += 5
    totals["c"].trained_tokens += 6
    totals["d"].trained_tokens += 1000  # too late to get its own series
    assert trained(series, totals) == {"b": 5, "c": 6, OTHER: 1 + 50 + 9 + 3 + 1000}


def test_every_quantity_is_there() -> None:
    readings = TenantSeries(1).usage({"a": Counts(1, 2, 3, 4, 5)})
    others = {reading.instrument.name: reading.value for reading in readings if reading.labels == (OTHER,)}
    assert others == {
        "twinkle_tenant_trained_tokens_total": 1,
        "twinkle_tenant_sampled_tokens_total": 2,
        "twinkle_tenant_prompt_tokens_total": 3,
        "twinkle_tenant_optim_steps_total": 4,
        "twinkle_tenant_requests_total": 5,
    }


def test_no_series_falls_and_nothing_is_lost() -> None:
    rng = random.Random(0)
    totals: dict[str, Counts] = {}
    series, before = TenantSeries(3), {}
    for _ in range(200):
        totals.setdefault(f"tenant-{rng.randrange(12)}", Counts()).trained_tokens += rng.randrange(100)
        now = trained(series, totals)
        assert all(now[name] >= value for name, value in before.items())
        assert len(now) <= 4
        assert sum(now.values()) == sum(counts.trained_tokens for counts in totals.values())
        before = now


def test_queues_follow() -> None:
    series = TenantSeries(1)
    series.usage({"a": Counts(requests=2), "b": Counts(requests=1)})
    assert {r.labels[0]: r.value for r in series.waiting({"a": 3, "b": 4})} == {"a": 3, OTHER: 4}
