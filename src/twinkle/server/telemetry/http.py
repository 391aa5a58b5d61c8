"""Middleware around every HTTP request: it adds an id and, if the request is traced, a span; it records duration and
status.

It is plain ASGI, because that costs only microseconds.
"""

import logging
import time
from collections.abc import Callable

from opentelemetry.trace import Span
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twinkle.server.telemetry import instruments
from twinkle.server.telemetry.logs import RequestContext, enter_request
from twinkle.server.telemetry.metrics import Metrics
from twinkle.server.telemetry.tracing import NO_TRACING, Tracing

logger = logging.getLogger("twinkle.server.access")

REQUEST_ID_HEADER = "X-Request-Id"
_HEADER = REQUEST_ID_HEADER.lower().encode()
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_UNMATCHED = "unmatched"  # the one route label of all paths without a route, however many strangers try


class ObservedRequests:
    """Counts, times and traces requests. A request that raises before its answer begins counts as status 500.

    ``is_traced`` says by method and path whether a request gets a span; it is called only if tracing is on.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        tracing: Tracing = NO_TRACING,
        is_traced: Callable[[str, str], bool] = lambda _method, _path: True,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing
        self._is_traced = is_traced

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        traced = self._tracing is not NO_TRACING and self._is_traced(scope["method"], scope["path"])
        span = self._tracing.start_request(scope["headers"], traced=traced)
        context = enter_request(_client_id(scope))
        status = 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (_HEADER, context.http_id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, answer)
        finally:
            self._end(scope, context, span, status, time.perf_counter() - started)

    def _end(self, scope: Scope, context: RequestContext, span: Span, status: int, seconds: float) -> None:
        matched = scope.get("route")
        route: str = _UNMATCHED if matched is None else matched.path
        method: str = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.counter(instruments.HTTP_REQUESTS, method, route, str(status)).inc()
        self._metrics.histogram(instruments.HTTP_SECONDS, route, str(status)).observe(seconds)
        if context.refused_by is not None:
            self._metrics.counter(instruments.REFUSALS, context.refused_by).inc()
        self._tracing.end_request(span, method, route, status, context.request_id)
        logger.debug("%s %s %d %.1f ms", method, route, status, seconds * 1000)


def _client_id(scope: Scope) -> str | None:
    return next((str(value, "latin-1") for name, value in scope["headers"] if name == _HEADER), None)
