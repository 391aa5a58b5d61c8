"""What is known of a run over time: points of named numbers, measured by the server or logged by the client."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Source = Literal["server", "client"]


@dataclass(frozen=True)
class MeasuredStep:
    """One optimizer step of a run, by the op that took it. ``at``: seconds since the epoch."""

    run_id: str
    seq: int
    at: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class MetricPoint:
    """``number`` counts the points of a run. ``step``: the run's optimizer steps, or what the client calls a step."""

    number: int
    time: float
    source: Source
    step: int
    values: Mapping[str, float]
