"""What a tenant has: adapters and where they are, sessions, and checkpoints as files."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from twinkle.server import ids
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.http.requests import PREFIX, gateway_of, json_response
from twinkle.server.ids import CheckpointPath
from twinkle.server.protocols.native.requests import native_tenant_of
from twinkle.server.protocols.tinker.runs import Limit, Offset
from twinkle.server.services.training.adapter_status import AdapterStatus, Whereabouts
from twinkle.server.state.files.tar_stream import TarStream
from twinkle.server.types import RunRecord, SessionRecord

router = APIRouter(prefix=f"{PREFIX}/twinkle")

Few = Annotated[int, Query(ge=1, le=100)]


@router.get("/adapters")
async def adapters(request: Request, limit: Limit = 100, offset: Offset = 0) -> Response:
    """Those of all runs, the one with the newest request first, and how long the queues are."""
    tenant_id = await native_tenant_of(request)
    gateway = gateway_of(request)
    page = await gateway.store.runs.list(tenant_id, limit, offset)
    reports = await gateway.fleet.of_tenant(tenant_id)
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
    gone: Whereabouts = "disk" if run.state == "live" else run.state
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


@router.get("/sessions")
async def sessions(request: Request, limit: Few = 50, offset: Offset = 0) -> Response:
    """List sessions, newest first. Times are seconds since the epoch.

    The state ``silent`` is that of an active session which sent no heartbeat for a while and has not expired yet.
    """
    tenant_id = await native_tenant_of(request)
    gateway = gateway_of(request)
    page = await gateway.store.sessions.list(tenant_id, limit, offset)
    return json_response(
        {
            "sessions": [await _session(gateway, session) for session in page.items],
            "cursor": {"offset": offset, "limit": limit, "total_count": page.total},
        }
    )


async def _session(gateway: Gateway, session: SessionRecord) -> dict[str, object]:
    samplers = await gateway.store.sampling_sessions.of_session(session.session_id)
    return {
        "session_id": session.session_id,
        "state": "silent" if gateway.is_silent(session) else session.state,
        "created_at": session.created_at,
        "last_seen": gateway.last_seen(session),
        "sdk_version": session.sdk_version,
        "display_name": session.display_name,
        "project_id": session.project_id,
        "tags": list(session.tags),
        "training_run_ids": [run.run_id for run in await gateway.store.runs.of_session(session.session_id)],
        "sampler_ids": [sampler.sampling_session_id for sampler in samplers],
    }


@router.get("/checkpoints/{run_id}/{kind}/{name}/archive")
async def archive(request: Request, run_id: str, kind: str, name: str) -> Response:
    """All files of a checkpoint as one tar file."""
    tenant_id = await native_tenant_of(request)
    gateway = gateway_of(request)
    path = CheckpointPath.of([run_id, kind, name], f"{run_id}/{kind}/{name}", "checkpoint")
    record = await gateway.checkpoint(path, tenant_id)
    title = f"{ids.directory_name(run_id)}-{kind}-{name}"
    threads = gateway.tenants.pools.downloads
    opened = partial(TarStream, gateway.files.root / record.directory, title, record.created_at)
    tar = await threads.in_thread(tenant_id, opened)
    headers = {"Content-Length": str(tar.size), "Content-Disposition": f'attachment; filename="{title}.tar"'}
    return StreamingResponse(tar.pieces(threads, tenant_id), headers=headers, media_type="application/x-tar")
