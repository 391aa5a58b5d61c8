"""Routes for API keys and for sessions: heartbeats, listing, searching, and a session's ops as a timeline."""

import json
import time
from functools import partial

from fastapi import Response

from twinkle.errors import NotFoundError
from twinkle.server import ids
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.gateway.session_search import search_sessions, shown_metadata, shown_status
from twinkle.server.http.owners import anybody
from twinkle.server.http.requests import PREFIX, iso_time, json_response, key_id_of, key_of, listing, public_address
from twinkle.server.http.routes import Call, Routes, json_body, raw_body, unread_body
from twinkle.server.protocols.tinker.runs import Limit, Offset, Scope
from twinkle.server.state.records.ops import OpTimes
from twinkle.server.state.store import Store
from twinkle.server.types import RunRecord, SessionRecord
from twinkle.server.wire import fields, requests

routes = Routes(PREFIX)

_MICROSECONDS = 1e6


@routes.post("/create_session", anybody, json_body(requests.CreateSessionRequest))
async def create_session(call: Call[requests.CreateSessionRequest]) -> Response:
    wanted, now = call.body, time.time()
    session = SessionRecord(
        session_id=ids.new_session_id(),
        tenant_id=call.tenant_id,
        created_at=now,
        last_seen=now,
        sdk_version=wanted.sdk_version,
        display_name=wanted.display_name,
        project_id=wanted.project_id,
        tags=tuple(wanted.tags),
        user_metadata=wanted.user_metadata or {},
    )
    made = await call.gateway.create_session(session, call.request.headers.get("x-idempotency-key"))
    return json_response({"session_id": made.session_id, "type": "create_session"})


@routes.post("/session_heartbeat", anybody, json_body(requests.SessionHeartbeatRequest), traced=False)
async def heartbeat(call: Call[requests.SessionHeartbeatRequest]) -> Response:
    await call.gateway.heartbeat(call.body.session_id, call.tenant_id)
    return json_response({"type": "session_heartbeat"})


@routes.post("/sessions/search", anybody, json_body(requests.SearchSessionsRequest))
async def search(call: Call[requests.SearchSessionsRequest]) -> Response:
    gateway = call.gateway
    found = await search_sessions(gateway.store, call.tenant_id, call.body, gateway.silent_sessions.is_silent)
    content: dict[str, object] = {"sessions": [await _summary(gateway, session) for session in found.sessions]}
    if found.more:
        last = found.sessions[-1]
        content["next_cursor"] = {"last_created_at": iso_time(last.created_at), "last_session_id": last.session_id}
    return json_response(content)


@routes.post("/sessions/{session_id}/finish", anybody, json_body(requests.FinishSessionRequest))
async def finish(call: Call[requests.FinishSessionRequest], session_id: str) -> Response:
    wanted = call.body
    await call.gateway.finish_session(session_id, call.tenant_id, wanted.reason.type, wanted.detail)
    return json_response({})


@routes.get("/sessions/{session_id}", anybody)
async def session(call: Call[bytes], session_id: str, access_scope: Scope = "owned") -> Response:
    record = await call.gateway.session(session_id, call.tenant_id)
    runs = await call.gateway.store.runs.of_session(session_id)
    samplers = await call.gateway.store.sampling_sessions.of_session(session_id)
    return json_response(
        {
            "training_run_ids": [run.run_id for run in runs],
            "sampler_ids": [sampler.sampling_session_id for sampler in samplers],
            "user_metadata": shown_metadata(record),
            "display_name": record.display_name,
        }
    )


