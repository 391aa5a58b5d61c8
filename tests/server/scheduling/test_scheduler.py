"""Examples for the scheduler: merging, order, gaps, repeated requests, windows, shares."""

import pytest

from tests.support.servers.scheduled_ops import op_of
from twinkle.server.scheduling.scheduler import Batch, BatchKind, Scheduler
from twinkle.server.scheduling.sequence import (
    REMEMBERED_DIGESTS,
    Accepted,
    Conflict,
    Duplicate,
    Passed,
    Position,
    RefusalReason,
    TooLate,
)
from twinkle.server.types import NativeVerb, Op, OpKind
from twinkle.server.verbs.runs import NativeRuns
from twinkle_client.protocol.verbs import VERBS

FORWARD, BACKWARD, OPTIM = OpKind.FORWARD, OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP
SAVE, LOAD, PUBLISH = OpKind.SAVE, OpKind.LOAD, OpKind.PUBLISH


def ticket(adapter: str, seq: int, kind: OpKind = BACKWARD, tokens: int = 10, body: bytes = b"") -> Op:
    return op_of(adapter, seq, kind, tokens if kind.is_pass else 0, body)


def submit(scheduler: Scheduler, adapter: str, kinds: list[OpKind], first: int = 0, tokens: int = 10) -> None:
    for seq, kind in enumerate(kinds, first):
        assert scheduler.submit(ticket(adapter, seq, kind, tokens), now=0.0) == Accepted()


def numbers(batch: Batch | None) -> list[str]:
    return [] if batch is None else [each.request_id for each in batch.ops]


def run(scheduler: Scheduler, fail: frozenset[str] = frozenset()) -> list[str]:
    """Run one batch from start to end, and return its ops."""
    batch = scheduler.next_batch()
    for each in () if batch is None else batch.ops:
        scheduler.finish(each, failed=each.request_id in fail)
    return numbers(batch)


def one_adapter(**options: int) -> Scheduler:
    scheduler = Scheduler(100, **options)
    scheduler.add_adapter("a", "tenant")
    return scheduler


# --- merging ----------------------------------------------------------------------------------------------------------


def test_pipelining_tenants_share_every_pass():
    scheduler = Scheduler(100)
    for i in range(8):
        scheduler.add_adapter(f"a{i}", f"tenant{i}")
        submit(scheduler, f"a{i}", [BACKWARD, OPTIM] * 3)

    kinds = []
    while batch := scheduler.next_batch():
        kinds.append(batch.kind)
        assert len(batch.ops) == 8
        for each in batch.ops:
            scheduler.finish(each, failed=False)

    assert kinds == [BatchKind.FORWARD_BACKWARD, BatchKind.BARRIERS] * 3
    assert scheduler.numbers().merge_ratio == 8.0
    assert scheduler.numbers().tokens == {f"tenant{i}": 30 for i in range(8)}


def test_merging_off_runs_one_op_a_batch():
    scheduler = Scheduler(100, merge=False)
    for name in "ab":
        scheduler.add_adapter(name, name)
        submit(scheduler, name, [BACKWARD, BACKWARD, OPTIM])

    assert [run(scheduler) for _ in range(6)] == [["a:0"], ["b:0"], ["a:1"], ["a:2"], ["b:1"], ["b:2"]]
    assert scheduler.numbers().merge_ratio == 1.0


def test_a_lone_client_waits_for_nobody():
    scheduler = one_adapter()
    for seq, kind in enumerate([BACKWARD, OPTIM, FORWARD, SAVE]):
        submit(scheduler, "a", [kind], first=seq)
        assert run(scheduler) == [f"a:{seq}"]
        assert scheduler.next_batch() is None


def test_chunks_of_one_call_join_a_batch_up_to_the_budget():
    scheduler = one_adapter()
    submit(scheduler, "a", [BACKWARD] * 4, tokens=30)

    assert run(scheduler) == ["a:0", "a:1", "a:2"]
    assert run(scheduler) == ["a:3"]


def test_an_op_above_the_budget_goes_alone():
    scheduler = Scheduler(100)
    for name, tokens in (("a", 1000), ("b", 10)):
        scheduler.add_adapter(name, name)
        submit(scheduler, name, [BACKWARD], tokens=tokens)

    assert [run(scheduler), run(scheduler)] == [["a:0"], ["b:0"]]


