"""What each tenant may use and has used: limits, share, tokens per minute, usage. One object for each process."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from twinkle.errors import QuotaError
from twinkle.server.config import ServerConfig
from twinkle.server.config.sections import LimitsConfig, TenantConfig
from twinkle.server.scheduling.shares import Priority, TenantShare
from twinkle.server.tenancy.rate_limit import TokenRate
from twinkle.server.tenancy.work_pools import WorkPools
from twinkle.server.types import Tally
from twinkle.server.usage import Usage


@dataclass(frozen=True)
class TenantTerms:
    """The limits and the share that the configuration gives a tenant.

    The limits on queues apply to each base model separately, that on unfetched results to its training and its sampling
    separately.
    """

    limits: LimitsConfig = field(default_factory=LimitsConfig)
    share: TenantShare = field(default_factory=TenantShare)


class Tenants:
    """The terms of all tenants, and the counters against which limits are checked. Belongs to one event loop.

    The configuration names a tenant by its id, by its name or by the name of one of its API keys. If several entries
    match, the id counts before the tenant's name, and this before the names of keys.
    """

    def __init__(
        self,
        default: TenantTerms | None = None,
        special: Mapping[str, TenantTerms] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.usage = Usage()
        self.pools = WorkPools()  # the threads that all services of this process share
        self.training_rate = TokenRate("training tokens per minute", "max_training_tokens_per_minute", clock)
        self.sampling_rate = TokenRate("sampling tokens per minute", "max_sampling_tokens_per_minute", clock)
        self._polls = Tally()
        self._default = default or TenantTerms()
        self._special = dict(special or {})
        self._by_name: dict[str, TenantTerms] = {}

    def terms(self, tenant_id: str) -> TenantTerms:
        return self._special.get(tenant_id) or self._by_name.get(tenant_id) or self._default

    def limits(self, tenant_id: str) -> LimitsConfig:
        return self.terms(tenant_id).limits

    def share(self, tenant_id: str) -> TenantShare:
        return self.terms(tenant_id).share

    def polling(self, tenant_id: str) -> AbstractContextManager[None]:
        """Return a context manager that counts one waiting long poll of the tenant.

        Raise QuotaError if the tenant has as many as its limit allows: each holds a connection and an open file.
        """
        limit = self.limits(tenant_id).max_long_polls_per_tenant
        if self._polls[tenant_id] >= limit:
            raise QuotaError("requests that wait for results", limit, limit, "max_long_polls_per_tenant")
        return self._polls.counting(tenant_id)

    @property
    def needs_names(self) -> bool:
        """Return whether :meth:`set_names` matters: the configuration has terms for single tenants."""
        return bool(self._special)

    def set_names(self, of_keys: Iterable[tuple[str, str]], of_tenants: Iterable[tuple[str, str]]) -> None:
        """Set the names of all API keys and tenants, as pairs of a name and a tenant's id, instead of earlier ones."""
        pairs = [*of_keys, *of_tenants]  # of several that match, the last one counts
        self._by_name = {tenant_id: self._special[name] for name, tenant_id in pairs if name in self._special}


def configured_tenants(config: ServerConfig) -> Tenants:
    """Return the tenants with the limits and shares that the configuration gives them."""
    special = {name: _terms(config.limits, tenant) for name, tenant in config.tenants.items()}
    return Tenants(TenantTerms(config.limits), special)


def _terms(general: LimitsConfig, tenant: TenantConfig) -> TenantTerms:
    """Return the terms of one tenant: the general limits, replaced by the tenant's own limits where it has any."""
    own = tenant.limits.model_dump(exclude_none=True)
    share = TenantShare(tenant.weight, Priority[tenant.priority.upper()])
    return TenantTerms(general.model_copy(update=own), share)
