"""What a tenant did and used: its audit log, and its usage where Tinker's SDK and command line ask for it."""

from datetime import UTC, date, datetime, timedelta
from typing import Literal

from fastapi import APIRouter, Request, Response

from twinkle.errors import InvalidInputError
from twinkle.server.http.requests import PREFIX, gateway_of, iso_time, json_response, tenant_of
from twinkle.server.state import AuditEntry, DailyUsage

router = APIRouter(prefix=PREFIX)

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]
# Which events are meant. There are no teams here, and a tenant is its own organization, to which its keys belong.
_BEGINNINGS: dict[EventType, tuple[str, ...]] = {
    "all": ("",),
    "checkpoints": ("checkpoint_",),
    "projects": ("project_",),
    "teams": (),
    "organizations": ("key_",),
}
_MOST = 10_000
_END_OF_TIME = 1e18  # seconds


@router.get("/audit")
async def audit(request: Request, event_type: EventType = "all", day: date | None = None) -> Response:
    """Oldest first, at most the newest ten thousand; ``day`` is one of UTC."""
    tenant_id = await tenant_of(request)
    since, until = 0.0, _END_OF_TIME
    if day is not None:
        midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
        since, until = midnight.timestamp(), midnight.timestamp() + timedelta(days=1).total_seconds()
    entries = await gateway_of(request).store.audit.list(tenant_id, since, until, _MOST)
    chosen = [_entry(entry) for entry in entries if entry.event.startswith(_BEGINNINGS[event_type])]
    return json_response({"entries": chosen})


def _entry(entry: AuditEntry) -> dict[str, object]:
    """Three of the details stand beside them, too, where clients used to look."""
    beside = {name: entry.details[name] for name in ("model_id", "tinker_path", "purpose") if name in entry.details}
    return {
        "timestamp": iso_time(entry.at),
        "event": entry.event,
        "event_details": dict(entry.details),
        **beside,
    }


billing_router = APIRouter(prefix=f"{PREFIX}/billing/usage")

_DAY = timedelta(days=1)
_GIGABYTE = 10**9
_LONGEST = timedelta(days=366)


@billing_router.get("/events")
async def events(request: Request, starting_on: str = "", ending_before: str = "") -> Response:
    """By day: we know no hours. A day that is partly within the window is there as a whole."""
    tenant_id = await tenant_of(request)
    start, end = _moment("starting_on", starting_on), _moment("ending_before", ending_before)
    if not start < end <= start + _LONGEST:
        raise InvalidInputError("ending_before", ending_before, f"after {starting_on}, by {_LONGEST.days} days at most")
    gateway = gateway_of(request)
    await gateway.books.flush_usage()
    until = end if end == _midnight(end) else _midnight(end) + _DAY
    days = await gateway.store.usage.list(_midnight(start).date().isoformat(), until.date().isoformat(), tenant_id)
    now = datetime.now(UTC)
    return json_response({"data": [event for day in days for event in _events(day, now)], "sessions": {}})


@billing_router.get("/checkpoints/current")
async def checkpoints(request: Request, project_id: str | None = None) -> Response:
    tenant_id = await tenant_of(request)
    stored = await gateway_of(request).store.usage.stored_by_project(tenant_id)
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
