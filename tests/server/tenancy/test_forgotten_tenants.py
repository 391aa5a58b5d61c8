"""If any key is a tenant, their number is unlimited: what a process keeps for each tenant must be bounded."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.support.servers.scheduled_ops import op_of
from twinkle.errors import RateLimitError
from twinkle.server import usage
from twinkle.server.scheduling import shares
from twinkle.server.scheduling.fair_queue import FairQueue
from twinkle.server.scheduling.scheduler import Scheduler
from twinkle.server.scheduling.shares import Priority, TenantShare
from twinkle.server.services.futures import Futures
from twinkle.server.services.training.admission import OpAdmission
from twinkle.server.telemetry import instruments
from twinkle.server.telemetry.tenant_series import OTHER, TenantSeries
from twinkle.server.tenancy.rate_limit import TokenRate
from twinkle.server.tenancy.tenants import Tenants, TenantTerms
from twinkle.server.types import Op, OpKind, Refused
from twinkle.server.usage import FORGOTTEN, Usage, UsageCounts

# --- the scheduler ----------------------------------------------------------------------------------------------------


def visit(queue: Scheduler, tenant: str, tokens: int = 10) -> None:
    """Add an adapter, train once and remove it."""
    queue.add_adapter(f"{tenant}/a", tenant)
    queue.submit(op_of(f"{tenant}/a", 0, OpKind.FORWARD_BACKWARD, tokens, b""), 0.0)
    run_all(queue)
    queue.remove_adapter(f"{tenant}/a")


def run_all(queue: Scheduler) -> list[str]:
    order = []
    while (batch := queue.next_batch()) is not None:
        for op in batch.ops:
            order.append(op.adapter_id)
            queue.finish(op, failed=False)
    return order


def test_the_scheduler_forgets_tenants_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "_ABSENT", 20)
    queue = Scheduler(100)
    for number in range(200):
        visit(queue, f"t{number}")
    numbers = queue.numbers()
    assert len(numbers.tokens) <= 21
    assert len(numbers.waiting) <= 21
    assert numbers.all_tokens == 2000  # finished work still counts


def test_leaving_and_coming_back_clears_nothing() -> None:
    """A tenant that used much waits for one that used little, even if it leaves and returns under the same id."""
    queue = Scheduler(10)  # one pass per batch
    visit(queue, "greedy", tokens=1000)
    queue.add_adapter("g", "greedy")
    queue.add_adapter("m", "modest")
    for adapter in ("g", "m"):
        for seq in range(3):
            queue.submit(op_of(adapter, seq, OpKind.FORWARD_BACKWARD, 10, b""), 0.0)
    assert run_all(queue)[:3] == ["m", "m", "m"]


def test_one_without_adapters_who_would_start_anew_is_forgotten_at_once() -> None:
    queue = Scheduler(100, lambda _tenant: TenantShare(priority=Priority.HIGH))
    queue.add_adapter("a", "t")
    queue.remove_adapter("a")
    assert dict(queue.numbers().tokens) == {}


def test_a_higher_priority_goes_first() -> None:
    queue = Scheduler(10, lambda tenant: TenantShare(priority=Priority[tenant.upper()]))
    for tenant in ("low", "high"):
        queue.add_adapter(tenant, tenant)
        queue.submit(op_of(tenant, 0, OpKind.FORWARD_BACKWARD, 10, b""), 0.0)
    assert run_all(queue) == ["high", "low"]


# --- the queue of samples ---------------------------------------------------------------------------------------------


def test_the_queue_forgets_tenants_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "_ABSENT", 20)
    queue: FairQueue[str] = FairQueue()
    for number in range(200):
        queue.push(f"t{number}", "a", "a")
        assert queue.pop() == "a"
    assert len(queue._shares._used) <= 21
    assert len(queue._shares._absent) <= 20


def test_a_tenant_of_the_queue_who_comes_back_is_remembered() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("greedy", "g", "g", cost=1000)
    assert queue.pop() == "g"
    for number in range(3):
        queue.push("greedy", f"g{number}", "greedy")
        queue.push("modest", f"m{number}", "modest")
    assert [queue.pop() for _ in range(6)] == ["modest"] * 3 + ["greedy"] * 3


def test_one_who_withdrew_everything_is_forgotten() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("t", "a", "a")
    assert queue.remove("t", "a")
    assert queue._shares._used == {}


# --- rates, usage, admission ------------------------------------------------------------------------------------------


def test_full_buckets_are_forgotten() -> None:
    now = [0.0]
    rate = TokenRate("x", "max_x", lambda: now[0])
    for number in range(100):
        rate.charge(f"t{number}", 30, 60)
    rate.charge("debtor", 600, 60)
    rate.forget_full()
    assert len(rate._buckets) == 101
    now[0] += 30
    rate.forget_full()
    assert list(rate._buckets) == ["debtor"]
    with pytest.raises(RateLimitError):
        rate.check("debtor", 60)
    now[0] += 1000
    rate.forget_full()
    assert rate._buckets == {}


def test_housekeeping_forgets_them() -> None:
    from twinkle.server.gateway.usage_recorder import UsageRecorder

    class Nowhere:
        async def add(self, _counts: object) -> None: ...

        async def note_storage(self, _day: str, _bytes: object) -> None: ...

        async def storage(self) -> dict[str, int]:
            return {}

    now = [0.0]
    tenants = Tenants(clock=lambda: now[0])
    for rate in (tenants.training_rate, tenants.sampling_rate):
        rate.charge("t", 30, 60)
    now[0] += 60
    asyncio.run(UsageRecorder(SimpleNamespace(usage=Nowhere()), tenants).maintain(0.0))  # type: ignore[arg-type]
    assert (tenants.training_rate._buckets, tenants.sampling_rate._buckets) == ({}, {})


def test_usage_is_kept_of_a_bounded_number_of_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "_REMEMBERED", 10)
    counts = Usage()
    for number in range(100):
        counts.add(f"t{number}", UsageCounts(trained_tokens=number, requests=1))
        counts.add("busy", UsageCounts(trained_tokens=1))
    totals = counts.totals()
    assert len(totals) == 11
    assert totals["busy"].trained_tokens == 100
    assert sum(each.trained_tokens for each in totals.values()) == sum(range(100)) + 100
    assert totals[FORGOTTEN].requests == 91
    assert len(counts.take_unwritten()) == 101  # the counts for the database are complete


def test_series_of_tenants_who_were_forgotten_end_and_no_other_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "_REMEMBERED", 3)
    counts, series = Usage(), TenantSeries(2)
    before = 0.0
    for number in range(30):
        counts.add(f"t{number % 7}", UsageCounts(trained_tokens=10 + number))
        found: dict[str, float] = {}
        for reading in series.usage(counts.totals()):
            if reading.instrument is instruments.TENANT_TRAINED:
                found[reading.labels[0]] = found.get(reading.labels[0], 0) + reading.value
        assert len(found) <= 3
        assert FORGOTTEN not in found
        assert found[OTHER] >= before
        before = found[OTHER]
        own = sum(value for tenant, value in found.items() if tenant != OTHER)
        assert found[OTHER] + own <= sum(10 + each for each in range(number + 1))


def test_admission_keeps_nothing_of_those_who_are_through() -> None:
    tenants, queue, futures = Tenants(TenantTerms()), Scheduler(100), Futures()
    context = SimpleNamespace(tenants=tenants, scheduler=queue, futures=futures)
    admission = OpAdmission(context, {})
    for number in range(50):
        queue.add_adapter(f"a{number}", f"t{number}")
        run = SimpleNamespace(tenant_id=f"t{number}", run_id=f"a{number}")
        op = Op(f"a{number}", 0, OpKind.SAVE, Refused("no"), b"body")
        with admission.entering(SimpleNamespace(run=run, ops={}), op):  # type: ignore[arg-type]
            assert admission._entering == {f"t{number}": 1}
    assert (admission._entering, admission._entering_bytes) == ({}, {})
