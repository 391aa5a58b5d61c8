"""Decides which ops a training service accepts, by the limits of their tenants, however many arrive at once.

Two limits give way, because later ops of an adapter cannot run without the earlier ones: the op that an adapter runs
next is accepted even if the queue is full, and an op of an adapter that has unfinished ops may exceed the limit on the
journal by a quarter.

:class:`JournalQuota` counts each tenant's bytes in the journal: request bodies that a restart would need, and results
that are kept. The exact number is read from the database when the journal is pruned; in between, the bytes that this
process writes are added and deleted ones are not subtracted. So a tenant may be refused a little too early.
"""

import math
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from twinkle.errors import OverloadedError, QuotaError
from twinkle.server.config.sections import LimitsConfig
from twinkle.server.services.futures import PROMISE_BYTES
from twinkle.server.services.training.adapters import LiveAdapter, LiveAdapters
from twinkle.server.services.training.context import TrainingContext
from twinkle.server.state.store import Store
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.types import Budget, Op, Tally

_COUNT_SECONDS = 0.25  # between two exact counts of the bytes of all ops
_MORE = 1.25  # an op of an adapter that has unfinished ops may use this multiple of the journal's limit


@dataclass
class Entry:
    """An op that has passed the checks and is being written to the journal."""

    taken: bool = False  # whether it was accepted as new; if not, its tokens are refunded


class OpAdmission:
    """Checks ops against the limits on queues, results and rates. Belongs to one event loop.

    There is no await between a check and its count, so that no other op gets in between.
    """

    def __init__(self, context: TrainingContext, adapters: LiveAdapters, most_bytes: int = 2**62) -> None:
        """``most_bytes``: the most memory that the ops of all tenants together may take."""
        self._tenants = context.tenants
        self._scheduler = context.scheduler
        self._futures = context.futures
        self._adapters = adapters
        self._entering = Tally()  # ops that are being written to the journal, by tenant
        self._entering_bytes = Tally()  # their bytes
        self._entering_results = Tally()  # the bytes that their results will have
        self._most_bytes = most_bytes
        self._counted_bytes = 0  # bytes of all ops at the last exact count, plus those of ops that arrived since
        self._counted_at = -math.inf

    def check(self, tenant_id: str) -> None:
        """Raise an error if the tenant's queue, results or rate have no room for one more op, however small it is.

        QuotaError or RateLimitError: the tenant's own limits. OverloadedError: the results of all tenants.
        """
        limits = self._tenants.limits(tenant_id)
        self.check_results(tenant_id)
        self._check_count(tenant_id, limits)
        self._tenants.training_rate.check(tenant_id, limits.max_training_tokens_per_minute)

    def check_results(self, tenant_id: str) -> None:
        """Raise QuotaError if the tenant's unfetched results reach a limit, OverloadedError if all tenants' do."""
        self._futures.check_unfetched(tenant_id, self._tenants.limits(tenant_id).max_unfetched_result_bytes)

    @contextmanager
    def entering(self, adapter: LiveAdapter, op: Op) -> Iterator[Entry]:
        """Check an op against the limits, and reserve its tokens and its place in the queue for a ``with`` block.

        Within the block the op is written to the journal and given to the scheduler; the caller sets ``taken`` if it
        is new. Otherwise its tokens are refunded.
        """
        tenant_id = adapter.run.tenant_id
        limits = self._tenants.limits(tenant_id)
        if op.seq not in adapter.ops:
            self._check_queue(adapter, op, limits)
        price, rate, limit = op.price, self._tenants.training_rate, limits.max_training_tokens_per_minute
        rate.charge(tenant_id, price.cost, limit)
        self._counted_bytes += price.held_bytes
        entry = Entry()
        self._entering[tenant_id] += 1
        self._entering_bytes[tenant_id] += price.held_bytes
        self._entering_results[tenant_id] += price.result_bytes
        try:
            yield entry
        finally:
            self._entering[tenant_id] -= 1
            self._entering_bytes[tenant_id] -= price.held_bytes
            self._entering_results[tenant_id] -= price.result_bytes
            if not entry.taken:
                rate.give_back(tenant_id, price.cost, limit)

    def _check_count(self, tenant_id: str, limits: LimitsConfig) -> int:
        """Return how many ops of the tenant wait or are being written; raise QuotaError if that reaches its limit."""
        waiting = self._scheduler.waiting(tenant_id) + self._entering[tenant_id]
        if waiting >= limits.max_queued_ops_per_tenant:
            raise QuotaError("queued ops", waiting, limits.max_queued_ops_per_tenant, "max_queued_ops_per_tenant")
        return waiting

    def _check_queue(self, adapter: LiveAdapter, op: Op, limits: LimitsConfig) -> None:
        tenant_id = adapter.run.tenant_id
        self.check_results(tenant_id)
        if op.seq == self._scheduler.next_seq(op.adapter_id):
            return  # the next op of its adapter is always accepted: the ops after it cannot run without it
        waiting = self._check_count(tenant_id, limits)
        queued, results = self._queued(tenant_id)
        most = limits.max_queued_bytes_per_tenant
        if queued and queued + op.price.held_bytes > most:
            raise QuotaError("bytes of queued ops", queued, most, "max_queued_bytes_per_tenant")
        everybody = self.budget.used
        if everybody and everybody + op.price.held_bytes > self._most_bytes:
            raise OverloadedError("bytes of queued ops", everybody, self._most_bytes, "max_queued_bytes")
        # Waiting and running ops will have results, too: count these with the results that are not fetched.
        coming = results + (waiting + 1) * PROMISE_BYTES + op.price.result_bytes
        unfetched, most = self._futures.unfetched_bytes(tenant_id), limits.max_unfetched_result_bytes
        if waiting and unfetched + coming > most:
            what = "bytes of results not fetched, or on their way"
            raise QuotaError(what, unfetched, most, "max_unfetched_result_bytes")

    @property
    def budget(self) -> Budget:
        """Return the memory of all tenants' ops that wait, run or are being written to the journal.

        The exact number is counted at most four times a second; in between, new ops are added and ended ones are not
        subtracted.
        """
        now = time.monotonic()
        if now - self._counted_at > _COUNT_SECONDS:
            waiting = sum(op.price.held_bytes for each in self._adapters for op in each.ops.values())
            self._counted_bytes, self._counted_at = self._entering_bytes.total() + waiting, now
        return Budget("queued_ops", self._counted_bytes, self._most_bytes)

    def _queued(self, tenant_id: str) -> tuple[int, int]:
        """Return the bytes of the tenant's ops that wait, run or are being written, and of their future results."""
        own = (adapter for adapter in self._adapters if adapter.run.tenant_id == tenant_id)
        prices = [op.price for each in own for op in each.ops.values()]
        held = self._entering_bytes[tenant_id] + sum(price.held_bytes for price in prices)
        return held, self._entering_results[tenant_id] + sum(price.result_bytes for price in prices)


