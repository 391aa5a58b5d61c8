"""Compatibility path: the types of runs, checkpoints and metrics; see :mod:`twinkle_client.protocol.runs`."""

from twinkle_client.protocol.runs import (
    Checkpoint,
    CheckpointPathResponse,
    CheckpointsListResponse,
    CreateModelRequest,
    Cursor,
    DeleteCheckpointResponse,
    LogMetricsRequest,
    LoraConfig,
    MetricPoint,
    ParsedCheckpointTwinklePath,
    ResolvedLoadPath,
    RunMetricsResponse,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoRequest,
    WeightsInfoResponse,
)

__all__ = [
    "Checkpoint",
    "CheckpointPathResponse",
    "CheckpointsListResponse",
    "CreateModelRequest",
    "Cursor",
    "DeleteCheckpointResponse",
    "LogMetricsRequest",
    "LoraConfig",
    "MetricPoint",
    "ParsedCheckpointTwinklePath",
    "ResolvedLoadPath",
    "RunMetricsResponse",
    "TrainingRun",
    "TrainingRunsResponse",
    "WeightsInfoRequest",
    "WeightsInfoResponse",
]
