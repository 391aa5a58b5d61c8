"""Which ops run next: one device, many tenants. Ops in, batches out; no I/O, no clock. Of an op
it reads place, kind and price, never the payload.

Order holds within an adapter (:mod:`~twinkle.server.scheduling.sequence`), merging goes across adapters: the ready
passes of one mode of all adapters fill one batch up to the token budget, so that tenants who each pipeline
forward_backward and optim_step share every pass. A batch is made of what is ready at that moment; it waits for nobody.

A pass counts what it costs (:attr:`~twinkle.server.types.Price.cost`): its tokens, or more where it has many
targets a token or a loss of its own. "Tokens" below are these.

Which passes come first:

- Of the tenants of the highest priority that have something ready, the one least served leads: with the fewest tokens
  for its weight. The batch is filled one op at a time by the same rule; what does not fit the rest of the budget is
  left for the next batch. A tenant's adapters take turns, so fifty adapters get no more than one. A tenant that had
  nothing ready starts again where the least served of its priority is: idle time earns nothing.
- While others have work, or had lately, a tenant fills no batch to the brim, for all would wait until it is done: it
  gets ``contended_tokens`` of it, or as many (by weight) as the largest of the others asks for, if that is more. A
  single pass of more than twice that goes alone and is run in steps, between which others get their turns. Without
  ``contended_tokens``, on a CPU, where every token costs others time, one of more than that goes alone, too.
- Barriers are short and make passes ready, so all that are ready go before passes, but no more than twice in a row
  while a pass is ready: nobody keeps others waiting with steps alone.
- A tenant's longest-ready pass is overdue when ``max_skips`` batches started without it, counted from when it became
  that. The tenant waiting longest then leads, whatever the shares and priorities, and barriers may take only every
  other batch: with T tenants no more than ``max_skips + 2 * T`` batches go by. The bound is the tenant's, not each
  op's, because an op's would let a tenant with many adapters outrun the shares.

The caller's loop, in one thread: handle ``refusals(now)``, run ``next_batch()``, ``finish`` each of its ops;
sleep until something is submitted or ``next_deadline()``.
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
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    BARRIERS = "barriers"


_LATELY = 64  # batches
_BARRIERS_IN_A_ROW = 2  # batches of them, while a pass is ready
_PASSES = {OpKind.FORWARD: BatchKind.FORWARD, OpKind.FORWARD_BACKWARD: BatchKind.FORWARD_BACKWARD}
_FIRST = (-len(Priority), 0.0)  # before any tenant's place
_LONG = 2  # times what a tenant gets beside others
_SMALLEST_STEP = 64  # tokens: for fewer, the way to the device takes longer than the pass


@dataclass(frozen=True)
class Batch:
    """Ops to run now. Those of one adapter are neighbours in number and in order; barriers are one an adapter.

    ``long``: passes of one tenant that take much longer than what others ask for, or than a batch should. They are to
    be run in steps, with batches of others in between.
    """

    kind: BatchKind
    ops: tuple[Op, ...]
    long: bool = False


@dataclass(frozen=True)
class SchedulerNumbers:
    """Counts since the start, and by tenant that is known now what waits and the tokens that were started."""

    pass_batches: int
    ops: int
    pass_ops: int
    all_tokens: int
    waiting: Mapping[str, int]
    tokens: Mapping[str, int]

    @property
    def merge_ratio(self) -> float:
        """Return the passes in a pass batch, on average."""
        return self.pass_ops / self.pass_batches if self.pass_batches else 0.0


class _Tenant:
    def __init__(self, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self.adapters = 0
        self.waiting = 0
        self.tokens = 0
        self.demand = 0  # cost of all its ready passes, when a batch of passes was last made of what was ready
        self.demanded_at = 0  # the number of that batch
        self.turn = 0  # the number of the batch that last started its longest-ready pass
        self.long_passes: set[str] = set()  # that run while others have work, by request id
        self.ready: dict[str, _Adapter] = {}  # those with a ready pass, longest-ready first

    @property
    def first(self) -> "_Adapter":
        return next(iter(self.ready.values()))

    def by_wait(self) -> tuple[int, int]:
        """Return the number of batches since which its longest-ready pass was passed over, and that pass's rank."""
        first = self.first
        return max(self.turn, first.ready_batch), first.ready_rank


class _Adapter:
    def __init__(self, ops: OpSequence, tenant: _Tenant) -> None:
        self.ops = ops
        self.tenant = tenant
        self.ready_kind = BatchKind.FORWARD
        self.ready_rank = 0  # of its ready pass, ascending in order of becoming ready
        self.ready_batch = 0  # batches so far when it became ready


class _Portions:
    """How much of one batch each tenant may have, while others have work or had lately."""

    def __init__(self, contended_tokens: int | None, demanding: Iterable[_Tenant], shares: Shares) -> None:
        self._contended_tokens = contended_tokens
        self._shares = shares
        demands = ((each.demand / shares.weight(each.tenant_id), each.tenant_id) for each in demanding)
        self._largest = heapq.nlargest(2, demands)
        self._taken: Counter[str] = Counter()

    def limit(self, tenant: _Tenant) -> float | None:
        """Return the most that the tenant may have; None: no other tenant has work, or had lately."""
        others = [demand for demand, tenant_id in self._largest if tenant_id != tenant.tenant_id]
        if not others or self._contended_tokens is None:
            return None
        return max(self._contended_tokens, others[0] * self._shares.weight(tenant.tenant_id))

    def is_long(self, tenant: _Tenant, cost: int) -> bool:
        """Return whether others would wait too long for a pass of this cost: it goes alone, in steps."""
        limit = self.limit(tenant)
        return limit is not None and cost > _LONG * max(limit, _SMALLEST_STEP)

    def has_room(self, tenant: _Tenant, cost: int) -> bool:
        """Return whether a pass may join a batch, beside what the tenant has in it already.

        Where tokens are cheap, on a GPU, a tenant's first pass may be larger than that, unless it is long.
        """
        taken, limit = self._taken[tenant.tenant_id], self.limit(tenant)
        if not taken and self._contended_tokens:
            return not self.is_long(tenant, cost)
        return limit is None or taken + cost <= limit

    def take(self, tenant: _Tenant, cost: int) -> None:
        self._taken[tenant.tenant_id] += cost


