"""The scheduler of training ops: which ops run next on one device that many tenants share.

Ops go in and batches come out. The scheduler does no I/O and reads no clock. Of an op it reads the place, kind, price
and digest, and whether it is an optimizer step.

Ops of one adapter run in order (:mod:`~twinkle.server.scheduling.sequence`); ops of different adapters are merged. The
ready passes of all adapters that are of one kind (forward, or forward_backward) fill one batch up to the token budget,
so that tenants that each pipeline forward_backward and optim_step share batches. A batch is made of the ops that
are ready when the caller asks for it; :mod:`~twinkle.server.scheduling.gathering` decides whether that is worth a wait.

A pass counts by its cost (:attr:`~twinkle.server.types.Price.cost`): its tokens, or more if it has many targets per
token or a custom loss. "Tokens" below means this cost.

Which passes go first:

- Among the tenants of the highest priority that have a ready pass, the least served one leads: the one with the fewest
  tokens for its weight. The batch is filled one op at a time by the same rule; ops that do not fit the rest of the
  budget are left for the next batch. A tenant's adapters take turns, so a tenant with fifty adapters gets no more than
  a tenant with one. A tenant that had nothing ready continues at the level of the least served tenant of its priority:
  idle time does not add up to a claim.
- While other tenants have work, or had some in the last batches, a tenant's part of a batch is limited, because all
  others wait until the batch has run. The limit is ``contended_tokens``, or as many tokens (scaled by weight) as the
  largest of the other tenants asks for, if that is more. A tenant's first pass in the batch may exceed it, but a single
  pass of more than twice this limit runs alone and in steps, and other batches run between the steps. If
  ``contended_tokens`` is 0, as on a CPU, where every token takes time from others, a pass of more than the limit itself
  runs alone, too. A pass that exceeds the token budget always runs alone and in steps.
- Barriers are short, and passes wait for them. So all ready barriers go before passes, but in no more than two batches
  in a row while a pass is ready: a tenant cannot keep others waiting by sending only steps.
- A tenant's longest-ready pass is overdue when ``max_skips`` batches started without it, counted from the moment it
  became the longest-ready one. Then the tenant that has waited longest leads, whatever the shares and priorities, and
  barriers get only every other batch. With T tenants, a tenant waits for at most ``max_skips + 2 * T`` batches, unless
  a long pass of its own runs. The bound holds for tenants, not for single ops, because a bound for each op would let a
  tenant with many adapters get more than its share.

The caller runs this loop, in one thread: handle ``refusals(now)``, run ``next_batch()``, call ``finish`` for each of
its ops; sleep until an op is submitted or until ``next_deadline()``.
"""

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from twinkle.server.scheduling.sequence import Accepted, OpSequence, Passed, Position, Refusal, Submitted
from twinkle.server.scheduling.shares import Priority, ShareOf, Shares, equal_shares
from twinkle.server.types import Op, OpKind


class BatchKind(StrEnum):
    """The kinds of batches: forward passes, forward_backward passes, or barriers."""

    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    BARRIERS = "barriers"


_LATELY = 64  # batches for which a tenant counts as having work after its last ready pass
_BARRIERS_IN_A_ROW = 2  # the most batches of barriers in a row while a pass is ready
_PASSES = {OpKind.FORWARD: BatchKind.FORWARD, OpKind.FORWARD_BACKWARD: BatchKind.FORWARD_BACKWARD}
_FIRST = (-len(Priority), 0.0)  # sorts before the place of every tenant
_LONG = 2  # a pass of more than this many times its tenant's limit in a batch is long
_SMALLEST_STEP = 64  # tokens: for fewer, the overhead of a call takes longer than the pass


@dataclass(frozen=True)
class Batch:
    """Ops to run now. Passes of one adapter have consecutive sequence numbers and are in order; of barriers there is
    at most one for each adapter.

    ``long``: a pass that takes much longer than what other tenants ask for, or that exceeds the token budget of a
    batch. It is to be run in steps, with other batches in between.
    """

    kind: BatchKind
    ops: tuple[Op, ...]
    long: bool = False


@dataclass(frozen=True)
class SchedulerNumbers:
    """Counts of started ops and batches since the scheduler was made, and the ops that wait now.

    ``waiting`` and ``tokens`` (of started ops) are by tenant, for the tenants that the scheduler knows now.
    """

    pass_batches: int
    ops: int
    pass_ops: int
    all_tokens: int
    waiting: Mapping[str, int]
    tokens: Mapping[str, int]

    @property
    def merge_ratio(self) -> float:
        """Return the average number of passes in a batch of passes; 0 before the first one."""
        return self.pass_ops / self.pass_batches if self.pass_batches else 0.0


