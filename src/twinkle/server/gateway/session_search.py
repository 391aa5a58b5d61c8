"""Search among a tenant's own sessions."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twinkle.errors import InvalidInputError
from twinkle.server.state.store import Store
from twinkle.server.types import SessionRecord
from twinkle.server.wire.requests import SearchCursor, SearchSessionsRequest, Status

IsSilent = Callable[[SessionRecord], bool]

_AT_ONCE = 500  # records that one read of the database fetches


@dataclass(frozen=True)
class Found:
    """One page of results, newest first. ``more``: whether there are further results after it."""

    sessions: Sequence[SessionRecord]
    more: bool


async def search_sessions(store: Store, tenant_id: str, wanted: SearchSessionsRequest, is_silent: IsSilent) -> Found:
    """Return a page of the tenant's sessions that match a search.

    ``is_silent``: returns whether an active session has sent no heartbeat for a while; a search for active sessions
    does not find such sessions.
    """
    last = None if wanted.cursor is None else await _last_of_page(store, tenant_id, wanted.cursor)
    if not _is_about(wanted, tenant_id):
        return Found((), False)
    found: list[SessionRecord] = []
    while True:
        page = await store.sessions.after(tenant_id, last, _AT_ONCE)
        found += [session for session in page if _matches(session, wanted, is_silent)]
        if len(found) > wanted.limit or len(page) < _AT_ONCE:
            break
        last = page[-1]
    return Found(found[: wanted.limit], len(found) > wanted.limit)


async def _last_of_page(store: Store, tenant_id: str, cursor: SearchCursor) -> SessionRecord:
    """Return the last session of the page before, which the cursor names.

    It is found by its id. The cursor's time is rounded, so it is compared with a tolerance of a millisecond.
    """
    record = await store.sessions.get(cursor.last_session_id)
    if (
        record is None
        or record.tenant_id != tenant_id
        or abs(record.created_at - cursor.last_created_at.timestamp()) > 0.001
    ):
        raise InvalidInputError("cursor", cursor.last_session_id, "next_cursor of the page before, unchanged")
    return record


def _is_about(wanted: SearchSessionsRequest, tenant_id: str) -> bool:
    """Return whether the search includes the tenant's own sessions. A tenant can see no others."""
    if wanted.owner.type != "user":
        return True
    if not wanted.owner.owner_urns:
        raise InvalidInputError("owner.owner_urns", wanted.owner.owner_urns, "1 to 10 owners")
    return tenant_id in wanted.owner.owner_urns


def _matches(session: SessionRecord, wanted: SearchSessionsRequest, is_silent: IsSilent) -> bool:
    return (
        _is_named(session, wanted)
        and (wanted.project_ids is None or session.project_id in wanted.project_ids)
        and wanted.user_metadata.items() <= shown_metadata(session).items()
        and (wanted.statuses is None or any(_has_status(session, status, is_silent) for status in wanted.statuses))
    )


def _is_named(session: SessionRecord, wanted: SearchSessionsRequest) -> bool:
    """Return whether a session has the wanted id, or all wanted words in its name. No criterion: every session."""
    if wanted.session_id is None and wanted.display_name is None:
        return True
    words = () if wanted.display_name is None else wanted.display_name.casefold().split()
    name = (session.display_name or "").casefold()
    return session.session_id == wanted.session_id or (bool(words) and all(word in name for word in words))


def _has_status(session: SessionRecord, status: Status, is_silent: IsSilent) -> bool:
    """Return whether a session has a status. No session has "cancelled" or "failed": this server never sets them."""
    if status.type == "active":
        return session.state == "active" and not is_silent(session)
    if status.type == "client_finished" and session.state == "finished":
        return status.reasons is None or session.finish_reason in status.reasons
    return False


def shown_status(session: SessionRecord, is_silent: IsSilent) -> dict[str, object] | None:
    """Return the status as clients expect it; None for a silent or expired session: the protocol has none for it."""
    if session.state == "active":
        return None if is_silent(session) else {"type": "active"}
    if session.state == "finished":
        reason = {"type": session.finish_reason or "success"}  # sessions of earlier versions have no reason on record
        return {"type": "client_finished", "reason": reason, "detail": session.finish_detail}
    return None


def shown_metadata(session: SessionRecord) -> dict[str, str]:
    """Return a session's metadata as clients expect it: values that are not text are written as JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in session.user_metadata.items()}
