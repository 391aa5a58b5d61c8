"""Training runs and checkpoints: listing, deleting, expiry, publishing, copying; and downloads, which need no key.

Downloads use signed addresses. Newer SDKs fetch the single files of exported weights; older SDKs fetch a tar file.
"""

import re
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from fastapi import Query, Response
from fastapi.responses import FileResponse, StreamingResponse

from twinkle.errors import InvalidInputError, NotFoundError
from twinkle.server import ids
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.gateway.identity import Use
from twinkle.server.gateway.weight_copies import copy_weights
from twinkle.server.http.owners import anybody
from twinkle.server.http.requests import PREFIX, iso_time, json_response, key_id_of, listing, public_address
from twinkle.server.http.routes import Call, Routes, json_body, unread_body
from twinkle.server.ids import CheckpointPath
from twinkle.server.services.checkpoints.access import LISTED_KINDS, expired
from twinkle.server.services.checkpoints.export import conversion_bytes, converted_tar
from twinkle.server.state.files.export import TarStream
from twinkle.server.state.files.file_checksums import CHECKSUMS
from twinkle.server.types import CheckpointKind, CheckpointRecord, RunRecord
from twinkle.server.wire.requests import CopyWeightsRequest, SetTtlRequest, check_access_token

routes = Routes(PREFIX)

_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
_WITHOUT_KIND = "/training_runs/{run_id}/checkpoints/{checkpoint_id}"
# Tinker's command line treats an archive without this file as cut off.
_COMPLETE = "checkpoint_complete"
# The header in which the SDK sends its version, and the first version that knows exported checkpoints.
_SDK_VERSION = "x-stainless-package-version"
_VERSION = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")
_KNOWS_EXTERNAL = (0, 28)
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, lt=2**63)]
# Both scopes list the tenant's own objects. Tenants share nothing but public checkpoints, which are not listed.
Scope = Literal["owned", "accessible"]


@routes.get("/training_runs", anybody)
async def training_runs(
    call: Call[bytes],
    limit: Limit = 20,
    offset: Offset = 0,
    project_id: str | None = None,
    access_scope: Scope = "owned",
) -> Response:
    page = await call.gateway.store.runs.list(call.tenant_id, limit, offset, project_id)
    found = [await _training_run(call.gateway, run) for run in page.items]
    return listing("training_runs", found, offset, limit, page.total)


@routes.get("/training_runs/{run_id}", anybody)
async def training_run(call: Call[bytes], run_id: str, access_scope: Scope = "owned") -> Response:
    return json_response(await _training_run(call.gateway, await call.gateway.run_record(run_id, call.tenant_id)))


@routes.get("/training_runs/{run_id}/checkpoints", anybody)
async def checkpoints_of_run(call: Call[bytes], run_id: str) -> Response:
    await call.gateway.run_record(run_id, call.tenant_id)
    left_out = _unknown_kind(call)
    records = await call.gateway.store.checkpoints.of_run(run_id)
    return json_response({"checkpoints": [checkpoint_body(record) for record in records if record.kind != left_out]})


@routes.get("/checkpoints", anybody)
async def checkpoints(call: Call[bytes], limit: Limit = 100, offset: Offset = 0) -> Response:
    page = await call.gateway.store.checkpoints.list(call.tenant_id, limit, offset, _unknown_kind(call))
    return listing("checkpoints", [checkpoint_body(record) for record in page.items], offset, limit, page.total)


def _unknown_kind(call: Call[bytes]) -> CheckpointKind | None:
    """Return the kind of checkpoints that the caller cannot read: SDKs before 0.28 fail on a list with an exported one.

    None for newer SDKs and for clients that do not send the SDK's version.
    """
    found = _VERSION.match(call.request.headers.get(_SDK_VERSION, ""))
    old = found is not None and (int(found[1]), int(found[2])) < _KNOWS_EXTERNAL
    return "external_weights" if old else None


