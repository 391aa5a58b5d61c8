"""Which ops a model service takes in: no more than a tenant's limits allow, however many come at once.

:class:`JournalQuota` counts how much of the journal each tenant takes: request bodies that a restart would need, and
results that are kept. What is on record is counted now and then, when the journal is pruned; in between, what comes is
added and nothing is taken away. So a tenant may be refused a little early, never late.
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

_COUNT_SECONDS = 0.25  # between two counts of all ops that wait
_MORE = 1.25  # of a limit of the journal, for an op that others of its adapter wait for


@dataclass
class Entry:
    """An op between its check and its place in the line."""

    taken: bool = False  # whether it is new: otherwise it costs nothing


class OpAdmission:
    """Belongs to one event loop. Between a check and its count nobody else gets in."""

    def __init__(self, context: TrainingContext, adapters: LiveAdapters, most_bytes: int = 2**62) -> None:
        """``most_bytes``: memory of the ops of all tenants together."""
        self._tenants = context.tenants
        self._scheduler = context.scheduler
        self._futures = context.futures
        self._adapters = adapters
        self._entering = Tally()  # ops that are being written down, by tenant
        self._entering_bytes = Tally()
        self._entering_results = Tally()
        self._most_bytes = most_bytes
        self._counted_bytes = 0  # of all ops when they were last counted, and of those that came since
        self._counted_at = -math.inf

    def check(self, tenant_id: str) -> None:
        """Raise QuotaError if no op of this tenant would be taken now, however small."""
        limits = self._tenants.limits(tenant_id)
        self.check_results(tenant_id)
        self._check_count(tenant_id, limits)
        self._tenants.training_rate.check(tenant_id, limits.max_training_tokens_per_minute)

    def check_results(self, tenant_id: str) -> None:
        """Raise QuotaError if the tenant has too many results to fetch, OverloadedError if all tenants together do."""
        self._futures.check_unfetched(tenant_id, self._tenants.limits(tenant_id).max_unfetched_result_bytes)

    @contextmanager
    def entering(self, adapter: LiveAdapter, op: Op) -> Iterator[Entry]:
        """Holds a place for the op, and its tokens, until it has one in the scheduler or turns out to need none."""
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
        """Return how many ops of the tenant wait; QuotaError if it may have no more."""
        waiting = self._scheduler.waiting(tenant_id) + self._entering[tenant_id]
        if waiting >= limits.max_queued_ops_per_tenant:
            raise QuotaError("queued ops", waiting, limits.max_queued_ops_per_tenant, "max_queued_ops_per_tenant")
        return waiting

    def _check_queue(self, adapter: LiveAdapter, op: Op, limits: LimitsConfig) -> None:
        tenant_id = adapter.run.tenant_id
        self.check_results(tenant_id)
        if op.seq == self._scheduler.next_seq(op.adapter_id):
            return  # all others of its adapter wait for it: without it they would wait in vain
        waiting = self._check_count(tenant_id, limits)
        queued, results = self._queued(tenant_id)
        most = limits.max_queued_bytes_per_tenant
        if queued and queued + op.price.held_bytes > most:
            raise QuotaError("bytes of queued ops", queued, most, "max_queued_bytes_per_tenant")
        everybody = self.budget.used
        if everybody and everybody + op.price.held_bytes > self._most_bytes:
            raise OverloadedError("bytes of queued ops", everybody, self._most_bytes, "max_queued_bytes")
        # What waits and runs will have results, too.
        coming = results + (waiting + 1) * PROMISE_BYTES + op.price.result_bytes
        unfetched, most = self._futures.unfetched_bytes(tenant_id), limits.max_unfetched_result_bytes
        if waiting and unfetched + coming > most:
            what = "bytes of results not fetched, or on their way"
            raise QuotaError(what, unfetched, most, "max_unfetched_result_bytes")

    @property
    def budget(self) -> Budget:
        """The memory of all ops that wait, run or are being written down, of all tenants.

        They are counted now and then; in between, what comes is added and nothing is taken away.
        """
        now = time.monotonic()
        if now - self._counted_at > _COUNT_SECONDS:
            waiting = sum(op.price.held_bytes for each in self._adapters for op in each.ops.values())
            self._counted_bytes, self._counted_at = self._entering_bytes.total() + waiting, now
        return Budget("queued_ops", self._counted_bytes, self._most_bytes)

    def _queued(self, tenant_id: str) -> tuple[int, int]:
        """Bytes of the tenant's ops that wait, run or are being written down, and of the results they will have."""
        own = (adapter for adapter in self._adapters if adapter.run.tenant_id == tenant_id)
        prices = [op.price for each in own for op in each.ops.values()]
        held = self._entering_bytes[tenant_id] + sum(price.held_bytes for price in prices)
        return held, self._entering_results[tenant_id] + sum(price.result_bytes for price in prices)


class JournalQuota:
    """Belongs to one event loop. Each process of a server counts all that is on record and adds its own."""

    def __init__(self, store: Store, tenants: Tenants) -> None:
        self._store = store
        self._tenants = tenants
        self._bytes: Counter[str] = Counter()
        self.budget = Budget("journal", 0, 0)  # its files when they were last counted, and what the disk had room for

    async def measure(self) -> None:
        """Count what is on record now."""
        self._bytes = Counter(await self._store.ops.bytes_by_tenant())
        used = await self._store.ops.bytes_on_disk()
        self.budget = Budget("journal", used, used + shutil.disk_usage(self._store.data_dir).free)

    def add(self, tenant_id: str, size: int) -> None:
        """Note bytes that were just written for a tenant."""
        self._bytes[tenant_id] += size

    def check(self, tenant_id: str, size: int, *, urgent: bool) -> None:
        """Raise QuotaError if there is no room for ``size`` bytes of a tenant. ``urgent``: other ops wait for this."""
        limit = self._tenants.limits(tenant_id).max_journal_bytes_per_tenant
        used = self._bytes[tenant_id]
        if used + size > (limit * _MORE if urgent else limit):
            raise QuotaError("bytes in the journal", used, limit, "max_journal_bytes_per_tenant")
