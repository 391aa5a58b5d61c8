"""Checkpoints: expiry, publishing, copies, and downloads by signed address, which need no key."""

import json
from email.utils import formatdate
from functools import partial
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, StreamingResponse

from twinkle.errors import NotFoundError
from twinkle.server import ids
from twinkle.server.gateway.weight_copies import copy_weights
from twinkle.server.http.requests import (
    PREFIX,
    gateway_of,
    iso_time,
    json_response,
    key_id_of,
    parsed,
    public_address,
    tenant_of,
)
from twinkle.server.ids import CheckpointPath
from twinkle.server.protocols.tinker.runs import path_of
from twinkle.server.protocols.tinker.sessions import session_trace, trace_file_name
from twinkle.server.services.checkpoints.access import expired, readable_checkpoint
from twinkle.server.state.files.file_checksums import CHECKSUMS
from twinkle.server.state.files.tar_stream import TarStream
from twinkle.server.wire.checkpoint_requests import CopyWeightsRequest, SetTtlRequest
from twinkle.server.wire.requests import check_access_token

router = APIRouter(prefix=PREFIX)

_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


@router.put(f"{_CHECKPOINT}/ttl")
async def set_ttl(request: Request, run_id: str, kind: str, name: str) -> Response:
    tenant_id = await tenant_of(request)
    wanted = await parsed(SetTtlRequest, request)
    actions = gateway_of(request).checkpoint_actions
    await actions.set_ttl(path_of(run_id, kind, name), tenant_id, wanted.ttl_seconds)
    return json_response({})


@router.post(f"{_CHECKPOINT}/publish")
async def publish(request: Request, run_id: str, kind: str, name: str) -> Response:
    tenant_id = await tenant_of(request)
    await gateway_of(request).checkpoint_actions.set_public(path_of(run_id, kind, name), tenant_id, True)
    return json_response({})


@router.delete(f"{_CHECKPOINT}/publish")
async def unpublish(request: Request, run_id: str, kind: str, name: str) -> Response:
    tenant_id = await tenant_of(request)
    await gateway_of(request).checkpoint_actions.set_public(path_of(run_id, kind, name), tenant_id, False)
    return json_response({})