def path_of(run_id: str, kind: str, name: str) -> CheckpointPath:
    return CheckpointPath.from_segments([run_id, kind, name], f"{run_id}/{kind}/{name}", "checkpoint")


async def _training_run(gateway: Gateway, run: RunRecord) -> dict[str, object]:
    last = await gateway.store.checkpoints.latest(run.run_id)
    return {
        **run_body(run),
        "last_checkpoint": checkpoint_body(last["weights"]) if "weights" in last else None,
        "last_sampler_checkpoint": checkpoint_body(last["sampler_weights"]) if "sampler_weights" in last else None,
    }


def run_body(run: RunRecord) -> dict[str, object]:
    """Return the fields of a run that all protocols list."""
    return {
        "training_run_id": run.run_id,
        "base_model": run.base_model,
        "model_owner": run.tenant_id,
        "is_lora": run.lora is not None,
        "lora_rank": None if run.lora is None else run.lora.rank,
        "corrupted": run.state == "failed",
        "last_request_time": iso_time(run.last_request_at),
        "user_metadata": dict(run.user_metadata),
    }


def checkpoint_body(record: CheckpointRecord) -> dict[str, object]:
    """Return the fields of a checkpoint that all protocols list."""
    path = CheckpointPath(record.run_id, record.kind, record.name)
    return {
        "checkpoint_id": path.checkpoint_id,
        "checkpoint_type": LISTED_KINDS[record.kind],
        "time": iso_time(record.created_at),
        "tinker_path": str(path),
        "size_bytes": record.size_bytes,
        "public": record.public,
        "user_metadata": dict(record.user_metadata),
        "expires_at": None if record.expires_at is None else iso_time(record.expires_at),
    }


# --- one checkpoint ---------------------------------------------------------------------------------------------------


@routes.delete(_CHECKPOINT, anybody)
async def delete_checkpoint(call: Call[bytes], run_id: str, kind: str, name: str) -> Response:
    await call.gateway.checkpoint_actions.delete(path_of(run_id, kind, name), call.tenant_id)
    return json_response({})


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


@routes.delete(_WITHOUT_KIND, anybody)
@routes.put(f"{_WITHOUT_KIND}/ttl", anybody, unread_body())
@routes.post(f"{_WITHOUT_KIND}/publish", anybody, unread_body())
@routes.get(f"{_WITHOUT_KIND}/external_weights_urls", anybody)
@routes.get(f"{_WITHOUT_KIND}/archive", anybody)
async def without_kind(call: Call[bytes], run_id: str, checkpoint_id: str) -> Response:
    """Refuse a checkpoint id that is only a name. Without these routes the answer would be 404 or 405."""
    await call.gateway.run_record(run_id, call.tenant_id)
    raise InvalidInputError("checkpoint_id", checkpoint_id, f"<{'|'.join(LISTED_KINDS)}>/<name>, such as weights/0001")


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
    """Send one file of a checkpoint, whole or the ranges that the client asks for."""
    record = await _signed_checkpoint(call, "external_weights", token)
    if file not in await _files(call, record, record.tenant_id):
        raise NotFoundError("file", file)
    path = call.gateway.files.root / record.directory / file
    return FileResponse(path, media_type="application/octet-stream", filename=file)


@routes.get(f"{_CHECKPOINT}/archive", anybody)
async def archive_url(call: Call[bytes], run_id: str, kind: str, name: str) -> Response:
    """Redirect to the archive, as SDK 0.16.1 expects; the body has the URL for clients that do not follow redirects."""
    path = path_of(run_id, kind, name)
    record = await call.gateway.checkpoint(path, call.tenant_id)
    url, expires = await _signed_url(call, "archive", "archives", path, record)
    headers = {"Location": url, "Expires": formatdate(expires, usegmt=True)}
    return json_response({"url": url, "expires": iso_time(expires)}, 302, headers)


@routes.get("/archives/{token}", anybody, public=True)
async def archive(call: Call[bytes], token: str) -> Response:
    """Send the files of a checkpoint, without the server's file of checksums, at the top level of one tar file."""
    record = await _signed_checkpoint(call, "archive", token)
    return await tar_response(call, record, record.tenant_id, root="", last=_COMPLETE, tinker_names=True)


