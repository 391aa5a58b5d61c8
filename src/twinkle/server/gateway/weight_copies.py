"""Copies of checkpoints: under another session's run, or under a run of their own in another project.

A copy shares nothing with its source, which may be deleted. The run that holds one is none that trains: it is there to
be loaded from. A model that begins as a checkpoint is created here, too.
"""

import errno
import hashlib
import time
from dataclasses import dataclass
from functools import partial

from twinkle.errors import InvalidInputError, StorageQuotaError, UnknownCheckpointError
from twinkle.server import ids
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.ids import CheckpointPath
from twinkle.server.services.checkpoints.access import loadable_checkpoint, version_of
from twinkle.server.state.errors import CheckpointExistsError, StorageFullError
from twinkle.server.state.files.data_dir import copy_whole
from twinkle.server.types import CheckpointRecord, CreateFromCheckpoint, Op, OpKind, RunRecord, SessionRecord
from twinkle.server.wire.requests import CopyWeightsRequest, CreateFromRequest, check_access_token

_NOTE = "this run holds copies of checkpoints; create a training client from one of them"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class _Source:
    checkpoint: CheckpointRecord
    path: CheckpointPath
    run: RunRecord


async def copy_weights(
    gateway: Gateway, tenant_id: str, wanted: CopyWeightsRequest, idempotency_key: str | None
) -> CheckpointPath:
    """Where the copy is. The same key, or the same copy into the same run again, gets the copy that there is."""
    check_access_token(wanted.weights_access_token)
    path = CheckpointPath.parse(wanted.source_path, "source_path")
    checkpoint = await loadable_checkpoint(gateway.store, path, tenant_id, "source_path")
    run = await gateway.store.runs.get(path.run_id)
    assert run is not None, "a checkpoint has a run"
    source = _Source(checkpoint, path, run)
    if wanted.session_id is not None:
        session, number = await _given_place(gateway, tenant_id, wanted)
    else:
        session, number = await _new_session(gateway, tenant_id, wanted, source, idempotency_key), 0
    holder = await _holder(gateway, tenant_id, session, number, source)
    return await _copy(gateway, tenant_id, wanted, source, holder)


async def _given_place(gateway: Gateway, tenant_id: str, wanted: CopyWeightsRequest) -> tuple[SessionRecord, int]:
    assert wanted.session_id is not None
    if wanted.destination_project_id is not None:
        raise InvalidInputError(
            "destination_project_id", wanted.destination_project_id, "null: the copy is in the project of session_id"
        )
    if wanted.model_seq_id is None:
        raise InvalidInputError("model_seq_id", None, "a number of a run, together with session_id")
    return await gateway.active_session(wanted.session_id, tenant_id), wanted.model_seq_id


async def _new_session(
    gateway: Gateway, tenant_id: str, wanted: CopyWeightsRequest, source: _Source, idempotency_key: str | None
) -> SessionRecord:
    """One that has ended already: nobody keeps it alive, and checkpoints need none."""
    if wanted.destination_project_id is None or wanted.model_seq_id is not None:
        given = f"project {wanted.destination_project_id!r}, model_seq_id {wanted.model_seq_id!r}"
        raise InvalidInputError("destination", given, "destination_project_id, or session_id and model_seq_id")
    now = time.time()
    session = SessionRecord(
        session_id=ids.new_session_id(),
        tenant_id=tenant_id,
        created_at=now,
        last_seen=now,
        state="finished",
        display_name=f"copy of {source.path}",
        project_id=wanted.destination_project_id,
        finish_reason="success",
    )
    key = None if idempotency_key is None else f"copy:{idempotency_key}"
    rows = gateway.tenants.limits(tenant_id).max_session_rows_per_tenant
    made = await gateway.with_row_room(tenant_id, lambda: gateway.store.sessions.create(session, key, most_rows=rows))
    if (made.display_name, made.project_id) != (session.display_name, session.project_id):
        raise InvalidInputError("X-Idempotency-Key header", idempotency_key, "another key for another copy")
    return made


async def _holder(gateway: Gateway, tenant_id: str, session: SessionRecord, number: int, source: _Source) -> RunRecord:
    """The run that the copy belongs to."""
    now = time.time()
    is_own = source.run.tenant_id == tenant_id
    wanted = RunRecord(
        run_id=ids.run_id(session.session_id, number),
        session_id=session.session_id,
        number=number,
        tenant_id=tenant_id,
        base_model=source.run.base_model,
        model_name=source.run.model_name,
        spec=source.run.spec,
        created_at=now,
        last_request_at=now,
        state="parked",
        user_metadata=source.run.user_metadata if is_own else {},  # what it says is for its owner
        note=_NOTE,
    )
    holder = await gateway.store.runs.add(wanted)
    if (holder.note, holder.model_name, holder.spec) != (_NOTE, wanted.model_name, wanted.spec):
        raise InvalidInputError("model_seq_id", number, "a number not used before in this session")
    return holder


