"""Sessions: listing, searching, and which project one belongs to."""

import time

from fastapi import APIRouter, Request, Response

from twinkle.server.gateway.gateway import Gateway
from twinkle.server.gateway.session_search import search_sessions, shown_metadata, shown_status
from twinkle.server.http.requests import PREFIX, gateway_of, iso_time, json_response, parsed, tenant_of
from twinkle.server.protocols.tinker.runs import Limit, Offset, Scope
from twinkle.server.types import SessionRecord
from twinkle.server.wire.session_requests import AssignProjectRequest, SearchSessionsRequest

router = APIRouter(prefix=PREFIX)


@router.get("/sessions")
async def sessions(request: Request, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned") -> Response:
    tenant_id = await tenant_of(request)
    page = await gateway_of(request).store.sessions.list(tenant_id, limit, offset)
    return json_response(
        {
            "sessions": [session.session_id for session in page.items],
            "cursor": {"offset": offset, "limit": limit, "total_count": page.total},
        }
    )


@router.post("/sessions/search")
async def search(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    wanted = await parsed(SearchSessionsRequest, request)
    gateway = gateway_of(request)
    found = await search_sessions(gateway.store, tenant_id, wanted, gateway.is_silent)
    content: dict[str, object] = {"sessions": [await _summary(gateway, session) for session in found.sessions]}
    if found.more:
        last = found.sessions[-1]
        content["next_cursor"] = {"last_created_at": iso_time(last.created_at), "last_session_id": last.session_id}
    return json_response(content)


@router.put("/sessions/{session_id}/project")
async def assign_project(request: Request, session_id: str) -> Response:
    """Also of a session that is over: projects are labels to find things by."""
    tenant_id = await tenant_of(request)
    gateway = gateway_of(request)
    session = await gateway.session(session_id, tenant_id)
    wanted = await parsed(AssignProjectRequest, request)
    await gateway.store.sessions.set_project(session, wanted.project_id, time.time())
    return json_response({})


async def _summary(gateway: Gateway, session: SessionRecord) -> dict[str, object]:
    count, size = await gateway.store.checkpoints.of_session(session.session_id)
    return {
        "session_id": session.session_id,
        "created_at": iso_time(session.created_at),
        "owner": session.tenant_id,
        "project_id": session.project_id or "",
        "status": shown_status(session, gateway.is_silent),
        "checkpoints_count": count,
        "checkpoint_storage_bytes": size,
        "display_name": session.display_name,
        "user_metadata": shown_metadata(session),
    }
