"""Turns of tenants: by weight, by priority, and without starving anyone."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.server.scheduling.fair_queue import MAX_SKIPS, FairQueue
from twinkle.server.scheduling.shares import Priority, TenantShare


def filled(shares: dict[str, TenantShare], count: int = 400, cost: float = 1.0) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue(shares.__getitem__)
    for tenant in shares:
        for number in range(count):
            queue.push(tenant, f"{tenant}{number}", tenant, cost)
    return queue


def test_turns_go_by_weight() -> None:
    queue = filled({"a": TenantShare(3.0), "b": TenantShare(1.0)})
    assert Counter(queue.pop() for _ in range(80)) == {"a": 60, "b": 20}


def test_turns_go_by_cost() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.push("long", f"l{number}", "long", cost=30)
        queue.push("short", f"s{number}", "short", cost=10)
    assert Counter(queue.pop() for _ in range(80)) == {"short": 60, "long": 20}


def test_a_higher_priority_goes_first_and_lower_ones_get_a_turn() -> None:
    low, high = TenantShare(priority=Priority.LOW), TenantShare(priority=Priority.HIGH)
    queue = filled({"low": low, "normal": TenantShare(), "high": high})
    turns = Counter(queue.pop() for _ in range(100))
    assert turns["high"] >= 75
    assert min(turns["low"], turns["normal"]) >= 100 // (MAX_SKIPS + 3)


def test_idle_time_earns_nothing_and_leaving_clears_nothing() -> None:
    queue = filled({"busy": TenantShare(), "late": TenantShare(), "hasty": TenantShare()}, count=0)
    for number in range(100):
        queue.push("busy", f"b{number}", "busy")
    for _ in range(50):
        queue.pop()
    for number in range(20):
        queue.push("late", f"l{number}", "late")
    assert Counter(queue.pop() for _ in range(20)) == {"busy": 10, "late": 10}
    turns = Counter[str | None]()
    # one item at a time, each ten times as expensive: the tenant still has to wait for its turn
    for number in range(20):
        queue.push("hasty", f"h{number}", "hasty", cost=10)
        turns.update(queue.pop() for _ in range(2))
        queue.remove("hasty", f"h{number}")
    assert turns["hasty"] <= 4


def test_who_may_not_start_is_passed_over_and_keeps_its_place() -> None:
    queue = filled({"a": TenantShare(), "b": TenantShare()}, count=2)
    assert [queue.pop(lambda tenant: tenant == "b") for _ in range(3)] == ["b", "b", None]
    assert not queue.has_item(lambda tenant: tenant == "b")
    assert queue.has_item()
    assert [queue.pop() for _ in range(3)] == ["a", "a", None]


@settings(deadline=None, max_examples=40)
@given(
    priorities=st.lists(st.sampled_from(Priority), min_size=2, max_size=5),
    weights=st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=5, max_size=5),
)
def test_every_priority_gets_a_turn_among_a_few(priorities: list[Priority], weights: list[float]) -> None:
    shares = {f"t{i}": TenantShare(weights[i], priority) for i, priority in enumerate(priorities)}
    queue = filled(shares)
    waited = dict.fromkeys(set(priorities), 0)
    for _ in range(100):
        tenant = queue.pop()
        assert tenant is not None
        for priority in waited:
            waited[priority] = 0 if shares[tenant].priority is priority else waited[priority] + 1
            assert waited[priority] <= MAX_SKIPS + len(Priority)