def test_what_does_not_fit_leaves_its_room_to_others():
    scheduler = Scheduler(100)
    for name, tokens in (("a", 60), ("b", 60), ("c", 40)):
        scheduler.add_adapter(name, name)
        submit(scheduler, name, [BACKWARD], tokens=tokens)

    assert [run(scheduler), run(scheduler)] == [["a:0", "c:0"], ["b:0"]]


def test_modes_do_not_mix():
    scheduler = one_adapter()
    submit(scheduler, "a", [FORWARD, BACKWARD, BACKWARD, FORWARD])

    assert [run(scheduler) for _ in range(3)] == [["a:0"], ["a:1", "a:2"], ["a:3"]]


def test_an_adapter_has_one_group_running():
    scheduler = one_adapter()
    submit(scheduler, "a", [BACKWARD, BACKWARD])
    batch = scheduler.next_batch()
    assert batch is not None
    submit(scheduler, "a", [BACKWARD], first=2)

    assert scheduler.next_batch() is None
    scheduler.finish(batch.ops[0], failed=False)
    assert scheduler.next_batch() is None
    scheduler.finish(batch.ops[1], failed=False)
    assert run(scheduler) == ["a:2"]


def test_barriers_go_first_and_together():
    scheduler = Scheduler(100)
    for name, kind in (("a", BACKWARD), ("b", SAVE), ("c", OPTIM)):
        scheduler.add_adapter(name, "tenant")
        submit(scheduler, name, [kind, BACKWARD])

    assert run(scheduler) == ["b:0", "c:0"]
    assert run(scheduler) == ["a:0", "b:1", "c:1", "a:1"]


# --- order and gaps ---------------------------------------------------------------------------------------------------


def test_the_first_chunk_may_arrive_last():
    scheduler = one_adapter()
    for seq in (1, 2):
        scheduler.submit(ticket("a", seq), now=0.0)
        assert scheduler.next_batch() is None
    scheduler.submit(ticket("a", 0), now=1.0)

    assert scheduler.next_deadline() is None
    assert run(scheduler) == ["a:0", "a:1", "a:2"]


def test_an_old_gap_fails_what_waits_behind_it_and_the_adapter_goes_on():
    scheduler = one_adapter()
    scheduler.submit(ticket("a", 3), now=5.0)
    scheduler.submit(ticket("a", 2), now=9.0)
    scheduler.submit(ticket("a", 6), now=50.0)

    assert scheduler.next_deadline() == 365.0
    assert scheduler.refusals(364.0) == []
    refusals = scheduler.refusals(365.0)
    assert [(each.op.seq, each.reason) for each in refusals] == [(2, RefusalReason.GAP), (3, RefusalReason.GAP)]
    assert "numbers 0 to 1 did not arrive within 360 s" in refusals[0].message
    assert scheduler.next_deadline() == 410.0  # 4 and 5 have been missing since 6 arrived
    assert scheduler.refusals(366.0) == []

    submit(scheduler, "a", [BACKWARD, OPTIM], first=4)
    assert run(scheduler) == ["a:4"]
    (closing,) = scheduler.refusals(366.0)
    assert (closing.op.seq, closing.reason, closing.drops_gradient) == (5, RefusalReason.WINDOW, True)
    assert "forward_backward 0 " in closing.message
    assert run(scheduler) == ["a:6"]


def test_a_number_that_was_given_up_comes_too_late():
    scheduler = one_adapter()
    scheduler.submit(ticket("a", 1), now=0.0)
    scheduler.refusals(360.0)

    answer = scheduler.submit(ticket("a", 0), now=361.0)
    assert isinstance(answer, TooLate)
    assert "number 0 came too late: the next one of a is 2" in answer.message
    assert scheduler.submit(ticket("a", 1), now=361.0) == Duplicate()


def test_a_refused_optim_step_behind_a_gap_closes_its_window():
    scheduler = one_adapter()
    submit(scheduler, "a", [OPTIM, BACKWARD, OPTIM], first=1)

    refusals = scheduler.refusals(360.0)
    assert [each.drops_gradient for each in refusals] == [True, False, True]
    assert scheduler.position("a") == Position(3, None)


