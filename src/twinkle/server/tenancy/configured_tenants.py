"""The terms of tenants, as the configuration has them."""

from twinkle.server.config import ServerConfig
from twinkle.server.config.sections import LimitsConfig, SpecialLimits, TenantConfig
from twinkle.server.scheduling.share import Priority, Standing
from twinkle.server.tenancy.tenants import TenantLimits, Tenants, TenantTerms

__all__ = ["configured_tenants"]


def configured_tenants(config: ServerConfig) -> Tenants:
    default = TenantTerms(_limits(config.limits, SpecialLimits()))
    return Tenants(default, {name: _terms(config.limits, tenant) for name, tenant in config.tenants.items()})


def _terms(limits: LimitsConfig, tenant: TenantConfig) -> TenantTerms:
    standing = Standing(tenant.weight, Priority[tenant.priority.upper()])
    return TenantTerms(_limits(limits, tenant.limits), standing)


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
