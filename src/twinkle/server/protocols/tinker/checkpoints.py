"""Checkpoints: expiry, publishing, copies, and downloads by signed address, which need no key.

Later SDKs fetch the single files of exported weights; SDKs that knew no other download fetch a tar file.
"""

from email.utils import formatdate
from functools import partial
from pathlib import Path

from fastapi import Response
from fastapi.responses import FileResponse, StreamingResponse

from twinkle.errors import NotFoundError
from twinkle.server import ids
from twinkle.server.gateway.identity import Use
from twinkle.server.gateway.weight_copies import copy_weights
from twinkle.server.http.owners import anybody
from twinkle.server.http.requests import PREFIX, iso_time, json_response, key_id_of, public_address
from twinkle.server.http.routes import Call, Routes, json_body, unread_body
from twinkle.server.ids import CheckpointPath
from twinkle.server.protocols.tinker.runs import path_of
from twinkle.server.services.checkpoints.access import expired
from twinkle.server.state.files.export import TarStream
from twinkle.server.state.files.file_checksums import CHECKSUMS
from twinkle.server.types import CheckpointRecord
from twinkle.server.wire.requests import CopyWeightsRequest, SetTtlRequest, check_access_token

routes = Routes(PREFIX)

_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
# Tinker's command line takes an archive without this file for one that was cut off.
_COMPLETE = "checkpoint_complete"


@routes.put(f"{_CHECKPOINT}/ttl", anybody, json_body(SetTtlRequest))
async def set_ttl(call: Call[SetTtlRequest], run_id: str, kind: str, name: str) -> Response:
    actions = call.gateway.checkpoint_actions
    await actions.set_ttl(path_of(run_id, kind, name), call.tenant_id, call.body.ttl_seconds)
    return json_response({})


@routes.post(f"{_CHECKPOINT}/publish", anybody, unread_body())
async def publish(call: Call[bytes], run_id: str, kind: str, name: str) -> Response:
    await call.gateway.checkpoint_actions.set_public(path_of(run_id, kind, name), call.tenant_id, True)
    return json_response({})


@routes.delete(f"{_CHECKPOINT}/publish", anybody)
async def unpublish(call: Call[bytes], run_id: str, kind: str, name: str) -> Response:
    await call.gateway.checkpoint_actions.set_public(path_of(run_id, kind, name), call.tenant_id, False)
    return json_response({})


@routes.post("/copy_weights", anybody, json_body(CopyWeightsRequest))
async def copy(call: Call[CopyWeightsRequest]) -> Response:
    headers = call.request.headers
    check_access_token(headers.get("x-tinker-weights-access-token"))
    path = await copy_weights(call.gateway, call.tenant_id, call.body, headers.get("x-idempotency-key"))
    return json_response({"tinker_path": str(path)})


# --- downloads --------------------------------------------------------------------------------------------------------


@routes.get(f"{_CHECKPOINT}/external_weights_urls", anybody)
async def external_weights_urls(call: Call[bytes], run_id: str, kind: str, name: str) -> Response:
    path = path_of(run_id, kind, name)
    record = await call.gateway.checkpoint(path, call.tenant_id)
    if record.kind != "external_weights":
        raise NotFoundError("checkpoint of kind external_weights", str(path))
    base, expires = await _signed_url(call, "external_weights", "downloads", path, record)
    urls = {file: f"{base}/{file}" for file in await _files(call, record, call.tenant_id)}
    return json_response({"urls": urls, "expires": iso_time(expires)})


@routes.get("/downloads/{token}/{file}", anybody, public=True)
async def download(call: Call[bytes], token: str, file: str) -> Response:
    """Send a file, whole or in ranges."""
    record = await _signed_checkpoint(call, "external_weights", token)
    if file not in await _files(call, record, record.tenant_id):
        raise NotFoundError("file", file)
    path = call.gateway.files.root / record.directory / file
    return FileResponse(path, media_type="application/octet-stream", filename=file)


