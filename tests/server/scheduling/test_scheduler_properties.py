"""The scheduler, compared with a slow and simple model of it, under random schedules.

The model predicts exactly the answer to a submission, which ops are ready or refused and when, and which op leads a
batch. For the rest of a batch the test checks the rules that every choice must follow.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.servers.scheduled_ops import op_of
from twinkle.server.scheduling.scheduler import Batch, BatchKind, Scheduler
from twinkle.server.scheduling.sequence import Accepted, Conflict, Duplicate, Position, RefusalReason, TooLate
from twinkle.server.scheduling.shares import Priority, TenantShare
from twinkle.server.types import Op, OpKind

BUDGET, GAP_TIMEOUT, MAX_SKIPS = 10, 100.0, 3
TENANTS = ("t0", "t1", "t2")

# Passes and optim_steps are more frequent than other ops, as in practice.
KINDS = [*OpKind, *[OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP, OpKind.FORWARD] * 2]


@dataclass
class ModelAdapter:
    """One adapter, in lists that are searched completely."""

    tenant: str
    next_seq: int
    failed_seq: int | None
    waiting: dict[int, Op] = field(default_factory=dict)
    arrived: dict[int, float] = field(default_factory=dict)
    running: list[Op] = field(default_factory=list)
    bodies: dict[int, bytes] = field(default_factory=dict)

    def answer(self, ticket: Op) -> type:
        if ticket.seq in self.bodies:
            return Duplicate if self.bodies[ticket.seq] == ticket.digest else Conflict
        return TooLate if ticket.seq < self.next_seq else Accepted

    def ready(self) -> Op | None:
        ticket = self.waiting.get(self.next_seq)
        return None if self.running or ticket is None or self.refuses(ticket) else ticket

    def refuses(self, ticket: Op) -> bool:
        return ticket.kind is OpKind.OPTIM_STEP and self.failed_seq is not None

    def deadline(self) -> float | None:
        if self.running or not self.waiting or self.ready() is not None:
            return None
        if self.next_seq in self.waiting:
            return self.arrived[self.next_seq]
        return min(self.arrived[seq] for seq in self.waiting) + GAP_TIMEOUT

    def refuse(self, now: float) -> list[tuple[int, RefusalReason]]:
        refused: list[tuple[int, RefusalReason]] = []
        while (deadline := self.deadline()) is not None and deadline <= now:
            if self.next_seq in self.waiting:
                refused.append((self.next_seq, RefusalReason.WINDOW))
                self.end(self.waiting.pop(self.next_seq), failed=True, ran=False)
                continue
            self.spoil(self.next_seq)
            self.next_seq = min(self.waiting)
            while self.next_seq in self.waiting:
                refused.append((self.next_seq, RefusalReason.GAP))
                self.end(self.waiting.pop(self.next_seq), failed=True, ran=False)
        return refused

    def end(self, ticket: Op, failed: bool, ran: bool) -> None:
        if not ran:
            self.next_seq = ticket.seq + 1
        if ticket.kind is OpKind.FORWARD_BACKWARD and failed:
            self.spoil(ticket.seq)
        if (ticket.kind is OpKind.OPTIM_STEP and not ran) or (ticket.kind is OpKind.LOAD and not failed):
            self.failed_seq = None

    def spoil(self, seq: int) -> None:
        self.failed_seq = seq if self.failed_seq is None else min(seq, self.failed_seq)


class SchedulerMachine(RuleBasedStateMachine):
    merge = True

    def __init__(self) -> None:
        super().__init__()
        self.given = dict.fromkeys(TENANTS, TenantShare())
        self.scheduler = Scheduler(
            BUDGET, self.given.__getitem__, merge=self.merge, gap_timeout=GAP_TIMEOUT, max_skips=MAX_SKIPS
        )
        self.adapters: dict[str, ModelAdapter] = {}
        self.now = 0.0
        self.added = 0
        self.running: list[Op] = []
        self.accepted: set[str] = set()
        self.ended: set[str] = set()
        self.batches = 0
        self.barriers_in_a_row = 0
        # adapters with a ready pass, longest-ready first → number of batches when it became ready
        self.ready: dict[str, int] = {}
        self.shares = dict.fromkeys(TENANTS, 0.0)
        self.floors = dict.fromkeys(Priority, 0.0)
        self.turns = dict.fromkeys(TENANTS, 0)  # number of batches when a tenant's longest-ready pass last started
        # a tenant's longest-ready pass, and the batches that passed it over
        self.passed_over: dict[str, tuple[str, int]] = {}
        self.barriers_passed_over = 0

    # --- the actions --------------------------------------------------------------------------------------------------

    @rule(tenant=st.sampled_from(TENANTS), weight=st.sampled_from([0.5, 1.0, 4.0]), priority=st.sampled_from(Priority))
    def set_share(self, tenant: str, weight: float, priority: Priority) -> None:
        self.given[tenant] = TenantShare(weight, priority)

    @precondition(lambda self: len(self.adapters) < 6)
    @rule(tenant=st.sampled_from(TENANTS), next_seq=st.integers(0, 3), spoilt=st.booleans())
    def add(self, tenant: str, next_seq: int, spoilt: bool) -> None:
        name = f"a{self.added}"
        self.added += 1
        failed_seq = next_seq - 1 if spoilt and next_seq else None
        self.scheduler.add_adapter(name, tenant, next_seq, failed_seq)
        self.adapters[name] = ModelAdapter(tenant, next_seq, failed_seq)

    @precondition(lambda self: self.adapters)
    @rule(data=st.data(), count=st.integers(1, 6), kind=st.sampled_from(KINDS), fine=st.booleans())
    def submit_in_order(self, data: st.DataObject, count: int, kind: OpKind, fine: bool) -> None:
        """Submit a call in several chunks, or several calls, sometimes in reverse."""
        name = data.draw(st.sampled_from(sorted(self.adapters)))
        adapter = self.adapters[name]
        first = max([adapter.next_seq - 1, *adapter.waiting]) + 1
        seqs = range(first, first + count)
        for seq in seqs if fine else reversed(seqs):
            self.submit(name, op_of(name, seq, kind, 3 if kind.is_pass else 0, b"body"))

    @precondition(lambda self: self.adapters)
    @rule(
        data=st.data(),
        offset=st.integers(-4, 6),
        kind=st.sampled_from(KINDS),
        tokens=st.integers(0, BUDGET + 5),
        body=st.sampled_from([b"body", b"body", b"other"]),
    )
    def submit_anywhere(self, data: st.DataObject, offset: int, kind: OpKind, tokens: int, body: bytes) -> None:
        """Submit gaps, repeated numbers with the same or another body, or numbers of the past."""
        name = data.draw(st.sampled_from(sorted(self.adapters)))
        seq = max(0, self.adapters[name].next_seq + offset)
        self.submit(name, op_of(name, seq, kind, tokens if kind.is_pass else 0, body))

    def submit(self, name: str, ticket: Op) -> None:
        adapter = self.adapters[name]
        expected = adapter.answer(ticket)
        assert type(self.scheduler.submit(ticket, self.now)) is expected
        if expected is Accepted:
            self.accepted.add(ticket.request_id)
            adapter.bodies[ticket.seq] = ticket.digest
            adapter.waiting[ticket.seq] = ticket
            adapter.arrived[ticket.seq] = self.now
        self.update_ready([name])

    @rule(seconds=st.sampled_from([0.5, 10.0, 60.0, GAP_TIMEOUT]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def refuse(self) -> None:
        expected = {name: refused for name, each in self.adapters.items() if (refused := each.refuse(self.now))}
        found: dict[str, list[tuple[int, RefusalReason]]] = {}
        for refusal in self.scheduler.refusals(self.now):
            found.setdefault(refusal.op.adapter_id, []).append((refusal.op.seq, refusal.reason))
            self.end(refusal.op)
        assert found == expected
        assert self.scheduler.refusals(self.now) == []
        self.update_ready(list(found))

    @rule()
    def start_batch(self) -> None:
        ready = {name: ticket for name, each in self.adapters.items() if (ticket := each.ready()) is not None}
        lead = self.lead({name for name, ticket in ready.items() if not ticket.kind.is_pass})
        batch = self.scheduler.next_batch()
        assert (batch is not None) == bool(ready)
        if batch is None:
            return
        assert batch.ops[0].adapter_id == lead if lead else batch.kind is BatchKind.BARRIERS
        self.batches += 1
        self.barriers_in_a_row = self.barriers_in_a_row + 1 if lead is None else 0
        self.count_passed_over(batch)
        for ticket in batch.ops:
            self.start(ticket)
        self.check_batch(batch, ready)
        for ticket in batch.ops:
            self.adapters[ticket.adapter_id].running.append(ticket)
        self.running += batch.ops
        self.update_ready([])

    def start(self, ticket: Op) -> None:
        adapter = self.adapters[ticket.adapter_id]
        assert adapter.waiting.pop(ticket.seq) == ticket
        assert ticket.seq == adapter.next_seq
        adapter.next_seq += 1
        self.shares[adapter.tenant] += ticket.price.tokens / self.given[adapter.tenant].weight
        if self.firsts().get(adapter.tenant) == ticket.adapter_id:
            self.turns[adapter.tenant] = self.batches
        self.ready.pop(ticket.adapter_id, None)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.booleans())
    def finish(self, data: st.DataObject, failed: bool) -> None:
        ticket = data.draw(st.sampled_from(self.running))
        self.finish_one(ticket, failed)

    @precondition(lambda self: self.running)
    @rule(fate=st.randoms(use_true_random=False))
    def finish_all(self, fate) -> None:
        for ticket in list(self.running):
            self.finish_one(ticket, failed=fate.random() < 0.2)

    def finish_one(self, ticket: Op, failed: bool) -> None:
        self.scheduler.finish(ticket, failed=failed)
        self.running.remove(ticket)
        self.end(ticket)
        adapter = self.adapters.get(ticket.adapter_id)
        if adapter is not None:
            adapter.running.remove(ticket)
            adapter.end(ticket, failed, ran=True)
            self.update_ready([ticket.adapter_id])

    @precondition(lambda self: self.adapters)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.adapters)))
        adapter = self.adapters.pop(name)
        self.ready.pop(name, None)
        tickets = self.scheduler.remove_adapter(name)
        assert tickets == [adapter.waiting[seq] for seq in sorted(adapter.waiting)]
        for ticket in tickets:
            self.end(ticket)

    @precondition(lambda self: any(not each.running for each in self.adapters.values()))
    @rule(data=st.data())
    def recover(self, data: st.DataObject) -> None:
        """Remove an adapter and add it again at the same position; it must continue as if nothing had happened."""
        name = data.draw(st.sampled_from(sorted(name for name, each in self.adapters.items() if not each.running)))
        adapter = self.adapters[name]
        position = self.scheduler.position(name)
        assert position == Position(adapter.next_seq - 1, adapter.failed_seq)
        waiting = self.scheduler.remove_adapter(name)
        self.scheduler.add_adapter(name, adapter.tenant, position.seq + 1, position.failed_seq)
        self.ready.pop(name, None)
        for ticket in waiting:
            assert self.scheduler.submit(ticket, self.now) == Accepted()
            adapter.arrived[ticket.seq] = self.now
        adapter.bodies = {seq: each.digest for seq, each in adapter.waiting.items()}
        self.update_ready([name])

    # --- the checks ---------------------------------------------------------------------------------------------------

    def end(self, ticket: Op) -> None:
        assert ticket.request_id in self.accepted
        assert ticket.request_id not in self.ended
        self.ended.add(ticket.request_id)

    def check_batch(self, batch: Batch, ready: dict[str, Op]) -> None:
        names = {ticket.adapter_id for ticket in batch.ops}
        assert names <= ready.keys()
        tokens = sum(ticket.price.tokens for ticket in batch.ops)
        kinds = {ticket.kind for ticket in batch.ops}
        if not self.merge:
            assert len(batch.ops) == 1
        if batch.kind is BatchKind.BARRIERS:
            assert not any(kind.is_pass for kind in kinds)
            assert len(names) == len(batch.ops)
            assert not self.merge or names == {name for name, each in ready.items() if not each.kind.is_pass}
            return
        assert {kind.value for kind in kinds} == {batch.kind.value}
        assert tokens <= BUDGET or len(batch.ops) == 1
        if self.merge and tokens < BUDGET:  # then no op was left out that could have joined
            left = [ready[name] for name in ready.keys() - names]
            left += [ticket for name in names if (ticket := self.adapters[name].ready()) is not None]
            assert not [each for each in left if each.kind in kinds and tokens + each.price.tokens <= BUDGET]

    def firsts(self) -> dict[str, str]:
        """Return the adapter with the longest-ready pass of each tenant, longest-ready first."""
        firsts: dict[str, str] = {}
        for name in self.ready:
            firsts.setdefault(self.adapters[name].tenant, name)
        return firsts

    def lead(self, barriers: set[str]) -> str | None:
        """Return the adapter whose pass must lead the next batch; None if barriers come first or nothing is ready."""
        firsts = self.firsts()
        if not firsts:
            return None
        waits = {tenant: self.batches - max(self.turns[tenant], self.ready[name]) for tenant, name in firsts.items()}
        overdue = max(waits.values()) >= MAX_SKIPS
        if barriers and self.barriers_in_a_row < (1 if overdue else 2):
            return None
        for priority in Priority:
            shares = [self.shares[tenant] for tenant in firsts if self.given[tenant].priority is priority]
            self.floors[priority] = max(self.floors[priority], min(shares, default=0.0))
        highest = max(self.given[tenant].priority for tenant in firsts)
        leads = [tenant for tenant in firsts if self.given[tenant].priority is highest]
        least = min(leads, key=self.shares.__getitem__)
        return firsts[max(firsts, key=waits.__getitem__) if overdue else least]

    def count_passed_over(self, batch: Batch) -> None:
        names = {ticket.adapter_id for ticket in batch.ops}
        before = self.passed_over
        self.passed_over = {}
        for tenant, name in self.firsts().items():
            if name not in names:
                known, count = before.get(tenant, (name, 0))
                self.passed_over[tenant] = (name, count + 1 if known == name else 1)
                assert self.passed_over[tenant][1] <= MAX_SKIPS + 2 * len(TENANTS)
        barriers = [each for each in self.adapters.values() if (ready := each.ready()) and not ready.kind.is_pass]
        passed_over = barriers and not self.barriers_in_a_row
        self.barriers_passed_over = self.barriers_passed_over + 1 if passed_over else 0
        assert self.barriers_passed_over <= 1

    def update_ready(self, candidates: list[str]) -> None:
        """Remove adapters that are no longer ready, and append the candidates that became ready."""
        heads = {name: ticket for name, each in self.adapters.items() if (ticket := each.ready()) is not None}
        self.ready = {name: since for name, since in self.ready.items() if name in heads}
        for name in candidates:
            if name in heads and heads[name].kind.is_pass and name not in self.ready:
                tenant = self.adapters[name].tenant
                if tenant not in self.firsts():
                    floor = self.floors[self.given[tenant].priority]
                    self.shares[tenant] = max(self.shares[tenant], floor)
                self.ready[name] = self.batches

    @invariant()
    def numbers_agree(self) -> None:
        for name, adapter in self.adapters.items():
            expected = None if adapter.running else Position(adapter.next_seq - 1, adapter.failed_seq)
            assert self.scheduler.position(name) == expected
        deadlines = [each for adapter in self.adapters.values() if (each := adapter.deadline()) is not None]
        assert self.scheduler.next_deadline() == min(deadlines, default=None)
        for tenant in TENANTS:
            waiting = sum(len(each.waiting) for each in self.adapters.values() if each.tenant == tenant)
            assert self.scheduler.waiting(tenant) == waiting
        assert sum(self.scheduler.numbers().waiting.values()) == len(self.accepted - self.ended) - len(self.running)

    def teardown(self) -> None:
        """Finally, every accepted op must end without further submissions."""
        for _ in range(2 * len(self.accepted) + 2):
            for ticket in list(self.running):
                self.finish_one(ticket, failed=False)
            deadline = self.scheduler.next_deadline()
            self.now = max(self.now, self.now if deadline is None else deadline)
            self.refuse()
            self.start_batch()
        assert self.ended == self.accepted


class UnmergedMachine(SchedulerMachine):
    merge = False


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestUnmergedScheduler = UnmergedMachine.TestCase
TestUnmergedScheduler.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


# --- recovery ---------------------------------------------------------------------------------------------------------

# An op as (kind, whether it fails when it runs); None is a number that never arrives.
OPS = st.lists(st.none() | st.tuples(st.sampled_from(KINDS), st.booleans()), min_size=1, max_size=25)


@dataclass
class Journal:
    """What one adapter did: every op that ended and whether it failed, and the position after each."""

    ended: list[tuple[Op, bool]] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)

    def note(self, scheduler: Scheduler, ended: list[tuple[Op, bool]]) -> None:
        self.ended += ended
        position = scheduler.position("a")
        assert position is not None
        self.positions.append(position)


def drain(scheduler: Scheduler, fails: set[int]) -> Journal:
    journal = Journal()
    while True:
        if batch := scheduler.next_batch():
            for ticket in batch.ops:
                scheduler.finish(ticket, failed=ticket.seq in fails)
            journal.note(scheduler, [(ticket, ticket.seq in fails) for ticket in batch.ops])
        elif (deadline := scheduler.next_deadline()) is not None:
            journal.note(scheduler, [(refusal.op, True) for refusal in scheduler.refusals(deadline)])
        else:
            return journal


@settings(deadline=None)
@given(ops=OPS)
def test_an_adapter_recovers_at_every_point_of_its_life(ops: list[tuple[OpKind, bool] | None]):
    tickets = [op_of("a", seq, op[0], 1, b"") for seq, op in enumerate(ops) if op is not None]
    fails = {seq for seq, op in enumerate(ops) if op is not None and op[1]}

    def life(next_seq: int, failed_seq: int | None) -> Journal:
        scheduler = Scheduler(BUDGET)
        scheduler.add_adapter("a", "tenant", next_seq, failed_seq)
        for ticket in tickets:
            if ticket.seq >= next_seq:
                scheduler.submit(ticket, 0.0)
        return drain(scheduler, fails)

    whole = life(0, None)
    assert [ticket for ticket, _ in whole.ended] == tickets
    for position in whole.positions:
        rest = life(position.seq + 1, position.failed_seq)
        assert rest.ended == [(ticket, failed) for ticket, failed in whole.ended if ticket.seq > position.seq]
        assert rest.positions[-1:] in ([], whole.positions[-1:])


@settings(deadline=None)
@given(ops=OPS)
def test_a_journal_is_replayed_with_a_failed_forward_backward_for_each_number_given_up(
    ops: list[tuple[OpKind, bool] | None],
):
    tickets = [op_of("a", seq, op[0], 1, b"") for seq, op in enumerate(ops) if op is not None]
    fails = {seq for seq, op in enumerate(ops) if op is not None and op[1]}
    first = Scheduler(BUDGET)
    first.add_adapter("a", "tenant")
    for ticket in tickets:
        first.submit(ticket, 0.0)
    journal = drain(first, fails)

    recorded = {ticket.seq: ticket for ticket, _ in journal.ended}
    failed = {ticket.seq for ticket, failed in journal.ended if failed}
    again = Scheduler(BUDGET)
    again.add_adapter("a", "tenant")
    for seq in range(max(recorded, default=-1) + 1):
        again.submit(recorded.get(seq, op_of("a", seq, OpKind.FORWARD_BACKWARD, 0, b"")), 0.0)
    replayed = drain(again, failed | (set(range(len(ops))) - recorded.keys()))

    assert [each for each in replayed.ended if each[0].seq in recorded] == journal.ended
    assert replayed.positions[-1:] == journal.positions[-1:]


# --- shares -----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(adapters=st.lists(st.integers(1, 20), min_size=2, max_size=5), width=st.integers(1, 6), calls=st.integers(1, 8))
def test_tenants_with_work_get_equal_tokens_whatever_their_number_of_adapters(
    adapters: list[int], width: int, calls: int
):
    scheduler = Scheduler(10 * width)
    for tenant, count in enumerate(adapters):
        for i in range(count):
            scheduler.add_adapter(f"{tenant}:{i}", f"t{tenant}")
            for seq in range(calls):
                scheduler.submit(op_of(f"{tenant}:{i}", seq, OpKind.FORWARD_BACKWARD, 10, b""), 0.0)

    while batch := scheduler.next_batch():
        numbers = scheduler.numbers()
        if not all(numbers.waiting.values()):
            return
        assert max(numbers.tokens.values()) - min(numbers.tokens.values()) <= 10
        for ticket in batch.ops:
            scheduler.finish(ticket, failed=False)


@settings(deadline=None, max_examples=40)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    adapters=st.lists(st.integers(1, 6), min_size=4, max_size=4),
)
def test_tenants_with_work_get_tokens_by_their_weights(weights: list[float], adapters: list[int]):
    """Tenants are never more than one op apart, as long as none is overdue."""
    shares = {f"t{tenant}": TenantShare(weight) for tenant, weight in enumerate(weights)}
    scheduler = Scheduler(10, shares.__getitem__, max_skips=1000)
    for tenant in range(len(weights)):
        for i in range(adapters[tenant]):
            scheduler.add_adapter(f"{tenant}:{i}", f"t{tenant}")
            for seq in range(20):
                scheduler.submit(op_of(f"{tenant}:{i}", seq, OpKind.FORWARD_BACKWARD, 10, b""), 0.0)

    while batch := scheduler.next_batch():
        numbers = scheduler.numbers()
        if not all(numbers.waiting.values()):
            return
        served = [numbers.tokens[f"t{tenant}"] / weight for tenant, weight in enumerate(weights)]
        assert max(served) - min(served) <= 10 / min(weights)
        for ticket in batch.ops:
            scheduler.finish(ticket, failed=False)


@settings(deadline=None, max_examples=40)
@given(
    priorities=st.lists(st.sampled_from(Priority), min_size=2, max_size=6),
    weights=st.lists(st.sampled_from([0.01, 1.0, 100.0]), min_size=6, max_size=6),
    skips=st.integers(0, 8),
)
def test_nobody_starves_whatever_weights_and_priorities(priorities: list[Priority], weights: list[float], skips: int):
    """Every tenant always has an op that fills a batch; each leads again within the bound."""
    shares = {f"t{tenant}": TenantShare(weights[tenant], priority) for tenant, priority in enumerate(priorities)}
    scheduler = Scheduler(10, shares.__getitem__, max_skips=skips)
    for tenant in range(len(priorities)):
        scheduler.add_adapter(f"a{tenant}", f"t{tenant}")
        for seq in range(120):
            scheduler.submit(op_of(f"a{tenant}", seq, OpKind.FORWARD_BACKWARD, 10, b""), 0.0)
    waited = dict.fromkeys(range(len(priorities)), 0)
    for _ in range(100):
        batch = scheduler.next_batch()
        assert batch is not None
        served = {int(ticket.adapter_id[1:]) for ticket in batch.ops}
        for tenant in waited:
            waited[tenant] = 0 if tenant in served else waited[tenant] + 1
            assert waited[tenant] <= skips + 2 * len(priorities)
        for ticket in batch.ops:
            scheduler.finish(ticket, failed=False)


@settings(deadline=None, max_examples=40)
@given(
    adapters=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=4, max_size=4),
    sizes=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    contended=st.integers(1, 60),
)
def test_beside_others_a_tenant_gets_a_portion_of_a_batch(
    adapters: list[int], weights: list[float], sizes: list[int], contended: int
):
    """It gets as many tokens as any other tenant asks for, by weight, or the guaranteed portion.

    It gets at least one op.
    """
    shares = {f"t{tenant}": TenantShare(weights[tenant]) for tenant in range(len(adapters))}
    scheduler = Scheduler(1000, shares.__getitem__, contended_tokens=contended)
    for tenant, count in enumerate(adapters):
        for i in range(count):
            scheduler.add_adapter(f"{tenant}:{i}", f"t{tenant}")
            for seq in range(4):
                kind = OpKind.OPTIM_STEP if seq % 2 else OpKind.FORWARD_BACKWARD
                scheduler.submit(op_of(f"{tenant}:{i}", seq, kind, 0 if seq % 2 else sizes[tenant], b""), 0.0)
    demands = {tenant: count * sizes[tenant] for tenant, count in enumerate(adapters)}
    while batch := scheduler.next_batch():
        taken: dict[int, list[int]] = {}
        for ticket in batch.ops:
            taken.setdefault(int(ticket.adapter_id.partition(":")[0]), []).append(ticket.price.tokens)
            scheduler.finish(ticket, failed=False)
        for tenant, tokens in taken.items():
            others = [demands[each] / weights[each] for each in demands if each != tenant]
            assert len(tokens) == 1 or sum(tokens) <= max(contended, max(others) * weights[tenant])
    assert sum(scheduler.numbers().waiting.values()) == 0


def test_a_tenant_on_its_own_fills_batches_again_after_a_while():
    scheduler = Scheduler(100, contended_tokens=20)
    for name, tenant in (("small", "other"), *((f"a{i}", "big") for i in range(10))):
        scheduler.add_adapter(name, tenant)
        for seq in range(100 if tenant == "big" else 1):
            scheduler.submit(op_of(name, seq, OpKind.FORWARD, 10, b""), 0.0)
    sizes = []
    while batch := scheduler.next_batch():
        sizes.append(sum(ticket.price.tokens for ticket in batch.ops if ticket.adapter_id != "small"))
        for ticket in batch.ops:
            scheduler.finish(ticket, failed=False)
    assert set(sizes[:60]) == {20}
    assert sizes[70] == 100


def test_tenants_of_one_size_share_every_batch():
    """Merging is the purpose of the service: the portion is never smaller than what the others ask for."""
    scheduler = Scheduler(1000, contended_tokens=1)
    for tenant in range(16):
        for i in range(2):
            scheduler.add_adapter(f"{tenant}:{i}", f"t{tenant}")
            scheduler.submit(op_of(f"{tenant}:{i}", 0, OpKind.FORWARD_BACKWARD, 10, b""), 0.0)
    batch = scheduler.next_batch()
    assert batch is not None
    assert len(batch.ops) == 32
