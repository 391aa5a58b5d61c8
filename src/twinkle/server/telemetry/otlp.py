"""Export traces and metrics by OTLP, or, with ``telemetry.debug``, to the log.

A collector that cannot be reached costs only the loss of spans: they wait in a bounded queue, from which a thread of
its own sends them, and spans that do not fit are dropped. The log says once that the export fails and once that it
works again.

The metrics are those that Prometheus reads, converted to OpenTelemetry's types: there is one set of instruments and
names. They are converted because recording in the SDK's own instruments takes seven times as long (36 microseconds
instead of 5, measured), and metrics are recorded without ``telemetry.enabled`` too. Counters keep ``_total`` and units
are sent as units, so that a store which makes Prometheus' names from them arrives at the names in ``instruments.py``.
"""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

import twinkle
from twinkle.server.config import TelemetryConfig
from twinkle.server.telemetry.instruments import INSTRUMENTS
from twinkle.server.telemetry.metrics import Metrics, Reading
from twinkle.server.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_CLOSING_SECONDS = 3.0  # spans that are not sent by then are lost
_SPAN_DELAY_MS = 1000
_QUEUED_SPANS = 8192
_SCOPE = "twinkle.server"
_UNITS = {instrument.name: instrument.unit for instrument in INSTRUMENTS}
_CUMULATIVE = AggregationTemporality.CUMULATIVE


class Export:
    """The export of traces and metrics. Spans of ``tracing`` are sent by themselves; metrics with ``send_metrics``."""

    def __init__(self, config: TelemetryConfig, timeout_seconds: float) -> None:
        # The SDK would log every failed span and attempt; _Watch logs a failure once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._resource = Resource.create(
            {"service.name": config.service_name, "service.version": twinkle.__version__, **config.resource_attributes}
        )
        self._started = time.time_ns()
        endpoint = config.otlp_endpoint
        span_exporter = None if config.debug else OTLPSpanExporter(endpoint=endpoint, timeout=timeout_seconds)
        self._spans = _Spans(span_exporter, _Watch("traces", endpoint))
        self._processor = BatchSpanProcessor(
            self._spans, max_queue_size=_QUEUED_SPANS, schedule_delay_millis=_SPAN_DELAY_MS
        )
        self._metric_exporter = None if config.debug else OTLPMetricExporter(endpoint=endpoint, timeout=timeout_seconds)
        self._metric_watch = _Watch("metrics", endpoint)
        provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self.tracing = Tracing(provider.get_tracer(_SCOPE, twinkle.__version__))

    def send_metrics(self, metrics: Metrics, readings: Sequence[Reading]) -> None:
        """Send all metrics, or log them with ``telemetry.debug``. Blocks for about ``timeout_seconds`` at most.

        So it must not be called on the event loop.
        """
        families = metrics.families(readings)
        if self._metric_exporter is None:
            for sample in (each for family in families for each in family.samples):
                if not sample.name.endswith("_bucket"):
                    logger.info("metric %s %s %s", sample.name, dict(sample.labels), sample.value)
            return
        data = _metrics_data(families, self._resource, self._started, time.time_ns())
        self._metric_watch.record(self._metric_exporter.export(data) is MetricExportResult.SUCCESS)

    def close(self) -> None:
        """Send the spans that wait, and end the export. Blocks for ``_CLOSING_SECONDS`` or a little longer."""
        timer = threading.Timer(_CLOSING_SECONDS, self._spans.shutdown)
        timer.daemon = True
        timer.start()
        self._processor.shutdown()
        timer.cancel()
        if self._metric_exporter is not None:
            self._metric_exporter.shutdown()


class _Watch:
    """Logs when exports to a collector begin to fail, and when they work again, instead of each failure."""

    def __init__(self, what: str, endpoint: str) -> None:
        self._what = what
        self._endpoint = endpoint
        self._away = False

    def record(self, arrived: bool) -> None:
        if self._away and arrived:
            logger.info("%s are exported to %s again", self._what, self._endpoint)
        elif not self._away and not arrived:
            logger.warning(
                "%s cannot be exported to %s; the server keeps trying, and logs again when it succeeds",
                self._what,
                self._endpoint,
            )
        self._away = not arrived


class _Spans(SpanExporter):
    """Passes spans to an exporter, or writes them to the log if there is none (``telemetry.debug``)."""

    def __init__(self, exporter: SpanExporter | None, watch: _Watch) -> None:
        self._exporter = exporter
        self._watch = watch

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._exporter is None:
            for span in spans:
                start, end = span.start_time or 0, span.end_time or 0
                logger.info("span %s %.3f ms %s", span.name, (end - start) / 1e6, dict(span.attributes or {}))
            return SpanExportResult.SUCCESS
        result = self._exporter.export(spans)
        self._watch.record(result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        if self._exporter is not None:
            self._exporter.shutdown()


def _metrics_data(families: Iterable[Family], resource: Resource, start: int, now: int) -> MetricsData:
    """Convert what was recorded from ``start`` to ``now``, in nanoseconds since the epoch."""
    # A family without values is left out: a collector may refuse it.
    metrics = [_metric(family, start, now) for family in families if family.samples]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(InstrumentationScope(_SCOPE), metrics, "")], "")])


def _metric(family: Family, start: int, now: int) -> Metric:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    data: Sum | Gauge | Histogram
    if family.type == "histogram":
        # The samples of one series (its buckets, its count, its sum) are neighbours.
        series = groupby(family.samples, key=lambda one: {k: v for k, v in one.labels.items() if k != "le"})
        data = Histogram([_histogram_point(labels, list(one), start, now) for labels, one in series], _CUMULATIVE)
    else:
        points = [NumberDataPoint(dict(one.labels), start, now, one.value) for one in family.samples]
        data = Sum(points, _CUMULATIVE, is_monotonic=True) if family.type == "counter" else Gauge(points)
    return Metric(name, family.documentation, _UNITS.get(name, ""), data)


def _histogram_point(labels: dict[str, str], samples: Sequence[Sample], start: int, now: int) -> HistogramDataPoint:
    """Return one series of a histogram.

    A bucket of Prometheus counts all values up to its bound; a bucket of OpenTelemetry only those above the one before.
    """
    buckets = [one for one in samples if one.name.endswith("_bucket")]
    below = [int(one.value) for one in buckets]
    return HistogramDataPoint(
        labels,
        start,
        now,
        count=below[-1],
        sum=next(one.value for one in samples if one.name.endswith("_sum")),
        bucket_counts=[upper - lower for lower, upper in pairwise([0, *below])],
        explicit_bounds=[float(one.labels["le"]) for one in buckets[:-1]],  # the last has no bound
        min=None,  # type: ignore[arg-type]  # not recorded; on the wire it is optional
        max=None,  # type: ignore[arg-type]
    )
