"""What each tenant may use and has used: limits, share, tokens per minute, usage. One object for all services."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any

from twinkle.errors import QuotaError
from twinkle.server.config import ServerConfig
from twinkle.server.config.sections import LimitsConfig, SpecialLimits, TenantConfig
from twinkle.server.scheduling.shares import Priority, TenantShare
from twinkle.server.tenancy.rate_limit import TokenRate
from twinkle.server.tenancy.work_pools import WorkPools
from twinkle.server.types import Tally
from twinkle.server.usage import Usage


def _limit(key: str, default: int | None) -> Any:
    return field(default=default, metadata={"key": key})


@dataclass(frozen=True)
class TenantLimits:
    """The limits of one tenant, each with its key in the configuration; None is no limit.

    Queues and results are counted for each base model by itself.
    """

    sessions: int = _limit("max_sessions_per_tenant", 1000)
    adapters: int = _limit("max_adapters_per_tenant", 30)
    session_rows: int = _limit("max_session_rows_per_tenant", 5000)  # on record, ended or not; and as many runs
    sampling_session_rows: int = _limit("max_sampling_session_rows_per_tenant", 20_000)
    queued_ops: int = _limit("max_queued_ops_per_tenant", 1024)
    queued_bytes: int = _limit("max_queued_bytes_per_tenant", 2**30)  # of memory that queued ops take
    waiting_samples: int = _limit("max_waiting_samples_per_tenant", 4096)
    unfetched_bytes: int = _limit("max_unfetched_result_bytes", 2**30)
    uploading_bytes: int = _limit("max_uploading_bytes_per_tenant", 2**28)  # of bodies being received and read
    long_polls: int = _limit("max_long_polls_per_tenant", 8192)  # requests that wait for results
    training_tokens_per_minute: int | None = _limit("max_training_tokens_per_minute", None)
    sampling_tokens_per_minute: int | None = _limit("max_sampling_tokens_per_minute", None)
    checkpoint_bytes: int | None = _limit("max_checkpoint_bytes_per_tenant", None)
    journal_bytes: int = _limit("max_journal_bytes_per_tenant", 4 * 2**30)


@dataclass(frozen=True)
class TenantTerms:
    """What the configuration gives a tenant."""

    limits: TenantLimits = field(default_factory=TenantLimits)
    share: TenantShare = field(default_factory=TenantShare)


class Tenants:
    """Terms are given by tenant id or by the name of one of the tenant's keys; the id comes first.

    Belongs to one event loop.
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
        self._by_key_name: dict[str, TenantTerms] = {}

    def terms(self, tenant_id: str) -> TenantTerms:
        return self._special.get(tenant_id) or self._by_key_name.get(tenant_id) or self._default

    def limits(self, tenant_id: str) -> TenantLimits:
        return self.terms(tenant_id).limits

    def share(self, tenant_id: str) -> TenantShare:
        return self.terms(tenant_id).share

    def polling(self, tenant_id: str) -> AbstractContextManager[None]:
        """Enter this while a request waits for a result; QuotaError if its tenant has as many as it may.

        Each holds a connection and an open file.
        """
        limit = self.limits(tenant_id).long_polls
        if self._polls[tenant_id] >= limit:
            raise QuotaError("requests that wait for results", limit, limit, "max_long_polls_per_tenant")
        return self._polls.counting(tenant_id)

    @property
    def needs_key_names(self) -> bool:
        return bool(self._special)

    def set_key_names(self, keys: Iterable[tuple[str, str]]) -> None:
        """Take the names of all keys that exist now, each with the tenant it belongs to."""
        self._by_key_name = {tenant_id: self._special[name] for name, tenant_id in keys if name in self._special}


def configured_tenants(config: ServerConfig) -> Tenants:
    """Return the tenants with the limits and shares that the configuration gives them."""
    default = TenantTerms(_limits(config.limits, SpecialLimits()))
    return Tenants(default, {name: _terms(config.limits, tenant) for name, tenant in config.tenants.items()})


def _terms(limits: LimitsConfig, tenant: TenantConfig) -> TenantTerms:
    share = TenantShare(tenant.weight, Priority[tenant.priority.upper()])
    return TenantTerms(_limits(limits, tenant.limits), share)


def _limits(general: LimitsConfig, special: SpecialLimits) -> TenantLimits:
    given = {name: value for name, value in special.model_dump().items() if value is not None}
    limits = general.model_copy(update=given)
    return TenantLimits(**{each.name: getattr(limits, each.metadata["key"]) for each in fields(TenantLimits)})
