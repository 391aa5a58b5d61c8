"""Sessions: a client's sign of life."""

import time

from fastapi import APIRouter, Request, Response

from twinkle.errors import GoneError
from twinkle.server import ids
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.http.requests import PREFIX, gateway_of, json_response, parsed, tenant_of
from twinkle.server.protocols.tinker.runs import Scope
from twinkle.server.types import SessionRecord
from twinkle.server.wire.requests import CreateSessionRequest, FinishSessionRequest, SessionHeartbeatRequest

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
