"""Training runs, their checkpoints, and their metrics over time."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from twinkle_client.protocol.base import Wire


class Cursor(Wire):
    limit: int
    offset: int
    total_count: int


class Checkpoint(Wire):
    checkpoint_id: str  # <kind>/<name>
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    size_bytes: int
    public: bool = False
    twinkle_path: str
    base_model: str | None = None
    is_lora: bool = False
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    user_metadata: dict[str, Any] | None = None


class LoraConfig(Wire):
    """The configuration of an adapter in Tinker's protocol; :class:`twinkle_client.LoraConfig` has PEFT's fields."""

    rank: int = 8
    train_unembed: bool = False
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelRequest(Wire):
    """The request that a training run was created with."""

    base_model: str
    lora_config: LoraConfig | None = None
    save_dir: str | None = None
    user_metadata: dict[str, Any] | None = None


class TrainingRun(Wire):
    training_run_id: str
    base_model: str
    model_owner: str
    save_dir: str | None = None
    is_lora: bool = False
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime | None = None
    last_checkpoint: dict[str, Any] | None = None
    last_sampler_checkpoint: dict[str, Any] | None = None
    user_metadata: dict[str, Any] | None = None


class TrainingRunsResponse(Wire):
    training_runs: list[TrainingRun]
    cursor: Cursor


class CheckpointsListResponse(Wire):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class CheckpointPathResponse(Wire):
    path: str
    twinkle_path: str


class ParsedCheckpointTwinklePath(Wire):
    path: str
    twinkle_path: str
    training_run_id: str
    checkpoint_type: str
    checkpoint_id: str


class ResolvedLoadPath(Wire):
    """The resolved ``name`` of a load: a checkpoint of a run, or a directory that the server allows."""

    checkpoint_name: str
    checkpoint_dir: str | None = None
    is_twinkle_path: bool = False
    training_run_id: str | None = None
    checkpoint_id: str | None = None


class DeleteCheckpointResponse(Wire):
    success: bool
    message: str


class WeightsInfoRequest(Wire):
    twinkle_path: str


class WeightsInfoResponse(Wire):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = False
    lora_rank: int | None = None


# --- metrics: measured by the server, or logged by a client -----------------------------------------------------------

MetricName = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MetricValue = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class LogMetricsRequest(Wire):
    step: int | None = Field(default=None, strict=True, ge=0, lt=2**63)  # None: the newest optimizer step of the run
    values: dict[MetricName, MetricValue] = Field(min_length=1, max_length=32)


class MetricPoint(Wire):
    number: int  # counts the points of a run
    time: float  # seconds since the epoch
    source: Literal["server", "client"]
    step: int
    values: dict[str, float]


class RunMetricsResponse(Wire):
    points: list[MetricPoint]
    next: int  # the value of ``since`` for the points after these
    more: bool  # whether there are points after these already