def test_a_gap_is_given_up_only_when_nothing_runs():
    scheduler = one_adapter()
    submit(scheduler, "a", [OPTIM])
    batch = scheduler.next_batch()
    assert batch is not None
    scheduler.submit(ticket("a", 2), now=0.0)

    assert scheduler.next_deadline() is None
    assert scheduler.refusals(1000.0) == []
    scheduler.finish(batch.ops[0], failed=False)
    assert [each.op.seq for each in scheduler.refusals(1000.0)] == [2]
    assert scheduler.position("a") == Position(2, 1)


@pytest.mark.parametrize("given_up", [True, False])
def test_a_passed_number_that_is_sent_again_during_the_replay_comes_too_late(given_up):
    """The ops before it run again, so it is not behind the adapter yet."""
    scheduler = Scheduler(100)
    scheduler.add_adapter("a", "tenant", next_seq=1, passed=[Passed(2, 2, given_up)], owed=[1, 3])
    again = ticket("a", 2, FORWARD)
    assert isinstance(scheduler.submit(again, now=0.0), TooLate)
    submit(scheduler, "a", [BACKWARD], first=1)
    batch = scheduler.next_batch()
    assert numbers(batch) == ["a:1"]
    assert isinstance(scheduler.submit(again, now=0.0), TooLate)
    scheduler.finish(batch.ops[0], failed=False)
    assert isinstance(scheduler.submit(again, now=0.0), TooLate)
    submit(scheduler, "a", [OPTIM], first=3)
    if given_up:
        assert [each.op.seq for each in scheduler.refusals(0.0)] == [3]
    else:
        assert run(scheduler) == ["a:3"]
    assert scheduler.position("a") == Position(3, None)


def test_numbers_that_ended_before_a_restart_are_passed_over():
    scheduler = Scheduler(100)
    passed = [Passed(3, 9_999, given_up=False), Passed(10_001, 10_001, given_up=True)]
    scheduler.add_adapter("a", "tenant", next_seq=2, passed=passed, owed=[2, 10_000, 10_002])
    submit(scheduler, "a", [BACKWARD, OPTIM], first=10_003)  # new ops, before the replay has submitted any
    assert scheduler.refusals(1e9) == []  # an op that will be replayed is not a gap

    submit(scheduler, "a", [BACKWARD], first=2)
    assert run(scheduler) == ["a:2"]
    assert scheduler.position("a") == Position(9_999, None)
    submit(scheduler, "a", [OPTIM], first=10_000)
    assert run(scheduler) == ["a:10000"]
    submit(scheduler, "a", [FORWARD], first=10_002)
    assert run(scheduler) == ["a:10002"]
    assert run(scheduler) == ["a:10003"]
    (refusal,) = scheduler.refusals(0.0)  # in the window of the number that never arrived
    assert refusal.op.seq == 10_004
    assert "10001 before it failed or never arrived" in refusal.message


def test_a_gap_says_what_it_costs():
    scheduler = one_adapter()
    submit(scheduler, "a", [BACKWARD, OPTIM, BACKWARD], first=1)
    messages = [each.message for each in scheduler.refusals(360.0)]
    assert all("number 0 did not arrive within 360 s" in message for message in messages)
    assert ["gradient since the last optim_step is dropped" in each for each in messages] == [False, True, False]
    assert ["optim_step that follows will be refused" in each for each in messages] == [True, False, True]


@pytest.mark.parametrize("verb", ["step", "clip_grad_and_step"])
def test_a_native_step_after_a_gap_is_refused_and_after_a_failed_pass_runs(verb):
    def native(seq: int, kind: OpKind, verb: str) -> Op:
        return Op("a", seq, kind, NativeVerb(verb, {}, VERBS[verb].steps), b"")

    scheduler = Scheduler(100)
    scheduler.add_adapter("a", "tenant", failed_pass_spoils=NativeRuns.failed_pass_spoils)
    scheduler.submit(native(0, BACKWARD, "forward_backward"), now=0.0)
    scheduler.submit(native(1, OpKind.VERB, verb), now=0.0)
    run(scheduler, fail=frozenset({"a:0"}))
    assert run(scheduler) == ["a:1"]  # the client knows of the failure and continues
    scheduler.submit(native(3, BACKWARD, "forward_backward"), now=0.0)
    assert [each.op.seq for each in scheduler.refusals(360.0)] == [3]
    scheduler.submit(native(4, OpKind.VERB, "lr_step"), now=400.0)
    scheduler.submit(native(5, OpKind.VERB, verb), now=400.0)
    assert run(scheduler) == ["a:4"]
    (refusal,) = scheduler.refusals(400.0)
    assert (refusal.op.seq, refusal.drops_gradient) == (5, True)


