"""Keys, and sessions: a client's sign of life, listings, searching, and what happened in one as a timeline."""

import time

from fastapi import APIRouter, Request, Response

from twinkle.errors import GoneError
from twinkle.server import ids
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.gateway.session_search import search_sessions, shown_metadata, shown_status
from twinkle.server.http.requests import PREFIX, gateway_of, iso_time, json_response, key_of, parsed, tenant_of
from twinkle.server.ids import directory_name
from twinkle.server.protocols.tinker.runs import Limit, Offset, Scope
from twinkle.server.state import Store
from twinkle.server.state.records.ops import OpTimes
from twinkle.server.types import RunRecord, SessionRecord
from twinkle.server.wire.requests import CreateSessionRequest, FinishSessionRequest, SessionHeartbeatRequest
from twinkle.server.wire.session_requests import AssignProjectRequest, SearchSessionsRequest

router = APIRouter(prefix=PREFIX)


@router.post("/create_session")
async def create_session(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    wanted = await parsed(CreateSessionRequest, request)
    now = time.time()
    session = SessionRecord(
        session_id=ids.new_session_id(),
        tenant_id=tenant_id,
        created_at=now,
        last_seen=now,
        sdk_version=wanted.sdk_version,
        display_name=wanted.display_name,
        project_id=wanted.project_id,
        tags=tuple(wanted.tags),
        user_metadata=wanted.user_metadata or {},
    )
    made = await gateway_of(request).create_session(session, request.headers.get("x-idempotency-key"))
    return json_response({"session_id": made.session_id, "type": "create_session"})


@router.post("/session_heartbeat")
async def heartbeat(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    beat = await parsed(SessionHeartbeatRequest, request)
    await sign_of_life(gateway_of(request), beat.session_id, tenant_id)
    return json_response({"type": "session_heartbeat"})


async def sign_of_life(gateway: Gateway, session_id: str, tenant_id: str) -> None:
    """Note that a session's client lives. Of one that is over the client hears that it is."""
    session = await gateway.heartbeat(session_id, tenant_id)
    if session.state != "active":
        raise GoneError(f"session {session.session_id} is {session.state}")


@router.post("/sessions/{session_id}/finish")
async def finish(request: Request, session_id: str) -> Response:
    tenant_id = await tenant_of(request)
    wanted = await parsed(FinishSessionRequest, request)
    await gateway_of(request).finish_session(session_id, tenant_id, wanted.reason.type, wanted.detail)
    return json_response({})


@router.get("/sessions/{session_id}")
async def session(request: Request, session_id: str, access_scope: Scope = "owned") -> Response:
    tenant_id = await tenant_of(request)
    gateway = gateway_of(request)
    record = await gateway.session(session_id, tenant_id)
    runs = await gateway.store.runs.of_session(session_id)
    samplers = await gateway.store.sampling_sessions.of_session(session_id)
    return json_response(
        {
            "training_run_ids": [run.run_id for run in runs],
            "sampler_ids": [sampler.sampling_session_id for sampler in samplers],
            "user_metadata": dict(record.user_metadata),
            "display_name": record.display_name,
        }
    )


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


_MICROSECONDS = 1e6


async def session_trace(store: Store, session: SessionRecord) -> dict[str, object]:
    """In the format of trace events: one process a run, one event an op, from its acceptance to its end."""
    events: list[dict[str, object]] = []
    for place, run in enumerate(await store.runs.of_session(session.session_id), start=1):
        events.append(_trace_process(place, run))
        events += [_trace_event(place, run, times) for times in await store.ops.times(run.run_id)]
    samplers = await store.sampling_sessions.of_session(session.session_id)
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {
            "session_id": session.session_id,
            "created_at": session.created_at,
            "state": session.state,
            "finish_reason": session.finish_reason,
            "sampling_sessions": [
                {"sampling_session_id": each.sampling_session_id, "created_at": each.created_at} for each in samplers
            ],
        },
    }


def trace_file_name(session: SessionRecord) -> str:
    return f"{directory_name(session.session_id)}.json"


def _trace_process(place: int, run: RunRecord) -> dict[str, object]:
    about = {"name": f"{run.run_id} ({run.base_model}, {run.state})"}
    return {"name": "process_name", "ph": "M", "pid": place, "args": about}


def _trace_event(place: int, run: RunRecord, times: OpTimes) -> dict[str, object]:
    """Complete ("X"), or begun ("B") as long as it has not ended."""
    about = {"request_id": f"{run.run_id}:{times.seq}", "seq_id": times.seq, "failed": times.failed}
    event: dict[str, object] = {
        "name": times.kind.value,
        "cat": "op",
        "pid": place,
        "tid": 0,
        "ts": times.accepted_at * _MICROSECONDS,
        "args": about,
    }
    if times.finished_at is None:
        return {**event, "ph": "B"}
    return {**event, "ph": "X", "dur": max(0.0, times.finished_at - times.accepted_at) * _MICROSECONDS}


@router.post("/auth/token")
async def token(request: Request) -> Response:
    return json_response({"jwt": await gateway_of(request).identity.issue_token(key_of(request))})


@router.get("/auth/apikey/me")
async def this_key(request: Request) -> Response:
    key = await gateway_of(request).identity.describe(key_of(request))
    owner = {"org_details": {"name": key.tenant_id}, "user_details": {"email": ""}}
    note = "auth.mode is open: any key is a tenant of its own" if key.key_id is None else key.key_id
    return json_response({"key_id": key.number, "name": key.name, "note": note, "details": owner})


@router.delete("/auth/apikey/me")
async def revoke_this_key(request: Request) -> Response:
    await gateway_of(request).identity.revoke(key_of(request))
    return json_response({})