@routes.get("/sessions", anybody)
async def sessions(call: Call[bytes], limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned") -> Response:
    page = await call.gateway.store.sessions.list(call.tenant_id, limit, offset)
    return listing("sessions", [session.session_id for session in page.items], offset, limit, page.total)


@routes.put("/sessions/{session_id}/project", anybody, raw_body(requests.AssignProjectRequest))
async def assign_project(call: Call[bytes], session_id: str) -> Response:
    """Assign a session to a project, even if it has ended. A project is a label for searching."""
    session = await call.gateway.session(session_id, call.tenant_id)
    # Parsed only now, so that another tenant's session is answered as unknown, even if the body is wrong, too.
    wanted = fields.parse(requests.AssignProjectRequest, call.raw)
    await call.gateway.store.sessions.set_project(session, wanted.project_id, time.time())
    return json_response({})


async def _summary(gateway: Gateway, session: SessionRecord) -> dict[str, object]:
    count, size = await gateway.store.checkpoints.of_session(session.session_id)
    return {
        "session_id": session.session_id,
        "created_at": iso_time(session.created_at),
        "owner": session.tenant_id,
        "project_id": session.project_id or "",
        "status": shown_status(session, gateway.silent_sessions.is_silent),
        "checkpoints_count": count,
        "checkpoint_storage_bytes": size,
        "display_name": session.display_name,
        "user_metadata": shown_metadata(session),
    }


# --- a session as a timeline ------------------------------------------------------------------------------------------


@routes.get("/sessions/{session_id}/trace_export", anybody)
async def trace_export(call: Call[bytes], session_id: str) -> Response:
    """Return the URL of the timeline. It is always ready, because it is assembled when it is fetched."""
    session = await call.gateway.session(session_id, call.tenant_id)
    claims = {"session_id": session.session_id}
    token, _ = call.gateway.signed_urls.sign("trace", await key_id_of(call.request), claims)
    return json_response({"status": "ready", "url": f"{public_address(call.request)}{PREFIX}/traces/{token}"})


@routes.get("/traces/{token}", anybody, public=True)
async def trace(call: Call[bytes], token: str) -> Response:
    session_id = (await call.gateway.signed_urls.read("trace", token))["session_id"]
    session = await call.gateway.store.sessions.get(session_id)
    if session is None:
        raise NotFoundError("session", session_id)
    content = await _timeline(call.gateway.store, session)
    body = await call.gateway.reading.in_thread(session.tenant_id, partial(json.dumps, content))
    headers = {"Content-Disposition": f'attachment; filename="{ids.directory_name(session.session_id)}.json"'}
    return Response(body, headers=headers, media_type="application/json")


async def _timeline(store: Store, session: SessionRecord) -> dict[str, object]:
    """Return trace events for Perfetto or chrome://tracing: one process for each run, one event for each op.

    They have the times and kinds of the ops that are still in the database, and never the ops' contents.
    """
    events: list[dict[str, object]] = []
    for place, run in enumerate(await store.runs.of_session(session.session_id), start=1):
        about = {"name": f"{run.run_id} ({run.base_model}, {run.state})"}
        events.append({"name": "process_name", "ph": "M", "pid": place, "args": about})
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


def _trace_event(place: int, run: RunRecord, times: OpTimes) -> dict[str, object]:
    """Return the event of one op: complete ("X"), from acceptance to end, or begun ("B") if it has not ended."""
    about = {"request_id": str(ids.RequestId(run.run_id, times.seq)), "seq_id": times.seq, "failed": times.failed}
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


# --- keys: describing one, revoking it, and exchanging it for a short-lived token -------------------------------------


@routes.post("/auth/token", anybody, unread_body(), public=True)
async def token(call: Call[bytes]) -> Response:
    return json_response({"jwt": await call.gateway.identity.issue_token(key_of(call.request))})


@routes.get("/auth/apikey/me", anybody, public=True)
async def this_key(call: Call[bytes]) -> Response:
    key = await call.gateway.identity.describe(key_of(call.request))
    tenant_name = await call.gateway.store.tenants.name_of(key.tenant_id)
    owner = {"org_details": {"name": tenant_name or key.tenant_id}, "user_details": {"email": ""}}
    note = "auth.mode is open: any key is a tenant of its own" if key.key_id is None else key.key_id
    return json_response({"key_id": key.number, "name": key.name, "note": note, "details": owner})


@routes.delete("/auth/apikey/me", anybody, public=True)
async def revoke_this_key(call: Call[bytes]) -> Response:
    await call.gateway.identity.revoke(key_of(call.request))
    return json_response({})