# --- repeated requests ------------------------------------------------------------------------------------------------


def test_a_repeated_request_is_the_same_request():
    scheduler = one_adapter()
    submit(scheduler, "a", [BACKWARD])

    def answers() -> list[type]:
        return [type(scheduler.submit(ticket("a", 0, body=body), now=1.0)) for body in (b"", b"other")]

    assert answers() == [Duplicate, Conflict]  # waiting
    batch = scheduler.next_batch()
    assert batch is not None
    assert answers() == [Duplicate, Conflict]  # running
    scheduler.finish(batch.ops[0], failed=False)
    assert answers() == [Duplicate, Conflict]  # done
    assert scheduler.next_batch() is None


def test_only_recent_bodies_are_remembered():
    scheduler = one_adapter()
    submit(scheduler, "a", [BACKWARD] * (REMEMBERED_DIGESTS + 1))
    while run(scheduler):
        pass

    assert isinstance(scheduler.submit(ticket("a", 0), now=1.0), TooLate)
    assert scheduler.submit(ticket("a", 1), now=1.0) == Duplicate()


# --- windows ----------------------------------------------------------------------------------------------------------


def test_the_optim_step_of_a_failed_window_is_refused_and_the_next_window_is_clean():
    scheduler = one_adapter()
    submit(scheduler, "a", [BACKWARD, BACKWARD, SAVE, OPTIM, BACKWARD, OPTIM])

    assert run(scheduler, fail=frozenset({"a:1"})) == ["a:0", "a:1"]
    assert run(scheduler) == ["a:2"]
    assert scheduler.next_batch() is None  # the gradient must be dropped before 4 runs
    (refusal,) = scheduler.refusals(0.0)
    assert (refusal.op.seq, refusal.reason, refusal.drops_gradient) == (3, RefusalReason.WINDOW, True)
    assert "forward_backward 1 " in refusal.message
    assert [run(scheduler), run(scheduler)] == [["a:4"], ["a:5"]]


def test_a_failed_forward_spoils_nothing():
    scheduler = one_adapter()
    submit(scheduler, "a", [FORWARD, OPTIM])

    run(scheduler, fail=frozenset({"a:0"}))
    assert run(scheduler) == ["a:1"]


@pytest.mark.parametrize("load_fails", [False, True])
def test_a_load_that_succeeds_starts_a_clean_window(load_fails: bool):
    scheduler = one_adapter()
    submit(scheduler, "a", [BACKWARD, LOAD, OPTIM])

    run(scheduler, fail=frozenset({"a:0"}))
    run(scheduler, fail=frozenset({"a:1"} if load_fails else ()))
    assert [each.op.seq for each in scheduler.refusals(0.0)] == ([2] if load_fails else [])
    assert run(scheduler) == ([] if load_fails else ["a:2"])


def test_an_adapter_goes_on_inside_a_spoilt_window():
    scheduler = Scheduler(100)
    scheduler.add_adapter("a", "tenant", next_seq=7, failed_seq=5)
    submit(scheduler, "a", [BACKWARD, OPTIM], first=7)

    run(scheduler)
    assert [each.op.seq for each in scheduler.refusals(0.0)] == [8]


# --- adapters come and go ---------------------------------------------------------------------------------------------


def test_removing_returns_what_waits_and_lets_the_rest_finish():
    scheduler = one_adapter()
    submit(scheduler, "a", [BACKWARD, OPTIM, BACKWARD])
    batch = scheduler.next_batch()
    assert batch is not None

    assert [each.seq for each in scheduler.remove_adapter("a")] == [1, 2]
    assert scheduler.waiting("tenant") == 0
    with pytest.raises(ValueError, match="still run"):
        scheduler.add_adapter("a", "tenant")
    scheduler.finish(batch.ops[0], failed=True)
    scheduler.add_adapter("a", "tenant", next_seq=1)
    assert scheduler.next_batch() is None


def test_finishing_twice_is_our_mistake():
    scheduler = one_adapter()
    submit(scheduler, "a", [BACKWARD])
    run(scheduler)
    with pytest.raises(KeyError):
        scheduler.finish(ticket("a", 0), failed=False)


