"""A tenant's audit log and usage, on the routes of Tinker's SDK and command line."""

from datetime import UTC, date, datetime, timedelta
from typing import Literal

from fastapi import Response

from twinkle.errors import InvalidInputError
from twinkle.server.http.owners import anybody
from twinkle.server.http.requests import PREFIX, iso_time, json_response
from twinkle.server.http.routes import Call, Routes
from twinkle.server.state.records.audit import AuditEntry
from twinkle.server.state.records.usage import DailyUsage

routes = Routes(PREFIX)

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]
# How the names of events of each type begin. There are no teams here. A tenant is its own organization, to which its
# keys belong.
_BEGINNINGS: dict[EventType, tuple[str, ...]] = {
    "all": ("",),
    "checkpoints": ("checkpoint_",),
    "projects": ("project_",),
    "teams": (),
    "organizations": ("key_",),
}
_MOST = 10_000
_END_OF_TIME = 1e18  # seconds
_DAY = timedelta(days=1)
_GIGABYTE = 10**9
_LONGEST = timedelta(days=366)


@routes.get("/audit", anybody)
async def audit(call: Call[bytes], event_type: EventType = "all", day: date | None = None) -> Response:
    """List events of a type, oldest first. ``day``: only events of this day in UTC.

    Of the tenant's events in that time only the newest ten thousand, of any type, are looked at.
    """
    since, until = 0.0, _END_OF_TIME
    if day is not None:
        midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
        since, until = midnight.timestamp(), midnight.timestamp() + timedelta(days=1).total_seconds()
    entries = await call.gateway.store.audit.list(call.tenant_id, since, until, _MOST)
    chosen = [_entry(entry) for entry in entries if entry.event.startswith(_BEGINNINGS[event_type])]
    return json_response({"entries": chosen})


def _entry(entry: AuditEntry) -> dict[str, object]:
    """Return an event as JSON. Three of its details are also at the top level, where older clients look for them."""
    beside = {name: entry.details[name] for name in ("model_id", "tinker_path", "purpose") if name in entry.details}
    return {
        "timestamp": iso_time(entry.at),
        "event": entry.event,
        "event_details": dict(entry.details),
        **beside,
    }


# --- usage by day, without prices -------------------------------------------------------------------------------------


@routes.get("/billing/usage/events", anybody)
async def events(call: Call[bytes], starting_on: str = "", ending_before: str = "") -> Response:
    """List usage by day; hours are not recorded. A day that lies partly between the two times is listed as a whole."""
    start, end = _moment("starting_on", starting_on), _moment("ending_before", ending_before)
    if not start < end <= start + _LONGEST:
        raise InvalidInputError("ending_before", ending_before, f"after {starting_on}, by {_LONGEST.days} days at most")
    await call.gateway.usage_recorder.flush_usage()
    until = end if end == _midnight(end) else _midnight(end) + _DAY
    first, last = _midnight(start).date().isoformat(), until.date().isoformat()
    days = await call.gateway.store.usage.list(first, last, call.tenant_id)
    now = datetime.now(UTC)
    return json_response({"data": [event for day in days for event in _events(day, now)], "sessions": {}})


@routes.get("/billing/usage/checkpoints/current", anybody)
async def checkpoints(call: Call[bytes], project_id: str | None = None) -> Response:
    stored = await call.gateway.store.usage.stored_by_project(call.tenant_id)
    data = [
        {
            "project_id": each.project_id,
            "checkpoint_count": each.checkpoints,
            "size_bytes": each.size_bytes,
            "size_gigabytes": each.size_bytes / _GIGABYTE,
        }
        for each in stored
        if project_id in (None, each.project_id)
    ]
    return json_response({"data": data})


def _events(day: DailyUsage, now: datetime) -> list[dict[str, object]]:
    start = datetime.fromisoformat(day.day).replace(tzinfo=UTC)
    hours = min(max((now - start) / timedelta(hours=1), 0.0), 24.0)
    kinds: list[dict[str, object]] = []
    if day.counts.trained_tokens:
        kinds.append({"type": "training", "token_count": day.counts.trained_tokens})
    if day.counts.prompt_tokens:
        kinds.append({"type": "sampling_prefill", "cached": False, "token_count": day.counts.prompt_tokens})
    if day.counts.sampled_tokens:
        kinds.append({"type": "sampling_sample", "token_count": day.counts.sampled_tokens})
    if day.storage_bytes:
        kinds.append({"type": "storage", "gigabyte_hours": day.storage_bytes / _GIGABYTE * hours})
    bucket = {"bucket_start": start.isoformat(), "bucket_end": (start + _DAY).isoformat(), "user_id": day.tenant_id}
    return [{**bucket, "event_info": kind} for kind in kinds]


def _moment(field: str, text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidInputError(field, text, "a time such as 2026-07-13T00:00:00Z") from None


def _midnight(moment: datetime) -> datetime:
    return moment.replace(hour=0, minute=0, second=0, microsecond=0)