class Scheduler:
    """See the module. Adapters are made known first; an unknown adapter or op is the caller's bug and raises."""

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
        """contended_tokens: of one tenant in a batch while others have work; None: as many as there is room for.

        share_of: the weight and priority of a tenant; a new answer counts from then on.
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
        # An idle adapter that has ops waiting is in exactly one of these three.
        self._blocked: dict[str, _Adapter] = {}  # its next op is missing or must be refused
        self._barriers: dict[str, _Adapter] = {}
        self._ready_tenants: dict[str, _Tenant] = {}  # have a ready pass
        self._demanding: OrderedDict[str, _Tenant] = OrderedDict()  # had a ready pass lately, longest ago first
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
        """Add a new adapter, or one that goes on after :meth:`position`. Not while ops of a removed namesake run.

        After a restart ``passed`` are numbers that ended before it and ``owed`` those that are submitted again.
        ``failed_pass_spoils``: whether the optimizer step that follows a failed forward_backward is refused.
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
        """Forget an adapter. Returns what waited, in order; what runs must still be finished."""
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
        """Return where a snapshot taken now would stand; None while an op of the adapter runs."""
        return self._adapters[adapter_id].ops.position

    def next_seq(self, adapter_id: str) -> int:
        """Return the number of the op that is the next to start: all below it started, or were given up as missing."""
        return self._adapters[adapter_id].ops.next_seq

    def waiting(self, tenant_id: str) -> int:
        """Return how many ops of a tenant wait: for earlier ones, ready or about to be refused, but not running."""
        tenant = self._tenants.get(tenant_id)
        return 0 if tenant is None else tenant.waiting

    # --- ops ----------------------------------------------------------------------------------------------------------

    def submit(self, op: Op, now: float) -> Submitted:
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
        """Note that an op of a batch has run. ``failed`` ones changed nothing."""
        adapter = self._running.pop(op.request_id)
        adapter.tenant.long_passes.discard(op.request_id)
        adapter.ops.finish(op, failed)
        if not adapter.ops.running:
            self._place(adapter)

    def refusals(self, now: float) -> list[Refusal]:
        """Return all that fails by now without running, each once and finished by that; handle them before a batch."""
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
        """Return when :meth:`refusals` will next have something, unless a missing number arrives before."""
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

    def next_batch(self) -> Batch | None:
        """Return what to run now; None if nothing is ready that does not run already.

        A long pass is its tenant's turn for as long as it takes: other passes of that tenant wait until it has ended.
        """
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
        """Return how much of a long batch may run before others get a turn; None: no other tenant has work."""
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            return None
        limit = _Portions(self._contended_tokens, self._demanding.values(), self._shares).limit(tenant)
        return None if limit is None else max(int(limit), _SMALLEST_STEP)

    def _note_demands(self) -> None:
        for tenant in self._ready_tenants.values():
            heads = (adapter.ops.head for adapter in tenant.ready.values())
            tenant.demand = min(self._budget, sum(head.price.cost for head in heads if head is not None))
            tenant.demanded_at = self._batches
            self._demanding[tenant.tenant_id] = tenant
            self._demanding.move_to_end(tenant.tenant_id)
        while self._batches - next(iter(self._demanding.values())).demanded_at > _LATELY:
            self._demanding.popitem(last=False)

    def _fill(self, lead: _Adapter) -> tuple[tuple[Op, ...], bool]:
        """Start the lead's pass, whatever its size, and then those of the least served tenants that still fit.

        No other pass joins one that is long or larger than a batch. Return the passes, and whether it is such a batch.
        """
        ops: list[Op] = []
        room = self._budget
        portions = _Portions(self._contended_tokens, self._demanding.values(), self._shares)
        queue = [
            (_FIRST if tenant is lead.tenant else self._shares.place(tenant.tenant_id), line[0].ready_rank, line)
            for tenant in self._tenants_in_turn()
            if (line := deque(a for a in tenant.ready.values() if a.ready_kind is lead.ready_kind))
        ]
        heapq.heapify(queue)  # ranks differ, so lines are never compared
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
                continue  # none of its other passes either
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
        if not adapter.ops.running:  # otherwise an earlier chunk of its call is in this batch
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

    # --- where an idle adapter waits ----------------------------------------------------------------------------------

    def _place(self, adapter: _Adapter) -> None:
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
        adapter_id, tenant = adapter.ops.adapter_id, adapter.tenant
        self._blocked.pop(adapter_id, None)
        self._barriers.pop(adapter_id, None)
        tenant.ready.pop(adapter_id, None)
        if not tenant.ready:
            self._ready_tenants.pop(tenant.tenant_id, None)
