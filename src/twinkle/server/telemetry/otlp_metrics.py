"""The same metrics as Prometheus reads, in OpenTelemetry's words: one set of instruments, one set of names.

Counters keep ``_total`` and units are sent as units, so that a store that turns them into Prometheus' names again comes
to those of ``instruments.py``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

from twinkle.server.telemetry.instruments import INSTRUMENTS

__all__ = ["metrics_data"]

SCOPE = "twinkle.server"
_UNITS = {instrument.name: instrument.unit for instrument in INSTRUMENTS}
_CUMULATIVE = AggregationTemporality.CUMULATIVE


@dataclass(frozen=True)
class _Span:
    """Of time, in nanoseconds: since the process started until now."""

    start: int
    now: int


def metrics_data(families: Iterable[Family], resource: Resource, start: int, now: int) -> MetricsData:
    metrics = [metric for family in families if (metric := _metric(family, _Span(start, now))) is not None]
    scope = ScopeMetrics(InstrumentationScope(SCOPE), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metric(family: Family, span: _Span) -> Metric | None:
    """None for one without values: a collector may refuse it."""
    if not family.samples:
        return None
    name = f"{family.name}_total" if family.type == "counter" else family.name
    data: Sum | Gauge | Histogram
    if family.type == "histogram":
        data = Histogram(_histogram_points(family.samples, span), _CUMULATIVE)
    elif family.type == "counter":
        data = Sum(_points(family.samples, span), _CUMULATIVE, is_monotonic=True)
    else:
        data = Gauge(_points(family.samples, span))
    return Metric(name, family.documentation, _UNITS.get(name, ""), data)


def _points(samples: Iterable[Sample], span: _Span) -> list[NumberDataPoint]:
    return [NumberDataPoint(dict(sample.labels), span.start, span.now, sample.value) for sample in samples]


@dataclass
class _Buckets:
    bounds: list[float] = field(default_factory=list)
    below: list[int] = field(default_factory=list)  # how many are not above each bound
    sum: float = 0.0
    count: int = 0


def _histogram_points(samples: Iterable[Sample], span: _Span) -> Sequence[HistogramDataPoint]:
    found: dict[tuple[tuple[str, str], ...], _Buckets] = {}
    for sample in samples:
        labels = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        buckets = found.setdefault(labels, _Buckets())
        if sample.name.endswith("_bucket"):
            buckets.bounds.append(float(sample.labels["le"]))
            buckets.below.append(int(sample.value))
        elif sample.name.endswith("_sum"):
            buckets.sum = sample.value
        else:
            buckets.count = int(sample.value)
    return [_histogram_point(dict(labels), buckets, span) for labels, buckets in found.items()]


def _histogram_point(labels: dict[str, str], buckets: _Buckets, span: _Span) -> HistogramDataPoint:
    """OpenTelemetry counts each bucket by itself, and the last has no bound."""
    counts = [upper - lower for lower, upper in zip([0, *buckets.below], buckets.below, strict=False)]
    return HistogramDataPoint(
        labels,
        span.start,
        span.now,
        count=buckets.count,
        sum=buckets.sum,
        bucket_counts=counts,
        explicit_bounds=buckets.bounds[:-1],
        min=None,  # type: ignore[arg-type]  # nobody keeps it; on the wire it is optional
        max=None,  # type: ignore[arg-type]
    )