class JournalQuota:
    """Checks the limit on each tenant's bytes in the journal. Belongs to one event loop.

    Each process of a server reads the bytes of all processes from the database, and adds only what it writes itself.
    """

    def __init__(self, store: Store, tenants: Tenants) -> None:
        self._store = store
        self._tenants = tenants
        self._bytes: Counter[str] = Counter()
        self.budget = Budget("journal", 0, 0)  # bytes of its files at the last measure, and these plus the free disk

    async def measure(self) -> None:
        """Read the exact number of bytes from the database and the disk."""
        self._bytes = Counter(await self._store.ops.bytes_by_tenant())
        used = await self._store.ops.bytes_on_disk()
        self.budget = Budget("journal", used, used + shutil.disk_usage(self._store.data_dir).free)

    def add(self, tenant_id: str, size: int) -> None:
        """Add bytes that were just written for a tenant."""
        self._bytes[tenant_id] += size

    def check(self, tenant_id: str, size: int, *, urgent: bool) -> None:
        """Raise QuotaError if ``size`` more bytes exceed the tenant's limit.

        ``urgent``: the op's adapter has unfinished ops, which may wait for this op. It may exceed the limit by a
        quarter.
        """
        limit = self._tenants.limits(tenant_id).max_journal_bytes_per_tenant
        used = self._bytes[tenant_id]
        if used + size > (limit * _MORE if urgent else limit):
            raise QuotaError("bytes in the journal", used, limit, "max_journal_bytes_per_tenant")
