"""What the services tell when somebody looks: plain numbers of this moment, gathered without waiting for anybody."""

from collections.abc import Mapping
from dataclasses import dataclass

from twinkle.model.types import TrainerNumbers

__all__ = ["SamplingReadings", "TrainingReadings"]


@dataclass(frozen=True)
class TrainingReadings:
    """``waiting`` ops by tenant. ``trainer`` is None until its first batch."""

    waiting: Mapping[str, int]
    merge_ratio: float
    adapters_on_disk: int
    busy_seconds: float
    step_seconds: float
    long_polls: int
    unfetched_bytes: int
    trainer: TrainerNumbers | None


@dataclass(frozen=True)
class SamplingReadings:
    waiting: int
    busy_seconds: float
    long_polls: int
    unfetched_bytes: int
