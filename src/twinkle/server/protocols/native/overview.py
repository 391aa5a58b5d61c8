"""What a tenant has: adapters and where they are, sessions, and checkpoints as files."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

from fastapi import Query, Response

from twinkle.server import ids
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.http.owners import anybody
from twinkle.server.http.requests import PREFIX, json_response, listing
from twinkle.server.http.routes import Call, Routes
from twinkle.server.protocols.native.requests import ANY_KEY
from twinkle.server.protocols.tinker.checkpoints import archive_title, tar_response
from twinkle.server.protocols.tinker.runs import Limit, Offset, path_of
from twinkle.server.services.training.adapters import AdapterStatus, Residency
from twinkle.server.types import RunRecord, SessionRecord

routes = Routes(f"{PREFIX}/twinkle", key_prefix=ANY_KEY)

Few = Annotated[int, Query(ge=1, le=100)]


@routes.get("/adapters", anybody)
async def adapters(call: Call[bytes], limit: Limit = 100, offset: Offset = 0) -> Response:
    """List the adapters of all runs, the one with the newest request first, and how long the queues are."""
    page = await call.gateway.store.runs.list(call.tenant_id, limit, offset)
    reports = await call.gateway.fleet.of_tenant(call.tenant_id)
    live: dict[str, AdapterStatus] = {}
    for report in reports.values():
        live |= report.adapters
    queues = {name: asdict(report.queue) for name, report in reports.items()}
    return json_response(
        {
            "adapters": [_adapter(run, live) for run in page.items],
            "queues": queues,
            "cursor": {"offset": offset, "limit": limit, "total_count": page.total},
        }
    )


def _adapter(run: RunRecord, live: Mapping[str, AdapterStatus]) -> dict[str, object]:
    status = live.get(run.run_id)
    # A live run that no service has: its base model is not served now.
    gone: Residency = "disk" if run.state == "live" else run.state
    return {
        "training_run_id": run.run_id,
        "session_id": run.session_id,
        "protocol": "twinkle" if ids.is_native_run(run.run_id) else "tinker",
        "base_model": run.base_model,
        "lora_rank": run.spec.rank,
        "where": gone if status is None else status.where,
        "queued_ops": 0 if status is None else status.queued_ops,
        "created_at": run.created_at,
        "last_request_at": run.last_request_at,
        "note": run.note,
        "user_metadata": dict(run.user_metadata),
    }


@routes.get("/sessions", anybody)
async def sessions(call: Call[bytes], limit: Few = 50, offset: Offset = 0) -> Response:
    """List sessions, newest first. Times are seconds since the epoch.

    The state ``silent`` is that of an active session which sent no heartbeat for a while and has not expired yet.
    """
    page = await call.gateway.store.sessions.list(call.tenant_id, limit, offset)
    found = [await _session(call.gateway, session) for session in page.items]
    return listing("sessions", found, offset, limit, page.total)


async def _session(gateway: Gateway, session: SessionRecord) -> dict[str, object]:
    samplers = await gateway.store.sampling_sessions.of_session(session.session_id)
    return {
        "session_id": session.session_id,
        "state": "silent" if gateway.silent_sessions.is_silent(session) else session.state,
        "created_at": session.created_at,
        "last_seen": gateway.last_seen(session),
        "sdk_version": session.sdk_version,
        "display_name": session.display_name,
        "project_id": session.project_id,
        "tags": list(session.tags),
        "training_run_ids": [run.run_id for run in await gateway.store.runs.of_session(session.session_id)],
        "sampler_ids": [sampler.sampling_session_id for sampler in samplers],
    }


@routes.get("/checkpoints/{run_id}/{kind}/{name}/archive", anybody)
async def archive(call: Call[bytes], run_id: str, kind: str, name: str) -> Response:
    """Send all files of a checkpoint as one tar file."""
    record = await call.gateway.checkpoint(path_of(run_id, kind, name), call.tenant_id)
    return await tar_response(call, record, call.tenant_id, root=archive_title(record))
