"""Requests that wait for results: each holds a connection and an open file, so a tenant has only so many."""

from contextlib import AbstractContextManager

from twinkle.errors import QuotaError
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.types import Tally


class LongPolls:
    """The waiting requests of one process, by tenant. Belongs to one event loop."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._waiting = Tally()

    def waiting(self, tenant_id: str) -> AbstractContextManager[None]:
        """Count a request while it waits; QuotaError if its tenant has as many as it may."""
        limit = self._tenants.limits(tenant_id).long_polls
        if self._waiting[tenant_id] >= limit:
            raise QuotaError("requests that wait for results", limit, limit, "max_long_polls_per_tenant")
        return self._waiting.counting(tenant_id)
