"""Logging, and the HTTP request for which the present task works.

With ``form`` json a log line is one JSON object with the ids of its request. The server logs no API keys or bodies.
"""

import json
import logging
import re
import secrets
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime

from twinkle.server.ids import RequestId
from twinkle.server.telemetry.tracing import current_trace_id

_WELL_FORMED = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass
class RequestContext:
    """The ids of the HTTP request being served. The server makes ``http_id``; the client may send a ``client_id``.

    A client may send the same ``client_id`` with all its requests. ``request_id`` names the op, sample or future that
    the request concerns, once that is known; ``refused_by`` is the limit because of which it was refused.
    """

    client_id: str | None = None
    http_id: str = field(default_factory=lambda: secrets.token_hex(8))
    request_id: str | None = None
    refused_by: str | None = None


_current: ContextVar[RequestContext | None] = ContextVar("twinkle_request", default=None)


def enter_request(client_id: str | None) -> RequestContext:
    """Begin a request. It is current for the rest of this task, so that lines logged after the answer have its ids.

    A ``client_id`` that is not 1 to 128 letters, digits, or ``._:-`` is ignored.
    """
    well_formed = client_id is not None and _WELL_FORMED.fullmatch(client_id)
    context = RequestContext(client_id if well_formed else None)
    _current.set(context)
    return context


def current_request() -> RequestContext | None:
    """Return the request being served; None outside of requests."""
    return _current.get()


def note_request_id(request_id: str) -> None:
    """Note that the request being served is about this op, sample or future."""
    context = _current.get()
    if context is not None:
        context.request_id = request_id


def note_refusing_limit(limit: str) -> None:
    """Note that the request being served was refused because of this limit."""
    context = _current.get()
    if context is not None:
        context.refused_by = limit


class JsonFormatter(logging.Formatter):
    """Formats a line as a JSON object with time, level, logger and message.

    As far as they are known, error, http_request_id, client_request_id, trace_id, and request_id (of the op, sample or
    future) with its run_id or sampling_session_id follow.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        line |= _ids(record)
        return json.dumps({key: value for key, value in line.items() if value is not None}, ensure_ascii=False)


def _ids(record: logging.LogRecord) -> dict[str, str | None]:
    ids: dict[str, str | None] = {}
    context = _current.get()
    request_id = record.__dict__.get("request_id")  # from ``extra``: the caller knows which op a line is about
    if context is not None:
        ids["http_request_id"] = context.http_id
        ids["client_request_id"] = context.client_id
        ids["trace_id"] = current_trace_id()
        request_id = request_id or context.request_id
    if request_id is not None:
        ids["request_id"] = request_id
        request = RequestId.parse_or_none(request_id)
        if request is not None:
            ids["sampling_session_id" if request.is_sample else "run_id"] = request.owner
    return ids


def configure_logging(level: str, form: str, handler: logging.Handler | None = None) -> None:
    """Set up logging to stderr for the whole process, unless the program has already set up logging of its own.

    ``form``: text or json. ``handler``: another destination, which also replaces an earlier set-up.
    """
    chosen = handler or logging.StreamHandler(sys.stderr)
    chosen.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[chosen], force=handler is not None)