@router.post("/copy_weights")
async def copy(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    wanted = await parsed(CopyWeightsRequest, request)
    check_access_token(request.headers.get("x-tinker-weights-access-token"))
    key = request.headers.get("x-idempotency-key")
    path = await copy_weights(gateway_of(request), tenant_id, wanted, key)
    return json_response({"tinker_path": str(path)})


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls")
async def external_weights_urls(request: Request, run_id: str, kind: str, name: str) -> Response:
    tenant_id = await tenant_of(request)
    gateway = gateway_of(request)
    path = path_of(run_id, kind, name)
    record = await readable_checkpoint(gateway.store, path, tenant_id)
    if record.kind != "external_weights":
        raise NotFoundError("checkpoint of kind external_weights", str(path))
    claims = {"path": str(path), "request_id": record.request_id}
    token, expires = gateway.signed_urls.sign("external_weights", await key_id_of(request), claims)
    listed = partial(_file_names, gateway.files.root / record.directory)
    names = await gateway.tenants.pools.downloads.in_thread(tenant_id, listed)
    details = {"model_id": run_id, "tinker_path": str(path), "purpose": "download"}
    await gateway.store.audit.add(tenant_id, "checkpoint_read", details)
    urls = {file: f"{public_address(request)}{PREFIX}/downloads/{token}/{file}" for file in names}
    return json_response({"urls": urls, "expires": iso_time(expires)})


@router.get("/downloads/{token}/{file}")
async def download(request: Request, token: str, file: str) -> Response:
    """Whole or in ranges. Gone with the checkpoint, also if another one has its name by now."""
    gateway = gateway_of(request)
    claims = await gateway.signed_urls.read("external_weights", token)
    path = CheckpointPath.parse(claims["path"])
    record = await gateway.store.checkpoints.get(path.run_id, path.kind, path.name)
    if record is None or record.request_id != claims["request_id"] or expired(record):
        raise NotFoundError("checkpoint", str(path))
    directory = gateway.files.root / record.directory
    listed = partial(_file_names, directory)
    if file not in await gateway.tenants.pools.downloads.in_thread(record.tenant_id, listed):
        raise NotFoundError("file", file)
    return FileResponse(directory / file, media_type="application/octet-stream", filename=file)


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(request: Request, session_id: str) -> Response:
    """Ready at once: what there is to tell is put together when it is fetched."""
    tenant_id = await tenant_of(request)
    gateway = gateway_of(request)
    session = await gateway.session(session_id, tenant_id)
    token, _ = gateway.signed_urls.sign("trace", await key_id_of(request), {"session_id": session.session_id})
    return json_response({"status": "ready", "url": f"{public_address(request)}{PREFIX}/traces/{token}"})


@router.get("/traces/{token}")
async def trace(request: Request, token: str) -> Response:
    gateway = gateway_of(request)
    session_id = (await gateway.signed_urls.read("trace", token))["session_id"]
    session = await gateway.store.sessions.get(session_id)
    if session is None:
        raise NotFoundError("session", session_id)
    content = await session_trace(gateway.store, session)
    body = await gateway.reading.in_thread(session.tenant_id, partial(json.dumps, content))
    headers = {"Content-Disposition": f'attachment; filename="{trace_file_name(session)}"'}
    return Response(body, headers=headers, media_type="application/json")


def _file_names(directory: Path) -> list[str]:
    """Return what clients see of a checkpoint, which has no directories inside; nothing if it was just deleted."""
    names = sorted(file.name for file in directory.iterdir()) if directory.is_dir() else []
    return [name for name in names if name != CHECKSUMS]


# Tinker's command line takes an archive without this file for one that was cut off.
_COMPLETE = "checkpoint_complete"


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/archive")
async def archive_url(request: Request, run_id: str, kind: str, name: str) -> Response:
    """A redirect, which is what 0.16.1 reads; the body says the same to whoever does not follow."""
    tenant_id = await tenant_of(request)
    gateway = gateway_of(request)
    path = path_of(run_id, kind, name)
    record = await readable_checkpoint(gateway.store, path, tenant_id)
    claims = {"path": str(path), "request_id": record.request_id}
    token, expires = gateway.signed_urls.sign("archive", await key_id_of(request), claims)
    details = {"model_id": run_id, "tinker_path": str(path), "purpose": "download"}
    await gateway.store.audit.add(tenant_id, "checkpoint_read", details)
    url = f"{public_address(request)}{PREFIX}/archives/{token}"
    headers = {"Location": url, "Expires": formatdate(expires, usegmt=True)}
    return json_response({"url": url, "expires": iso_time(expires)}, 302, headers)


@router.get("/archives/{token}")
async def archive(request: Request, token: str) -> Response:
    """All files of a checkpoint at the top of one tar file. Gone with the checkpoint, as single files are."""
    gateway = gateway_of(request)
    claims = await gateway.signed_urls.read("archive", token)
    path = CheckpointPath.parse(claims["path"])
    record = await gateway.store.checkpoints.get(path.run_id, path.kind, path.name)
    if record is None or record.request_id != claims["request_id"] or expired(record):
        raise NotFoundError("checkpoint", str(path))
    directory = gateway.files.root / record.directory
    threads = gateway.tenants.pools.downloads
    opened = partial(TarStream, directory, "", record.created_at, _COMPLETE)
    tar = await threads.in_thread(record.tenant_id, opened)
    if tar.empty:  # it was deleted just now
        raise NotFoundError("checkpoint", str(path))
    title = f"{ids.directory_name(path.run_id)}-{path.kind}-{path.name}"
    headers = {"Content-Length": str(tar.size), "Content-Disposition": f'attachment; filename="{title}.tar"'}
    return StreamingResponse(tar.pieces(threads, record.tenant_id), headers=headers, media_type="application/x-tar")
