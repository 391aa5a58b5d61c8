"""Spans of requests and of the work that they lead to.

They are recorded through OpenTelemetry's API, which does nothing until it is given a tracer of the SDK (see
``otlp.py``): a server without ``telemetry.enabled`` imports neither SDK nor exporters.

The trace of a request holds the spans of its op: journal, wait, run. The op keeps the context of its request: when its
batch runs much later, in another thread, its spans still belong to the request's trace. A batch belongs to many
tenants, so it is a trace of its own, linked with its ops. Ended ops are remembered for a while, so that the poll which
fetches the result is linked with the op too.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, NoOpTracer, Span, SpanContext, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Attributes = Mapping[str, str | int | Sequence[str]]

_REMEMBERED = 8192  # ops
_MOST_LINKS = 128  # of a span: the SDK's own bound
_PROPAGATOR = TraceContextTextMapPropagator()
_PROPAGATED = {b"traceparent", b"tracestate"}
_NO_CONTEXT = Context()  # begins a new trace, whatever span is current in this thread


class Tracing:
    """Starts the spans of requests, ops and batches of a server process. No method waits, and none raises."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        """Record spans with ``tracer``; if None, record nothing."""
        self._enabled = tracer is not None
        self._tracer = tracer or NoOpTracer()
        self._ops: OrderedDict[str, SpanContext] = OrderedDict()  # by request id, the oldest first

    def start_request(self, headers: Sequence[tuple[bytes, bytes]], *, traced: bool) -> Span:
        """Start the span of a request and make it current for the rest of the task. ``headers`` may name its parent.

        If ``traced`` is False or tracing is off, return an invalid span, which records nothing.
        """
        span: Span = INVALID_SPAN
        if self._enabled and traced:
            carrier = {str(name, "latin-1"): str(value, "latin-1") for name, value in headers if name in _PROPAGATED}
            span = self._tracer.start_span("request", _PROPAGATOR.extract(carrier, _NO_CONTEXT), SpanKind.SERVER)
        if self._enabled:  # work that goes on after the answer still belongs to the request, so nothing detaches it
            context.attach(trace.set_span_in_context(span, _NO_CONTEXT))
        return span

    def end_request(self, span: Span, method: str, route: str, status: int, request_id: str | None) -> None:
        """End a span of :meth:`start_request`. ``request_id`` names the op or sample that the request concerned."""
        span.update_name(f"{method} {route}")
        span.set_attributes({"http.request.method": method, "http.route": route, "http.response.status_code": status})
        if request_id is not None:
            span.set_attribute("twinkle.request_id", request_id)
            op = self._ops.get(request_id)
            if op is not None and op.trace_id != span.get_span_context().trace_id:  # a poll for another request's op
                span.add_link(op)
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    @contextmanager
    def step(self, name: str, attributes: Attributes) -> Iterator[None]:
        """Trace a part of the present request's work that ends before the request is answered."""
        if not self._enabled:  # with the API's own tracer that does nothing this would take 15 microseconds
            yield
            return
        with self._tracer.start_as_current_span(name, attributes=attributes):
            yield

    def op(self, name: str, request_id: str, attributes: Attributes) -> "OpSpan":
        """Start the span of an op or a sample below that of the present request, if there is one."""
        if not self._enabled:
            return _UNTRACED
        span = self._tracer.start_span(f"op {name}", attributes={"twinkle.request_id": request_id, **attributes})
        self._ops[request_id] = span.get_span_context()
        if len(self._ops) > _REMEMBERED:
            self._ops.popitem(last=False)
        return OpSpan(self._tracer, span, request_id)

    @contextmanager
    def batch(self, ops: "Sequence[OpSpan]", attributes: Attributes) -> Iterator[None]:
        """Trace work on the device. A batch is linked with its first 128 ops, and the run of each op with the batch."""
        if not self._enabled:
            yield
            return
        linked = ops[:_MOST_LINKS]
        span = self._tracer.start_span(
            "batch",
            _NO_CONTEXT,
            links=[Link(op.span.get_span_context()) for op in linked],
            attributes={**attributes, "twinkle.request_ids": [op.request_id for op in linked]},
        )
        for op in ops:
            op.join(span.get_span_context())
        try:
            yield
        finally:
            span.end()


class OpSpan:
    """The span of an op or a sample, from accepted to its result. Its wait and its run are spans below it."""

    def __init__(self, tracer: Tracer, span: Span, request_id: str) -> None:
        self.span = span
        self.request_id = request_id
        self._tracer = tracer
        self._context = trace.set_span_in_context(span, _NO_CONTEXT)
        self._part = tracer.start_span("wait", self._context)

    def start(self) -> None:
        """Note that the op runs and does not wait any more."""
        self._part.end()
        self._part = self._tracer.start_span("run", self._context)

    def join(self, batch: SpanContext) -> None:
        """Link the span of the op's run with this batch."""
        self._part.add_link(batch)

    def end(self, outcome: str, *, failed: bool) -> None:
        """Note how the op ended. ``failed``: because of a failure of the server, not a mistake of the tenant."""
        self._part.end()  # the run, or the wait of an op that was refused without running
        self.span.set_attribute("twinkle.outcome", outcome)
        if failed:
            self.span.set_status(Status(StatusCode.ERROR))
        self.span.end()


NO_TRACING = Tracing()
_UNTRACED = OpSpan(NoOpTracer(), INVALID_SPAN, "")  # shared by all ops while nothing is traced: it holds nothing


def current_trace_id() -> str | None:
    """Return the id of the current trace in hexadecimal; None outside of traces."""
    present = trace.get_current_span().get_span_context()
    return trace.format_trace_id(present.trace_id) if present.is_valid else None
