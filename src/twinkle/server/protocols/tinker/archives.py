"""Checkpoints as tar files, for SDKs that knew no other download: an address that is signed, and what it names."""

from email.utils import formatdate
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from twinkle.errors import NotFoundError
from twinkle.server import ids
from twinkle.server.http.requests import (
    PREFIX,
    gateway_of,
    iso_time,
    json_response,
    key_id_of,
    public_address,
    tenant_of,
)
from twinkle.server.ids import CheckpointPath
from twinkle.server.protocols.tinker.runs import path_of
from twinkle.server.services.checkpoints.access import expired, readable_checkpoint
from twinkle.server.state.files.export import TarStream

router = APIRouter(prefix=PREFIX)

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
