"""What maintenance records about tenants: usage, disk space, and their names."""

import asyncio

from twinkle.errors import LimitReachedError
from twinkle.server.state.store import Store
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.usage import utc_day

_STORAGE_SECONDS = 300.0


class UsageRecorder:
    def __init__(self, store: Store, tenants: Tenants) -> None:
        self._store = store
        self._tenants = tenants
        self._storage_at = 0.0  # when disk space was last recorded

    async def maintain(self, now: float) -> None:
        await self.read_names()
        await self.flush_usage()
        self._tenants.training_rate.forget_full()
        self._tenants.sampling_rate.forget_full()
        if now - self._storage_at >= _STORAGE_SECONDS:
            self._storage_at = now
            await self._store.usage.note_storage(utc_day(now), await self._store.usage.storage())

    async def check_space(self, tenant_id: str) -> None:
        """Raise LimitReachedError if the tenant has a limit for bytes of checkpoints and has reached it."""
        limit = self._tenants.limits(tenant_id).max_checkpoint_bytes_per_tenant
        used = 0 if limit is None else await self._store.usage.storage_of(tenant_id)
        if limit is not None and used >= limit:
            advice = "delete checkpoints that are no longer needed"
            raise LimitReachedError("bytes of checkpoints", used, limit, "max_checkpoint_bytes_per_tenant", advice)

    async def read_names(self) -> None:
        """Read the names of tenants and of their keys, where the configuration has limits or shares by name."""
        if self._tenants.needs_names:
            active = [key for key in await self._store.keys.list() if key.revoked_at is None]
            of_tenants = [(name, tenant_id) for tenant_id, name in (await self._store.tenants.names()).items()]
            self._tenants.set_names([(key.name, key.tenant_id) for key in active], of_tenants)

    async def flush_usage(self) -> None:
        """Write the usage counted since the last call to the database."""
        counts = self._tenants.usage.take_unwritten()
        try:
            await self._store.usage.add(counts)
        except (Exception, asyncio.CancelledError):  # whatever the failure is, the next call writes these counts again
            self._tenants.usage.restore_unwritten(counts)
            raise
