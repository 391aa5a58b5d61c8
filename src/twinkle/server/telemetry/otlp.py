"""Sending traces and metrics by OTLP, or, with ``telemetry.debug``, to the log.

A collector that is away costs nothing but its spans: they wait in a bounded queue in a thread of their own, what does
not fit is dropped, and the log says once that it is away and once that it is back.
"""

import logging
import threading
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

import twinkle
from twinkle.server.config import TelemetryConfig
from twinkle.server.telemetry.metrics import Metrics, Reading
from twinkle.server.telemetry.otlp_metrics import SCOPE, metrics_data
from twinkle.server.telemetry.otlp_spans import OtlpTracing

__all__ = ["Export"]

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 5.0  # of one attempt, its repetitions included
_CLOSING_SECONDS = 3.0  # what is left after that is lost
_SPAN_DELAY_MS = 1000
_QUEUED_SPANS = 8192


class Export:
    """Everything that leaves the server. ``tracing`` records spans; metrics are handed over."""

    def __init__(self, config: TelemetryConfig) -> None:
        # It would say for every span and every attempt what we say once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._resource = Resource.create(
            {"service.name": config.service_name, "service.version": twinkle.__version__, **config.resource_attributes}
        )
        self._started = time.time_ns()
        self._metric_exporter: MetricExporter | None = None
        self._metric_watch = _Watch("metrics", config.otlp_endpoint)
        spans: SpanExporter
        if config.debug:
            spans = _LoggedSpans()
        else:
            spans = OTLPSpanExporter(endpoint=config.otlp_endpoint, timeout=_TIMEOUT_SECONDS)
            self._metric_exporter = OTLPMetricExporter(endpoint=config.otlp_endpoint, timeout=_TIMEOUT_SECONDS)
        self._span_exporter = spans
        self._processor = BatchSpanProcessor(
            _WatchedSpans(spans, _Watch("traces", config.otlp_endpoint)),
            max_queue_size=_QUEUED_SPANS,
            schedule_delay_millis=_SPAN_DELAY_MS,
        )
        provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self.tracing = OtlpTracing(provider.get_tracer(SCOPE, twinkle.__version__))

    def send_metrics(self, metrics: Metrics, readings: Sequence[Reading]) -> None:
        """Blocks, for ``_TIMEOUT_SECONDS`` at most."""
        families = metrics.families(readings)
        if self._metric_exporter is None:
            for family in families:
                for sample in family.samples:
                    if not sample.name.endswith("_bucket"):
                        logger.info("metric %s %s %s", sample.name, dict(sample.labels), sample.value)
            return
        data = metrics_data(families, self._resource, self._started, time.time_ns())
        self._metric_watch.note(self._metric_exporter.export(data) is MetricExportResult.SUCCESS)

    def close(self) -> None:
        """Blocks, for ``_CLOSING_SECONDS`` or a little longer."""
        timer = threading.Timer(_CLOSING_SECONDS, self._span_exporter.shutdown)
        timer.daemon = True
        timer.start()
        self._processor.shutdown()
        timer.cancel()
        if self._metric_exporter is not None:
            self._metric_exporter.shutdown()


class _Watch:
    """Says once that a collector is away, and once that it is back."""

    def __init__(self, what: str, endpoint: str) -> None:
        self._what = what
        self._endpoint = endpoint
        self._away = False

    def note(self, arrived: bool) -> None:
        if self._away and arrived:
            logger.info("%s are exported to %s again", self._what, self._endpoint)
        elif not self._away and not arrived:
            logger.warning(
                "%s cannot be exported to %s; the server goes on trying, and says no more until it can",
                self._what,
                self._endpoint,
            )
        self._away = not arrived


class _WatchedSpans(SpanExporter):
    def __init__(self, exporter: SpanExporter, watch: _Watch) -> None:
        self._exporter = exporter
        self._watch = watch

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        self._watch.note(result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _LoggedSpans(SpanExporter):
    """telemetry.debug."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            start, end = span.start_time or 0, span.end_time or 0
            logger.info("span %s %.3f ms %s", span.name, (end - start) / 1e6, dict(span.attributes or {}))
        return SpanExportResult.SUCCESS