# --- shares -----------------------------------------------------------------------------------------------------------


def served(scheduler: Scheduler, batches: int) -> dict[str, int]:
    before = scheduler.numbers().tokens
    for _ in range(batches):
        run(scheduler)
    return {tenant: tokens - before[tenant] for tenant, tokens in scheduler.numbers().tokens.items()}


def test_fifty_adapters_get_no_more_than_one():
    scheduler = Scheduler(10)
    for i in range(50):
        scheduler.add_adapter(f"many{i}", "many")
        submit(scheduler, f"many{i}", [BACKWARD] * 5)
    scheduler.add_adapter("one", "one")
    submit(scheduler, "one", [BACKWARD] * 100)

    assert served(scheduler, 100) == {"many": 500, "one": 500}


def test_adapters_of_a_tenant_take_turns():
    scheduler = Scheduler(10)
    for name in "abc":
        scheduler.add_adapter(name, "tenant")
        submit(scheduler, name, [BACKWARD] * 2)

    assert [run(scheduler)[0] for _ in range(6)] == ["a:0", "b:0", "c:0", "a:1", "b:1", "c:1"]


def test_shares_count_tokens_not_ops():
    scheduler = Scheduler(40, max_skips=100)
    for name, tokens in (("small", 10), ("large", 40)):
        scheduler.add_adapter(name, name)
        submit(scheduler, name, [BACKWARD] * 100, tokens=tokens)

    assert served(scheduler, 20) == {"small": 400, "large": 400}


def test_a_newcomer_has_no_credit_for_the_past():
    scheduler = Scheduler(10)
    scheduler.add_adapter("old", "old")
    submit(scheduler, "old", [BACKWARD] * 200)
    served(scheduler, 100)
    scheduler.add_adapter("new", "new")
    submit(scheduler, "new", [BACKWARD] * 100)

    gained = served(scheduler, 20)
    assert gained["new"] - gained["old"] in (0, 10, 20)


def test_a_tenant_that_used_much_waits_a_bounded_time():
    scheduler = Scheduler(10, max_skips=3)
    scheduler.add_adapter("greedy", "greedy")
    submit(scheduler, "greedy", [BACKWARD] * 2, tokens=1000)
    scheduler.add_adapter("modest", "modest")
    submit(scheduler, "modest", [BACKWARD] * 100)

    order = [run(scheduler)[0] for _ in range(5)]
    assert order == ["greedy:0", "modest:0", "modest:1", "modest:2", "greedy:1"]


def test_barriers_without_end_do_not_hold_up_passes():
    scheduler = Scheduler(10, max_skips=3)
    scheduler.add_adapter("saver", "saver")
    submit(scheduler, "saver", [SAVE] * 100)
    scheduler.add_adapter("trainer", "trainer")
    submit(scheduler, "trainer", [BACKWARD])

    assert [run(scheduler)[0] for _ in range(5)] == ["saver:0", "saver:1", "trainer:0", "saver:2", "saver:3"]


def test_passes_without_end_do_not_hold_up_barriers():
    scheduler = Scheduler(10, max_skips=0)  # every pass is overdue at once
    scheduler.add_adapter("saver", "saver")
    submit(scheduler, "saver", [SAVE] * 3)
    for name in "ab":
        scheduler.add_adapter(name, name)
        submit(scheduler, name, [BACKWARD] * 3)

    assert [run(scheduler)[0] for _ in range(6)] == ["saver:0", "a:0", "saver:1", "b:0", "saver:2", "a:1"]


def test_a_forward_is_not_held_up_by_its_own_tenants_backwards():
    """The light tenant always leads with backward passes.

    The heavy tenant's training can join them, its evaluation cannot.
    """
    scheduler = Scheduler(30, max_skips=3)
    for name, tenant in (("light", "light"), ("eval", "heavy"), ("train", "heavy")):
        scheduler.add_adapter(name, tenant)
    submit(scheduler, "light", [BACKWARD, OPTIM] * 20, tokens=2)
    submit(scheduler, "eval", [FORWARD])
    submit(scheduler, "train", [BACKWARD] * 20, tokens=20)

    batches = [run(scheduler) for _ in range(5)]
    assert batches == [["light:0", "train:0"], ["light:1"], ["light:2", "train:1"], ["light:3"], ["eval:0"]]
