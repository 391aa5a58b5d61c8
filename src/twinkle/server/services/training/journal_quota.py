"""How much of the journal each tenant takes: request bodies that a restart would need, and results that are kept.

What is on record is counted now and then, when the journal is pruned; in between, what comes is added and nothing is
taken away. So a tenant may be refused a little early, never late.
"""

import shutil
from collections import Counter

from twinkle.errors import QuotaError
from twinkle.server.state.store import Store
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.types import Budget

_MORE = 1.25  # of the limit, for an op that others of its adapter wait for


class JournalQuota:
    """Belongs to one event loop. Each process of a server counts all that is on record and adds its own."""

    def __init__(self, store: Store, tenants: Tenants) -> None:
        self._store = store
        self._tenants = tenants
        self._bytes: Counter[str] = Counter()
        self._disk = Budget("journal", 0, 0)

    async def measure(self) -> None:
        """Count what is on record now."""
        self._bytes = Counter(await self._store.ops.bytes_by_tenant())
        used = await self._store.ops.bytes_on_disk()
        self._disk = Budget("journal", used, used + shutil.disk_usage(self._store.data_dir).free)

    def add(self, tenant_id: str, size: int) -> None:
        """Note bytes that were just written for a tenant."""
        self._bytes[tenant_id] += size

    def check(self, tenant_id: str, size: int, *, urgent: bool) -> None:
        """Raise QuotaError if there is no room for ``size`` bytes of a tenant. ``urgent``: other ops wait for this."""
        limit = self._tenants.limits(tenant_id).max_journal_bytes_per_tenant
        used = self._bytes[tenant_id]
        if used + size > (limit * _MORE if urgent else limit):
            raise QuotaError("bytes in the journal", used, limit, "max_journal_bytes_per_tenant")

    def used(self, tenant_id: str) -> int:
        return self._bytes[tenant_id]

    def budget(self) -> Budget:
        """The journal's files when they were last counted; the limit is what the disk had room for then."""
        return self._disk
