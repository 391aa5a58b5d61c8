"""Which HTTP request the code that runs now works for: for logs, traces and the X-Request-Id of its answer."""

import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass, field

from twinkle.server.telemetry.tracing import UNTRACED, RequestSpan

__all__ = ["RequestContext", "about", "current"]

_WELL_FORMED = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass
class RequestContext:
    """``http_id`` is ours, of this one request. ``client_id`` is what the client sent, perhaps with all its requests.

    ``request_id`` is that of the op, sample or future that the request turned out to be about.
    """

    client_id: str | None = None
    http_id: str = field(default_factory=lambda: secrets.token_hex(8))
    span: RequestSpan = UNTRACED
    request_id: str | None = None
    refused_by: str | None = None  # the limit that the request met


_current: ContextVar[RequestContext | None] = ContextVar("twinkle_request", default=None)


def enter(client_id: str | None, span: RequestSpan) -> RequestContext:
    """For the rest of this task: whatever is logged after the answer still belongs to it."""
    well_formed = client_id is not None and _WELL_FORMED.fullmatch(client_id)
    context = RequestContext(client_id if well_formed else None, span=span)
    _current.set(context)
    return context


def current() -> RequestContext | None:
    """None outside of requests."""
    return _current.get()


def about(request_id: str) -> None:
    """The request now served is about this op, sample or future."""
    context = _current.get()
    if context is not None:
        context.request_id = request_id


def refused_by(limit: str) -> None:
    """Note that the request now served was refused because of this limit."""
    context = _current.get()
    if context is not None:
        context.refused_by = limit