class _Tenant:
    """What the scheduler knows of one tenant: its waiting ops, tokens so far, and adapters with a ready pass."""

    def __init__(self, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self.adapters = 0
        self.waiting = 0
        self.tokens = 0
        self.demand = 0  # cost of all its ready passes when a batch of passes was last made while it had any
        self.demanded_at = 0  # the number of that batch
        self.turn = 0  # the number of the last batch that started its longest-ready pass
        self.long_passes: set[str] = set()  # request ids of its long passes that run while other tenants have work
        self.ready: dict[str, _Adapter] = {}  # its adapters with a ready pass, longest-ready first

    @property
    def first(self) -> "_Adapter":
        return next(iter(self.ready.values()))

    def by_wait(self) -> tuple[int, int]:
        """Return the number of the batch since which its longest-ready pass has been skipped, and that pass's rank."""
        first = self.first
        return max(self.turn, first.ready_batch), first.ready_rank


class _Adapter:
    """What the scheduler knows of one adapter: its ops in order, its tenant, and since when a pass of it is ready."""

    def __init__(self, ops: OpSequence, tenant: _Tenant) -> None:
        self.ops = ops
        self.tenant = tenant
        self.ready_kind = BatchKind.FORWARD
        self.ready_rank = 0  # of its ready pass; passes that became ready later have higher ranks
        self.ready_batch = 0  # the number of batches before its pass became ready


class _Portions:
    """The limits on each tenant's part of one batch, while other tenants have work or had some lately."""

    def __init__(self, contended_tokens: int | None, demanding: Iterable[_Tenant], shares: Shares) -> None:
        self._contended_tokens = contended_tokens
        self._shares = shares
        demands = ((each.demand / shares.weight(each.tenant_id), each.tenant_id) for each in demanding)
        self._largest = heapq.nlargest(2, demands)
        self._taken: Counter[str] = Counter()

    def limit(self, tenant: _Tenant) -> float | None:
        """Return the tenant's limit in tokens; None: there is none, because no other tenant has work or had some
        lately, or because ``contended_tokens`` is None.
        """
        others = [demand for demand, tenant_id in self._largest if tenant_id != tenant.tenant_id]
        if not others or self._contended_tokens is None:
            return None
        return max(self._contended_tokens, others[0] * self._shares.weight(tenant.tenant_id))

    def is_long(self, tenant: _Tenant, cost: int) -> bool:
        """Return whether others would wait too long for a pass of this cost, so that it runs alone, in steps."""
        limit = self.limit(tenant)
        return limit is not None and cost > _LONG * max(limit, _SMALLEST_STEP)

    def has_room(self, tenant: _Tenant, cost: int) -> bool:
        """Return whether a pass may join the batch, given the tenant's passes that are in it already.

        Where ``contended_tokens`` is above 0, as on a GPU, whose tokens are cheap, a tenant's first pass may exceed the
        limit unless it is long.
        """
        taken, limit = self._taken[tenant.tenant_id], self.limit(tenant)
        if not taken and self._contended_tokens:
            return not self.is_long(tenant, cost)
        return limit is None or taken + cost <= limit

    def take(self, tenant: _Tenant, cost: int) -> None:
        self._taken[tenant.tenant_id] += cost


class Scheduler:
    """Chooses which ops of many tenants' adapters run next on one device, by the rules of the module. Belongs to one
    thread.

    Adapters are added before their ops; an unknown adapter or op is a bug of the caller and raises KeyError.
    """

    def __init__(
        self,
        token_budget: int,
        share_of: ShareOf = equal_shares,
        *,
        merge: bool = True,
        gap_timeout: float = 360.0,
        max_skips: int = 8,
        contended_tokens: int | None = None,
    ) -> None:
        """Make a scheduler without adapters.

        token_budget: the most tokens of a batch of passes, unless a single pass has more.
        merge: if False, a batch has one op.
        gap_timeout: seconds after which a missing sequence number is given up.
        max_skips: after this many batches without it, a tenant's longest-ready pass is overdue.
        contended_tokens: a tenant's limit in a batch while other tenants have work; None: the room in the batch.
        share_of: returns the weight and priority of a tenant; if they change, the new ones apply from then on.
        """
        self._budget = token_budget
        self._contended_tokens = contended_tokens
        self._merge = merge
        self._gap_timeout = gap_timeout
        self._max_skips = max_skips
        self._tenants: dict[str, _Tenant] = {}
        self._shares = Shares(share_of)
        self._adapters: dict[str, _Adapter] = {}
        self._running: dict[str, _Adapter] = {}  # by request id
        # An adapter with waiting ops, none of which runs, is in exactly one of these: _blocked, _barriers, or the
        # ``ready`` of its tenant, which is then in _ready_tenants.
        self._blocked: dict[str, _Adapter] = {}  # its next op has not arrived, or must be refused
        self._barriers: dict[str, _Adapter] = {}  # its next op is a barrier
        self._ready_tenants: dict[str, _Tenant] = {}  # tenants with a ready pass
        # Tenants that had a ready pass in the last _LATELY batches, the longest ago first.
        self._demanding: OrderedDict[str, _Tenant] = OrderedDict()
        self._ready_count = 0
        self._barriers_in_a_row = 0  # batches since the last one of passes
        self._batches = self._pass_batches = self._ops = self._pass_ops = self._tokens = 0

    # --- adapters -----------------------------------------------------------------------------------------------------

    def add_adapter(
        self,
        adapter_id: str,
        tenant_id: str,
        next_seq: int = 0,
        failed_seq: int | None = None,
        passed: Iterable[Passed] = (),
        owed: Iterable[int] = (),
        *,
        failed_pass_spoils: bool = True,
    ) -> None:
        """Add a new adapter, or one that continues after an earlier :meth:`position`.

        ValueError: the adapter is here already, or ops of a removed adapter with this id still run. After a restart,
        ``passed`` are the sequence numbers that ended or were given up before it and do not run again, and ``owed``
        those that the replay will submit again. ``failed_seq``: see
        :class:`~twinkle.server.scheduling.sequence.Position`. ``failed_pass_spoils``: whether the optimizer step that
        follows a failed forward_backward is refused.
        """
        if adapter_id in self._adapters or any(each.ops.adapter_id == adapter_id for each in self._running.values()):
            raise ValueError(f"adapter {adapter_id!r} exists already, or its ops still run")
        tenant = self._tenants.setdefault(tenant_id, _Tenant(tenant_id))
        tenant.adapters += 1
        self._shares.enter(tenant_id)
        ops = OpSequence(
            adapter_id, self._gap_timeout, failed_pass_spoils, next_seq, failed_seq, deque(passed), set(owed)
        )
        self._adapters[adapter_id] = _Adapter(ops, tenant)

    def remove_adapter(self, adapter_id: str) -> list[Op]:
        """Remove an adapter and return its waiting ops, in order. The caller must still ``finish`` its running ops."""
        adapter = self._adapters.pop(adapter_id)
        self._unplace(adapter)
        ops = adapter.ops.leave()
        adapter.tenant.waiting -= len(ops)
        adapter.tenant.adapters -= 1
        if not adapter.tenant.adapters:
            for tenant_id in self._shares.leave(adapter.tenant.tenant_id):
                del self._tenants[tenant_id]
        return ops

    def position(self, adapter_id: str) -> Position | None:
        """Return the position that a snapshot taken now would have; None while an op of the adapter runs."""
        return self._adapters[adapter_id].ops.position

    def next_seq(self, adapter_id: str) -> int:
        """Return the number of the next op to start.

        All lower numbers have started, were refused or given up as missing, or ended before a restart.
        """
        return self._adapters[adapter_id].ops.next_seq

    def waiting(self, tenant_id: str) -> int:
        """Return how many ops of a tenant have not started, whether they wait for earlier ops or are ready."""
        tenant = self._tenants.get(tenant_id)
        return 0 if tenant is None else tenant.waiting

    # --- ops ----------------------------------------------------------------------------------------------------------

    def submit(self, op: Op, now: float) -> Submitted:
        """Add an op to its adapter's sequence, if it is new there."""
        adapter = self._adapters[op.adapter_id]
        ops = adapter.ops
        submitted = ops.submit(op, now)
        if isinstance(submitted, Accepted):
            adapter.tenant.waiting += 1
            if not ops.running and (op.seq == ops.next_seq or len(ops) == 1):
                self._unplace(adapter)
                self._place(adapter)
        return submitted

    def finish(self, op: Op, *, failed: bool) -> None:
        """Note that an op of a batch has ended. ``failed``: it may spoil its window, and as a load it starts no clean
        one.
        """
        adapter = self._running.pop(op.request_id)
        adapter.tenant.long_passes.discard(op.request_id)
        adapter.ops.finish(op, failed)
        if not adapter.ops.running:
            self._place(adapter)

    def refusals(self, now: float) -> list[Refusal]:
        """Take out and return the ops that have to fail by now without running.

        They count as finished: the caller must not ``finish`` them. Call this before :meth:`next_batch`.
        """
        refused: list[Refusal] = []
        for adapter in list(self._blocked.values()):
            refusals = adapter.ops.refuse(now)
            if refusals:
                adapter.tenant.waiting -= len(refusals)
                self._unplace(adapter)
                self._place(adapter)
            refused += refusals
        return refused

    def next_deadline(self) -> float | None:
        """Return the time from which :meth:`refusals` will return an op, unless the missing op arrives before.

        None: no op is to be refused at present.
        """
        times = (adapter.ops.refusal_time for adapter in self._blocked.values())
        return min((time for time in times if time is not None), default=None)

    def numbers(self) -> SchedulerNumbers:
        return SchedulerNumbers(
            pass_batches=self._pass_batches,
            ops=self._ops,
            pass_ops=self._pass_ops,
            all_tokens=self._tokens,
            waiting={tenant.tenant_id: tenant.waiting for tenant in self._tenants.values()},
            tokens={tenant.tenant_id: tenant.tokens for tenant in self._tenants.values()},
        )

    # --- batches ------------------------------------------------------------------------------------------------------

    def next_batch(self, *, hold_passes: bool = False) -> Batch | None:
        """Return the ops to run now; None if no op is ready. ``hold_passes``: only barriers may run.

        A tenant's other passes wait while a pass of it runs that was too long for other tenants to wait for.
        """
        if hold_passes:
            return self._barrier_batch() if self._barriers else None
        tenants = self._tenants_in_turn()
        longest = min(tenants, key=_Tenant.by_wait, default=None)
        overdue = longest is not None and self._batches - longest.by_wait()[0] >= self._max_skips
        most = 1 if overdue else _BARRIERS_IN_A_ROW
        if self._barriers and (longest is None or self._barriers_in_a_row < most):
            return self._barrier_batch()
        if longest is None:
            return None
        self._shares.raise_floors(self._ready_tenants)
        return self._pass_batch((longest if overdue else min(tenants, key=self._by_place)).first)

    def ready_passes(self) -> Mapping[str, int] | None:
        """Return the cost of the next pass of each adapter that has one ready, if the next batch may wait for more.

        None: it may not, because a pass is overdue or larger than a batch, or there is no ready pass.
        """
        tenants = self._tenants_in_turn()
        longest = min(tenants, key=_Tenant.by_wait, default=None)
        if not self._merge or longest is None:
            return None
        heads = {name: each.ops.head for tenant in tenants for name, each in tenant.ready.items()}
        costs = {name: head.price.cost for name, head in heads.items() if head is not None}
        is_overdue = self._batches - longest.by_wait()[0] >= self._max_skips
        return None if is_overdue or max(costs.values()) > self._budget else costs

    def _tenants_in_turn(self) -> list[_Tenant]:
        return [tenant for tenant in self._ready_tenants.values() if not tenant.long_passes]

    def _by_place(self, tenant: _Tenant) -> tuple[tuple[int, float], int]:
        return self._shares.place(tenant.tenant_id), tenant.first.ready_rank

    def _barrier_batch(self) -> Batch:
        self._batches += 1
        self._barriers_in_a_row += 1
        adapters = list(self._barriers.values())[: None if self._merge else 1]
        for adapter in adapters:
            self._unplace(adapter)
        return Batch(BatchKind.BARRIERS, tuple(self._start(adapter) for adapter in adapters))

    def _pass_batch(self, lead: _Adapter) -> Batch:
        self._batches += 1
        self._pass_batches += 1
        self._barriers_in_a_row = 0
        self._note_demands()
        kind = lead.ready_kind
        ops, long = self._fill(lead)
        self._pass_ops += len(ops)
        return Batch(kind, ops, long)

    def step_tokens(self, tenant_id: str) -> int | None:
        """Return the tokens of a long batch that may run before others get a turn; None: any number, because no other
        tenant has work or had some lately, or because ``contended_tokens`` is None.
        """
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            return None
        limit = _Portions(self._contended_tokens, self._demanding.values(), self._shares).limit(tenant)
        return None if limit is None else max(int(limit), _SMALLEST_STEP)

    def _note_demands(self) -> None:
        """Record how much each tenant asks for now, and forget tenants that had no ready pass for long."""
        for tenant in self._ready_tenants.values():
            heads = (adapter.ops.head for adapter in tenant.ready.values())
            tenant.demand = min(self._budget, sum(head.price.cost for head in heads if head is not None))
            tenant.demanded_at = self._batches
            self._demanding[tenant.tenant_id] = tenant
            self._demanding.move_to_end(tenant.tenant_id)
        while self._batches - next(iter(self._demanding.values())).demanded_at > _LATELY:
            self._demanding.popitem(last=False)

    def _fill(self, lead: _Adapter) -> tuple[tuple[Op, ...], bool]:
        """Start the lead's pass, whatever its size, and then passes of the least served tenants that still fit.

        A pass that is long or larger than a batch runs alone, and so does a first pass above its tenant's limit where
        ``contended_tokens`` is 0. Return the passes, and whether they are to run in steps (the first two cases).
        """
        ops: list[Op] = []
        room = self._budget
        portions = _Portions(self._contended_tokens, self._demanding.values(), self._shares)
        queue = [
            (_FIRST if tenant is lead.tenant else self._shares.place(tenant.tenant_id), line[0].ready_rank, line)
            for tenant in self._tenants_in_turn()
            if (line := deque(a for a in tenant.ready.values() if a.ready_kind is lead.ready_kind))
        ]
        heapq.heapify(queue)  # all ranks differ, so that the third elements are never compared
        first = lead.ops.head
        assert first is not None
        if portions.is_long(lead.tenant, first.price.cost):
            lead.tenant.long_passes.add(first.request_id)
            return (self._start_pass(lead),), True
        if first.price.cost > self._budget:
            return (self._start_pass(lead),), True
        if not portions.has_room(lead.tenant, first.price.cost):
            return (self._start_pass(lead),), False
        while queue and (not ops or (self._merge and room > 0)):
            _, _, line = heapq.heappop(queue)
            adapter = line.popleft()
            op = adapter.ops.head
            assert op is not None
            if not portions.has_room(adapter.tenant, op.price.cost):
                continue  # leaves the tenant out of this batch: its other passes do not fit either
            if not ops or op.price.cost <= room:
                ops.append(self._start_pass(adapter))
                portions.take(adapter.tenant, op.price.cost)
                room -= op.price.cost
                following = adapter.ops.head
                if following is not None and following.kind is op.kind:
                    line.append(adapter)
            if line:
                heapq.heappush(queue, (self._shares.place(adapter.tenant.tenant_id), line[0].ready_rank, line))
        return tuple(ops), False

    def _start_pass(self, adapter: _Adapter) -> Op:
        tenant = adapter.tenant
        if not adapter.ops.running:  # otherwise an earlier pass of the adapter is in this batch
            if adapter is tenant.first:
                tenant.turn = self._batches
            self._unplace(adapter)
        return self._start(adapter)

    def _start(self, adapter: _Adapter) -> Op:
        op = adapter.ops.start()
        tenant = adapter.tenant
        tenant.waiting -= 1
        tenant.tokens += op.price.tokens
        self._tokens += op.price.tokens
        self._shares.charge(tenant.tenant_id, op.price.cost)
        self._running[op.request_id] = adapter
        self._ops += 1
        return op

    # --- where an adapter waits while none of its ops runs ------------------------------------------------------------

    def _place(self, adapter: _Adapter) -> None:
        """Put an adapter, none of whose ops runs, where its next op belongs."""
        adapter_id, tenant, head = adapter.ops.adapter_id, adapter.tenant, adapter.ops.head
        if head is None:
            if len(adapter.ops):
                self._blocked[adapter_id] = adapter
        elif not head.kind.is_pass:
            self._barriers[adapter_id] = adapter
        else:
            if tenant.tenant_id not in self._ready_tenants:
                self._shares.raise_to_floor(tenant.tenant_id)
            self._ready_tenants[tenant.tenant_id] = tenant
            self._ready_count += 1
            adapter.ready_kind = _PASSES[head.kind]
            adapter.ready_rank, adapter.ready_batch = self._ready_count, self._batches
            tenant.ready[adapter_id] = adapter

    def _unplace(self, adapter: _Adapter) -> None:
        """Take an adapter out of the place where it waits, if it waits."""
        adapter_id, tenant = adapter.ops.adapter_id, adapter.tenant
        self._blocked.pop(adapter_id, None)
        self._barriers.pop(adapter_id, None)
        tenant.ready.pop(adapter_id, None)
        if not tenant.ready:
            self._ready_tenants.pop(tenant.tenant_id, None)
