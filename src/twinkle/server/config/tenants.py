"""Tenants with limits, a weight or a priority of their own."""

from typing import Annotated, Any, Literal

from pydantic import Field

from twinkle.server.config.messages import Section

__all__ = ["SpecialLimits", "TenantConfig"]

Count = Annotated[int, Field(ge=1)]


def _limit(what: str) -> Any:
    return Field(default=None, description=f"{what}; null: as in `limits`.")


class SpecialLimits(Section):
    """Limits of one tenant in place of those under `limits`, where they have the same names."""

    max_uploading_bytes_per_tenant: Count | None = _limit("Bodies of requests that are not answered yet")
    max_long_polls_per_tenant: Count | None = _limit("Requests that wait for results")
    max_sessions_per_tenant: Count | None = _limit("Active sessions")
    max_adapters_per_tenant: Count | None = _limit("Live adapters")
    max_session_rows_per_tenant: Count | None = _limit("Sessions on record, and as many runs")
    max_sampling_session_rows_per_tenant: Count | None = _limit("Sampling sessions on record")
    max_queued_ops_per_tenant: Count | None = _limit("Training ops that wait")
    max_queued_bytes_per_tenant: Count | None = _limit("Memory of training ops that wait")
    max_training_tokens_per_minute: Count | None = _limit("Tokens to train on")
    max_sampling_tokens_per_minute: Count | None = _limit("Tokens of samples and of their prompts")
    max_checkpoint_bytes_per_tenant: Count | None = _limit("Disk space of checkpoints")
    max_journal_bytes_per_tenant: Count | None = _limit("Disk space of requests and results")
    max_waiting_samples_per_tenant: Count | None = _limit("Samples that are not finished")
    max_unfetched_result_bytes: Count | None = _limit("Results not fetched yet")


class TenantConfig(Section):
    """One tenant's place among the others, and its own limits."""

    weight: float = Field(default=1.0, ge=0.01, le=100.0)
    """Its part of the device while others of its priority have work, too: twice the weight, twice the tokens."""
    priority: Literal["low", "normal", "high"] = "normal"
    """Higher ones go first; now and then all others get a turn."""
    limits: SpecialLimits = SpecialLimits()
    """Limits of its own."""
