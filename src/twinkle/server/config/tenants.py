"""Tenants that are treated otherwise than the rest."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from twinkle.server.config.allowed import STRICT

__all__ = ["SpecialLimits", "TenantConfig"]

Count = Annotated[int, Field(ge=1)]
_AS_FOR_ALL = "null: as in `limits`."


class SpecialLimits(BaseModel):
    """Limits of one tenant in place of those under `limits`, where they have the same names."""

    model_config = STRICT

    max_uploading_bytes_per_tenant: Count | None = Field(
        default=None, description=f"Bodies of requests that are not answered yet; {_AS_FOR_ALL}"
    )
    max_long_polls_per_tenant: Count | None = Field(
        default=None, description=f"Requests that wait for results; {_AS_FOR_ALL}"
    )
    max_sessions_per_tenant: Count | None = Field(default=None, description=f"Active sessions; {_AS_FOR_ALL}")
    max_adapters_per_tenant: Count | None = Field(default=None, description=f"Live adapters; {_AS_FOR_ALL}")
    max_session_rows_per_tenant: Count | None = Field(
        default=None, description=f"Sessions on record, and as many runs; {_AS_FOR_ALL}"
    )
    max_sampling_session_rows_per_tenant: Count | None = Field(
        default=None, description=f"Sampling sessions on record; {_AS_FOR_ALL}"
    )
    max_queued_ops_per_tenant: Count | None = Field(default=None, description=f"Training ops that wait; {_AS_FOR_ALL}")
    max_queued_bytes_per_tenant: Count | None = Field(default=None, description=f"Their memory; {_AS_FOR_ALL}")
    max_training_tokens_per_minute: Count | None = Field(default=None, description=_AS_FOR_ALL.capitalize())
    max_sampling_tokens_per_minute: Count | None = Field(default=None, description=_AS_FOR_ALL.capitalize())
    max_checkpoint_bytes_per_tenant: Count | None = Field(default=None, description=f"Disk space; {_AS_FOR_ALL}")
    max_journal_bytes_per_tenant: Count | None = Field(
        default=None, description=f"Disk space of requests and results; {_AS_FOR_ALL}"
    )
    max_waiting_samples_per_tenant: Count | None = Field(
        default=None, description=f"Samples that are not finished; {_AS_FOR_ALL}"
    )
    max_unfetched_result_bytes: Count | None = Field(
        default=None, description=f"Results not fetched yet; {_AS_FOR_ALL}"
    )


class TenantConfig(BaseModel):
    """One tenant's place among the others, and its own limits."""

    model_config = STRICT

    weight: float = Field(
        default=1.0,
        ge=0.01,
        le=100.0,
        description="Its part of the device while others of its priority have work, too: twice the weight, twice the "
        "tokens.",
    )
    priority: Literal["low", "normal", "high"] = Field(
        default="normal", description="Higher ones go first; now and then all others get a turn."
    )
    limits: SpecialLimits = Field(default_factory=SpecialLimits, description="Limits of its own.")
