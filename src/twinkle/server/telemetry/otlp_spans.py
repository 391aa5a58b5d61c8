"""Tracing by OpenTelemetry's SDK. See ``tracing.py`` for what the spans are.

The context of a request lives on in its op: when the op's batch runs much later, in another thread, its spans are
still of the request's trace. Ended ops are remembered for a while, so that the poll which fetches the result is linked.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from twinkle.server.telemetry import request_context
from twinkle.server.telemetry.recording import Outcomes
from twinkle.server.telemetry.tracing import Attributes, OpSpan, RequestSpan

__all__ = ["OtlpTracing"]

_REMEMBERED = 8192  # ops
_MOST_LINKS = 128  # of a span: the SDK's own bound
_PROPAGATOR = TraceContextTextMapPropagator()
_PROPAGATED = {b"traceparent", b"tracestate"}
_NO_CONTEXT = Context()  # a trace of its own, whatever else is going on in this thread


class OtlpTracing:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._ops: OrderedDict[str, SpanContext] = OrderedDict()  # by request id, the oldest first

    def request(self, headers: Sequence[tuple[bytes, bytes]]) -> RequestSpan:
        carrier = {str(name, "latin-1"): str(value, "latin-1") for name, value in headers if name in _PROPAGATED}
        parent = _PROPAGATOR.extract(carrier, _NO_CONTEXT)
        return _Request(self._tracer.start_span("request", parent, SpanKind.SERVER), self._ops)

    @contextmanager
    def step(self, name: str, attributes: Attributes) -> Iterator[None]:
        with self._tracer.start_as_current_span(name, _of_request(), attributes=dict(attributes)):
            yield

    def op(self, name: str, request_id: str, attributes: Attributes) -> OpSpan:
        given = {"twinkle.request_id": request_id, **attributes}
        span = self._tracer.start_span(f"op {name}", _of_request(), attributes=given)
        self._ops[request_id] = span.get_span_context()
        if len(self._ops) > _REMEMBERED:
            self._ops.popitem(last=False)
        return _Op(self._tracer, span, request_id)

    def batch(self, ops: Sequence[OpSpan], attributes: Attributes) -> AbstractContextManager[None]:
        return self._batch([op for op in ops if isinstance(op, _Op)], attributes)

    @contextmanager
    def _batch(self, ops: "Sequence[_Op]", attributes: Attributes) -> Iterator[None]:
        """The batch is linked with its ops, and each op's run with the batch."""
        linked = ops[:_MOST_LINKS]
        span = self._tracer.start_span(
            "batch",
            _NO_CONTEXT,
            links=[Link(op.span.get_span_context()) for op in linked],
            attributes={**attributes, "twinkle.request_ids": [op.request_id for op in linked]},
        )
        for op in ops:
            op.joined(span.get_span_context())
        try:
            yield
        finally:
            span.end()


@dataclass(frozen=True)
class _Request:
    span: Span
    ops: OrderedDict[str, SpanContext]

    @property
    def trace_id(self) -> str | None:
        return trace.format_trace_id(self.span.get_span_context().trace_id)

    def end(self, method: str, route: str, status: int, request_id: str | None) -> None:
        span = self.span
        span.update_name(f"{method} {route}")
        span.set_attributes({"http.request.method": method, "http.route": route, "http.response.status_code": status})
        if request_id is not None:
            span.set_attribute("twinkle.request_id", request_id)
            op = self.ops.get(request_id)
            if op is not None and op.trace_id != span.get_span_context().trace_id:  # a poll for what another began
                span.add_link(op)
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end()


class _Op:
    """Its wait and its run are spans below its own."""

    def __init__(self, tracer: Tracer, span: Span, request_id: str) -> None:
        self.span = span
        self.request_id = request_id
        self._tracer = tracer
        self._context = trace.set_span_in_context(span, _NO_CONTEXT)
        self._part = tracer.start_span("wait", self._context)

    def started(self) -> None:
        self._part.end()
        self._part = self._tracer.start_span("run", self._context)

    def joined(self, batch: SpanContext) -> None:
        """It runs in this batch."""
        self._part.add_link(batch)

    def ended(self, outcome: str) -> None:
        self._part.end()  # the wait, where it was refused without running
        self.span.set_attribute("twinkle.outcome", outcome)
        if outcome == Outcomes.SERVER_ERROR:
            self.span.set_status(Status(StatusCode.ERROR))
        self.span.end()


def _of_request() -> Context:
    """The present request's, if there is one: replayed ops have none."""
    request = request_context.current()
    if request is None or not isinstance(request.span, _Request):
        return _NO_CONTEXT
    return trace.set_span_in_context(request.span.span, _NO_CONTEXT)