@routes.get(f"{_CHECKPOINT}/archive", anybody)
async def archive_url(call: Call[bytes], run_id: str, kind: str, name: str) -> Response:
    """Answer with a redirect, which is what 0.16.1 reads; the body says the same to clients that do not follow it."""
    path = path_of(run_id, kind, name)
    record = await call.gateway.checkpoint(path, call.tenant_id)
    url, expires = await _signed_url(call, "archive", "archives", path, record)
    headers = {"Location": url, "Expires": formatdate(expires, usegmt=True)}
    return json_response({"url": url, "expires": iso_time(expires)}, 302, headers)


@routes.get("/archives/{token}", anybody, public=True)
async def archive(call: Call[bytes], token: str) -> Response:
    """Send all files of a checkpoint, at the top of one tar file."""
    record = await _signed_checkpoint(call, "archive", token)
    return await tar_response(call, record, record.tenant_id, root="", last=_COMPLETE)


async def tar_response(
    call: Call[bytes], record: CheckpointRecord, tenant_id: str, *, root: str, last: str | None = None
) -> Response:
    """Send the files of a checkpoint in a tar file, in threads of the tenant's share.

    ``root``: the directory inside of it; ``last``: an empty file at its end, by which a reader knows that all came.
    """
    threads = call.gateway.tenants.pools.downloads
    directory = call.gateway.files.root / record.directory
    tar = await threads.in_thread(tenant_id, partial(TarStream, directory, root, record.created_at, last))
    if tar.empty:  # it was deleted just now
        raise NotFoundError("checkpoint", str(CheckpointPath(record.run_id, record.kind, record.name)))
    file_name = f"{archive_title(record)}.tar"
    headers = {"Content-Length": str(tar.size), "Content-Disposition": f'attachment; filename="{file_name}"'}
    return StreamingResponse(tar.pieces(threads, tenant_id), headers=headers, media_type="application/x-tar")


def archive_title(record: CheckpointRecord) -> str:
    return f"{ids.directory_name(record.run_id)}-{record.kind}-{record.name}"


async def _signed_url(
    call: Call[bytes], use: Use, route: str, path: CheckpointPath, record: CheckpointRecord
) -> tuple[str, float]:
    """Return a checkpoint's address that needs no key, and when it expires. The audit log notes that it was given."""
    claims = {"path": str(path), "request_id": record.request_id}
    token, expires = call.gateway.signed_urls.sign(use, await key_id_of(call.request), claims)
    details = {"model_id": path.run_id, "tinker_path": str(path), "purpose": "download"}
    await call.gateway.store.audit.add(call.tenant_id, "checkpoint_read", details)
    return f"{public_address(call.request)}{PREFIX}/{route}/{token}", expires


async def _signed_checkpoint(call: Call[bytes], use: Use, token: str) -> CheckpointRecord:
    """Return what a signed address names. It is gone with the checkpoint, also if another one has its name by now."""
    claims = await call.gateway.signed_urls.read(use, token)
    path = CheckpointPath.parse(claims["path"])
    record = await call.gateway.store.checkpoints.get(path.run_id, path.kind, path.name)
    if record is None or record.request_id != claims["request_id"] or expired(record):
        raise NotFoundError("checkpoint", str(path))
    return record


async def _files(call: Call[bytes], record: CheckpointRecord, tenant_id: str) -> list[str]:
    """Return the names of a checkpoint's files, read in a thread of the tenant's share."""
    listed = partial(_file_names, call.gateway.files.root / record.directory)
    return await call.gateway.tenants.pools.downloads.in_thread(tenant_id, listed)


def _file_names(directory: Path) -> list[str]:
    """Return what clients see of a checkpoint, which has no directories inside; nothing if it was just deleted."""
    names = sorted(file.name for file in directory.iterdir()) if directory.is_dir() else []
    return [name for name in names if name != CHECKSUMS]
