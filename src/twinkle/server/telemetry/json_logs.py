"""Logs for machines: one JSON object a line, with the ids of the request it is about. Never keys, never bodies."""

import json
import logging
import sys
from datetime import UTC, datetime

from twinkle.server.ids import split_request_id
from twinkle.server.telemetry import request_context

__all__ = ["JsonFormatter", "configure_logging"]

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """time, level, logger, message; and where they are known error, http_request_id, client_request_id, trace_id, and
    request_id (of the op, sample or future) with its run_id or sampling_session_id."""

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
    context = request_context.current()
    request_id = record.__dict__.get("request_id")  # whoever logs may say what it is about
    if context is not None:
        ids["http_request_id"] = context.http_id
        ids["client_request_id"] = context.client_id
        ids["trace_id"] = context.span.trace_id
        request_id = request_id or context.request_id
    if request_id is not None:
        ids["request_id"] = request_id
        owner = split_request_id(request_id)
        if owner is not None:
            ids["sampling_session_id" if ":sample:" in owner[0] else "run_id"] = owner[0]
    return ids


def configure_logging(level: str, form: str, handler: logging.Handler | None = None) -> None:
    """For the whole process, on stderr; a program that set up logging before keeps its own. ``form``: text or json.

    ``handler``: another place, where lines go in any case.
    """
    chosen = handler or logging.StreamHandler(sys.stderr)
    chosen.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[chosen], force=handler is not None)
