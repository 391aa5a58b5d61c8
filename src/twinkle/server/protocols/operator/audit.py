"""The audit log of the tenant who asks."""

from datetime import UTC, date, datetime, timedelta
from typing import Literal

from fastapi import APIRouter, Request, Response

from twinkle.server.http.requests import PREFIX, gateway_of, iso_time, json_response, tenant_of
from twinkle.server.state import AuditEntry

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
