"""What each tenant may use and has used: limits, share, tokens per minute, usage. One object for all services."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from twinkle.server.config import ServerConfig
from twinkle.server.config.sections import LimitsConfig
from twinkle.server.config.tenants import SpecialLimits, TenantConfig
from twinkle.server.scheduling.shares import Priority, TenantShare
from twinkle.server.tenancy.rate_limit import TokenRate
from twinkle.server.tenancy.work_pools import WorkPools
from twinkle.server.usage import Usage

__all__ = ["TenantLimits", "TenantTerms", "Tenants", "configured_tenants"]


@dataclass(frozen=True)
class TenantLimits:
    """Of one tenant; None is no limit. Queues and results are counted for each base model by itself."""

    sessions: int = 1000
    adapters: int = 30
    session_rows: int = 5000  # sessions on record, ended or not; and as many runs
    sampling_session_rows: int = 20_000
    queued_ops: int = 1024
    queued_bytes: int = 2**30  # of their memory
    waiting_samples: int = 4096
    unfetched_bytes: int = 2**30
    uploading_bytes: int = 2**28  # of bodies that are being received and read
    long_polls: int = 8192  # requests that wait for results
    training_tokens_per_minute: int | None = None
    sampling_tokens_per_minute: int | None = None
    checkpoint_bytes: int | None = None
    journal_bytes: int = 4 * 2**30


@dataclass(frozen=True)
class TenantTerms:
    limits: TenantLimits = field(default_factory=TenantLimits)
    share: TenantShare = field(default_factory=TenantShare)


class Tenants:
    """Terms are by tenant id or by the name of one of the tenant's keys; the id counts more. One event loop."""

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
        self._default = default or TenantTerms()
        self._special = dict(special or {})
        self._by_key_name: dict[str, TenantTerms] = {}

    def terms(self, tenant_id: str) -> TenantTerms:
        return self._special.get(tenant_id) or self._by_key_name.get(tenant_id) or self._default

    def limits(self, tenant_id: str) -> TenantLimits:
        return self.terms(tenant_id).limits

    def share(self, tenant_id: str) -> TenantShare:
        return self.terms(tenant_id).share

    @property
    def needs_key_names(self) -> bool:
        return bool(self._special)

    def know_keys(self, keys: Iterable[tuple[str, str]]) -> None:
        """The names of all keys there are now, each with the tenant it belongs to."""
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
    return TenantLimits(
        sessions=limits.max_sessions_per_tenant,
        adapters=limits.max_adapters_per_tenant,
        session_rows=limits.max_session_rows_per_tenant,
        sampling_session_rows=limits.max_sampling_session_rows_per_tenant,
        queued_ops=limits.max_queued_ops_per_tenant,
        queued_bytes=limits.max_queued_bytes_per_tenant,
        waiting_samples=limits.max_waiting_samples_per_tenant,
        unfetched_bytes=limits.max_unfetched_result_bytes,
        uploading_bytes=limits.max_uploading_bytes_per_tenant,
        long_polls=limits.max_long_polls_per_tenant,
        training_tokens_per_minute=limits.max_training_tokens_per_minute,
        sampling_tokens_per_minute=limits.max_sampling_tokens_per_minute,
        checkpoint_bytes=limits.max_checkpoint_bytes_per_tenant,
        journal_bytes=limits.max_journal_bytes_per_tenant,
    )
