"""An OTLP collector on a real socket (gRPC) that keeps everything it receives."""

import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects spans and metrics. Listens on ``port``, or on any free port."""

    def __init__(self, port: int = 0) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.metrics: dict[str, Any] = {}  # the latest of each name
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        for batch in request.resource_spans:
            self.resources.append({a.key: a.value.string_value for a in batch.resource.attributes})
            self.spans += [span for scope in batch.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Any]:
        return [span for span in list(self.spans) if span.name == name]

    def close(self) -> None:
        self._server.stop(None)


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self.collector = collector

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for batch in request.resource_metrics:
            for scope in batch.scope_metrics:
                self.collector.metrics |= {metric.name: metric for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()


def attributes(span: Any) -> dict[str, Any]:
    """Return the attributes of a span as plain values."""
    plain: dict[str, Any] = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        plain[one.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return plain


def eventually(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """Wait until the condition returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return result