async def _copy(
    gateway: Gateway, tenant_id: str, wanted: CopyWeightsRequest, source: _Source, holder: RunRecord
) -> CheckpointPath:
    path = CheckpointPath(holder.run_id, source.path.kind, source.path.name)
    version = int.from_bytes(hashlib.blake2b(version_of(source.checkpoint).encode(), digest_size=7).digest())
    request_id = f"{holder.run_id}:copy-{version:x}"
    existing = await gateway.store.checkpoints.get(path.run_id, path.kind, path.name)
    if existing is None:
        most = gateway.tenants.limits(tenant_id).max_checkpoint_bytes_per_tenant
        await _check_space(gateway, tenant_id, source.checkpoint.size_bytes, most)
        now = time.time()
        is_own = source.checkpoint.tenant_id == tenant_id
        copied = CheckpointRecord(
            run_id=path.run_id,
            kind=path.kind,
            name=path.name,
            tenant_id=tenant_id,
            request_id=request_id,
            # Of its own for what it holds: samplers may be pinned to an earlier copy of this name.
            directory=gateway.files.relative(gateway.files.checkpoint(path, version)),
            created_at=now,
            size_bytes=source.checkpoint.size_bytes,
            expires_at=None if wanted.ttl_seconds is None else now + wanted.ttl_seconds,
            user_metadata=source.checkpoint.user_metadata if is_own else {},
        )
        existing = await _written(gateway, source, copied, most)
    if existing.request_id != request_id:
        raise InvalidInputError("source_path", wanted.source_path, f"a name that {holder.run_id} has no checkpoint of")
    return path


async def _check_space(gateway: Gateway, tenant_id: str, wanted: int, most: int | None) -> None:
    """Before anything is written; others may be at it too, so it is checked once more when it goes on record."""
    used = 0 if most is None else await gateway.store.usage.storage_of(tenant_id)
    if most is not None and used + wanted > most:
        raise StorageQuotaError(used, wanted, most)


async def _written(gateway: Gateway, source: _Source, copied: CheckpointRecord, most: int | None) -> CheckpointRecord:
    """The record, with its files; or that of a copy whose maker was faster. ``most`` bytes the tenant may have."""
    async with gateway.copying.turn(copied.tenant_id):
        existing = await gateway.store.checkpoints.get(copied.run_id, copied.kind, copied.name)
        if existing is not None:
            return existing
        await _copy_files(gateway, copied.tenant_id, source, copied.directory)
        return await _added(gateway, copied, most)


async def _copy_files(gateway: Gateway, tenant_id: str, source: _Source, directory: str) -> None:
    root = gateway.files.root
    try:
        copy = partial(copy_whole, root / source.checkpoint.directory, root / directory)
        await gateway.tenants.pools.saving.in_thread(tenant_id, copy)
    except FileNotFoundError:  # deleted meanwhile
        raise UnknownCheckpointError(str(source.path)) from None
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise StorageFullError("the server's disk is full: nothing was copied") from error
        raise


async def _added(gateway: Gateway, record: CheckpointRecord, most: int | None) -> CheckpointRecord:
    """The record, or that of a copy whose maker was faster."""
    try:
        await gateway.store.checkpoints.add(record, most_bytes=most, event="checkpoint_copy")
    except (CheckpointExistsError, StorageFullError, StorageQuotaError) as error:
        existing = await gateway.store.checkpoints.get(record.run_id, record.kind, record.name)
        if existing is None or existing.directory != record.directory:
            remove = partial(gateway.files.remove, record.directory)
            await gateway.tenants.pools.saving.in_thread(record.tenant_id, remove)
        if existing is None or not isinstance(error, CheckpointExistsError):
            raise
        return existing
    return record


# --- models that begin as a checkpoint --------------------------------------------------------------------------------


async def create_from_checkpoint(gateway: Gateway, tenant_id: str, wanted: CreateFromRequest, body: bytes) -> str:
    """Create a model that begins as a checkpoint, and return the id of the request.

    The same request again is about the model that there is, also when its source is gone by now.
    """
    wanted.check()
    await gateway.active_session(wanted.session_id, tenant_id)
    run = await gateway.store.runs.get(ids.run_id(wanted.session_id, wanted.model_seq_id))
    if run is None:
        run = await _run_like_source(gateway, tenant_id, wanted)
    payload = CreateFromCheckpoint(run.spec, wanted.path, wanted.optimizer)
    return await gateway.create_run(run, Op(run.run_id, 0, OpKind.CREATE_FROM, payload, body))


async def _run_like_source(gateway: Gateway, tenant_id: str, wanted: CreateFromRequest) -> RunRecord:
    path = CheckpointPath.parse(wanted.path)
    checkpoint = await loadable_checkpoint(gateway.store, path, tenant_id)
    if wanted.optimizer and checkpoint.kind != "weights":
        raise InvalidInputError("optimizer", True, f"false: {path} holds no optimizer state")
    source = await gateway.store.runs.get(path.run_id)
    assert source is not None, "a checkpoint has a run"
    base_model = wanted.base_model or source.base_model
    if gateway.model(base_model).model.name != source.model_name:
        raise InvalidInputError("base_model", base_model, f"a name of {source.base_model!r}, which {path} belongs to")
    run_id = ids.run_id(wanted.session_id, wanted.model_seq_id)
    metadata = wanted.user_metadata or {}
    return gateway.new_run(run_id, tenant_id, wanted.session_id, wanted.model_seq_id, base_model, source.spec, metadata)
