"""Curves of training runs: numbers over time, measured by the server or logged by a client."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from twinkle_client.protocol.base import Wire

MetricName = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MetricValue = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class LogMetricsRequest(Wire):
    step: int | None = Field(default=None, strict=True, ge=0, lt=2**63)  # None: the newest optimizer step of the run
    values: dict[MetricName, MetricValue] = Field(min_length=1, max_length=32)


class MetricPoint(Wire):
    number: int  # of the points of a run
    time: float  # seconds since the epoch
    source: Literal["server", "client"]
    step: int
    values: dict[str, float]


class RunMetricsResponse(Wire):
    points: list[MetricPoint]
    next: int  # what to ask for as ``since`` to get those after these
    more: bool  # whether there are some already