async def tar_response(
    call: Call[bytes],
    record: CheckpointRecord,
    tenant_id: str,
    *,
    root: str,
    last: str | None = None,
    tinker_names: bool = False,
    form: str | None = None,
) -> Response:
    """Return a response with the files of a checkpoint in a tar file, which the pool for downloads reads.

    ``root``: the directory inside the tar file. ``last``: the name of an empty file at its end, by which a reader knows
    that the file is complete. ``tinker_names``: an adapter has the names of Tinker's files. ``form``: the form of an
    adapter; None: as saved.
    """
    threads = call.gateway.tenants.pools.downloads
    directory = call.gateway.files.root / record.directory
    run = await call.gateway.store.runs.get(record.run_id)
    family = None
    if run is not None and (tinker_names or form is not None):
        family = await call.gateway.family_of(run.model_name)
    if form is None:  # for a model that is served no more, the names that most families have
        make = partial(TarStream, directory, root, record.created_at, last, family or "" if tinker_names else None)
    elif family is None:
        allowed = "none: its base model is not served any more; use twinkle-server convert-adapter on the download"
        raise InvalidInputError("format", form, allowed)
    else:
        needed = await threads.in_thread(tenant_id, partial(conversion_bytes, directory))
        call.gateway.memory.guard.check(needed)
        make = partial(converted_tar, directory, form, family, root, record.created_at)
    tar = await threads.in_thread(tenant_id, make)
    if tar.empty:  # the checkpoint was deleted meanwhile
        raise NotFoundError("checkpoint", str(CheckpointPath(record.run_id, record.kind, record.name)))
    file_name = f"{archive_title(record)}.tar"
    headers = {"Content-Length": str(tar.size), "Content-Disposition": f'attachment; filename="{file_name}"'}
    return StreamingResponse(tar.pieces(threads, tenant_id), headers=headers, media_type="application/x-tar")


def archive_title(record: CheckpointRecord) -> str:
    return f"{ids.directory_name(record.run_id)}-{record.kind}-{record.name}"


async def _signed_url(
    call: Call[bytes], use: Use, route: str, path: CheckpointPath, record: CheckpointRecord
) -> tuple[str, float]:
    """Return a URL for a checkpoint that needs no key, and the time when it expires; the audit log records it."""
    claims = {"path": str(path), "request_id": record.request_id}
    token, expires = call.gateway.signed_urls.sign(use, await key_id_of(call.request), claims)
    details = {"model_id": path.run_id, "tinker_path": str(path), "purpose": "download"}
    await call.gateway.store.audit.add(call.tenant_id, "checkpoint_read", details)
    return f"{public_address(call.request)}{PREFIX}/{route}/{token}", expires


async def _signed_checkpoint(call: Call[bytes], use: Use, token: str) -> CheckpointRecord:
    """Return the checkpoint of a signed address; NotFoundError if it was deleted or replaced, or expired."""
    claims = await call.gateway.signed_urls.read(use, token)
    path = CheckpointPath.parse(claims["path"])
    record = await call.gateway.store.checkpoints.get(path.run_id, path.kind, path.name)
    if record is None or record.request_id != claims["request_id"] or expired(record):
        raise NotFoundError("checkpoint", str(path))
    return record


async def _files(call: Call[bytes], record: CheckpointRecord, tenant_id: str) -> list[str]:
    """Return the names of a checkpoint's files, read in a thread of the pool for downloads."""
    listed = partial(_file_names, call.gateway.files.root / record.directory)
    return await call.gateway.tenants.pools.downloads.in_thread(tenant_id, listed)


def _file_names(directory: Path) -> list[str]:
    """Return the names of the files that clients see; none if the checkpoint was deleted. It has no subdirectories."""
    names = sorted(file.name for file in directory.iterdir()) if directory.is_dir() else []
    return [name for name in names if name != CHECKSUMS]
