"""Copies of checkpoints: under another session's run, or under a run of their own in another project.

A copy shares nothing with its source, which may be deleted. The run that holds one is none that trains: it is there to
be loaded from. A model that begins as a checkpoint is created here, too.
"""

import errno
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from twinkle.errors import InvalidInputError, StorageQuotaError, UnknownCheckpointError
from twinkle.server import ids
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.ids import CheckpointPath
from twinkle.server.services.checkpoints.access import loadable_checkpoint, version_of
from twinkle.server.state.errors import CheckpointExistsError, StorageFullError
from twinkle.server.state.files.data_dir import copy_whole
from twinkle.server.types import CheckpointRecord, LoadWeights, Op, OpKind, RunRecord, SessionRecord
from twinkle.server.wire.requests import CopyWeightsRequest, CreateFromRequest, check_access_token

_NOTE = "this run holds copies of checkpoints; create a training client from one of them"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


async def copy_weights(
    gateway: Gateway, tenant_id: str, wanted: CopyWeightsRequest, idempotency_key: str | None
) -> CheckpointPath:
    """Where the copy is. The same key, or the same copy into the same run again, gets the copy that there is."""
    check_access_token(wanted.weights_access_token)
    path = CheckpointPath.parse(wanted.source_path, "source_path")
    checkpoint = await loadable_checkpoint(gateway.store, path, tenant_id, "source_path")
    copying = _Copying(gateway, tenant_id, wanted, path, checkpoint, await gateway.run_of(checkpoint))
    if wanted.session_id is not None:
        session, number = await copying.given_place(wanted.session_id)
    else:
        session, number = await copying.new_session(idempotency_key), 0
    return await copying.copy_to(await copying.holder(session, number))


@dataclass(frozen=True)
class _Copying:
    """One request: who asks for what, and the checkpoint that is copied, with its address and its run."""

    gateway: Gateway
    tenant_id: str
    wanted: CopyWeightsRequest
    path: CheckpointPath
    checkpoint: CheckpointRecord
    run: RunRecord

    async def given_place(self, session_id: str) -> tuple[SessionRecord, int]:
        project, number = self.wanted.destination_project_id, self.wanted.model_seq_id
        if project is not None:
            allowed = "null: the copy is in the project of session_id"
            raise InvalidInputError("destination_project_id", project, allowed)
        if number is None:
            raise InvalidInputError("model_seq_id", None, "a number of a run, together with session_id")
        return await self.gateway.active_session(session_id, self.tenant_id), number

    async def new_session(self, idempotency_key: str | None) -> SessionRecord:
        """One that has ended already: nobody keeps it alive, and checkpoints need none."""
        project, number = self.wanted.destination_project_id, self.wanted.model_seq_id
        if project is None or number is not None:
            given = f"project {project!r}, model_seq_id {number!r}"
            raise InvalidInputError("destination", given, "destination_project_id, or session_id and model_seq_id")
        now = time.time()
        session = SessionRecord(
            session_id=ids.new_session_id(),
            tenant_id=self.tenant_id,
            created_at=now,
            last_seen=now,
            state="finished",
            display_name=f"copy of {self.path}",
            project_id=project,
            finish_reason="success",
        )
        key = None if idempotency_key is None else f"copy:{idempotency_key}"
        most = self.gateway.tenants.limits(self.tenant_id).max_session_rows_per_tenant
        create = partial(self.gateway.store.sessions.create, session, key, most_rows=most)
        made = await self.gateway.with_row_room(self.tenant_id, create)
        if (made.display_name, made.project_id) != (session.display_name, session.project_id):
            raise InvalidInputError("X-Idempotency-Key header", idempotency_key, "another key for another copy")
        return made

    async def holder(self, session: SessionRecord, number: int) -> RunRecord:
        """The run that the copy belongs to."""
        now = time.time()
        is_own = self.run.tenant_id == self.tenant_id
        wanted = RunRecord(
            run_id=ids.run_id(session.session_id, number),
            session_id=session.session_id,
            number=number,
            tenant_id=self.tenant_id,
            base_model=self.run.base_model,
            model_name=self.run.model_name,
            spec=self.run.spec,
            created_at=now,
            last_request_at=now,
            state="parked",
            user_metadata=self.run.user_metadata if is_own else {},  # what it says is for its owner
            note=_NOTE,
        )
        holder = await self.gateway.store.runs.add(wanted)
        if (holder.note, holder.model_name, holder.spec) != (_NOTE, wanted.model_name, wanted.spec):
            raise InvalidInputError("model_seq_id", number, "a number not used before in this session")
        return holder

    async def copy_to(self, holder: RunRecord) -> CheckpointPath:
        path = CheckpointPath(holder.run_id, self.path.kind, self.path.name)
        version = int.from_bytes(hashlib.blake2b(version_of(self.checkpoint).encode(), digest_size=7).digest())
        request_id = f"{holder.run_id}:copy-{version:x}"
        existing = await self._find(path)
        if existing is None:
            now, ttl_seconds = time.time(), self.wanted.ttl_seconds
            is_own = self.checkpoint.tenant_id == self.tenant_id
            copied = CheckpointRecord(
                run_id=path.run_id,
                kind=path.kind,
                name=path.name,
                tenant_id=self.tenant_id,
                request_id=request_id,
                # Of its own for what it holds: samplers may be pinned to an earlier copy of this name.
                directory=self.gateway.files.relative(self.gateway.files.checkpoint(path, version)),
                created_at=now,
                size_bytes=self.checkpoint.size_bytes,
                expires_at=None if ttl_seconds is None else now + ttl_seconds,
                user_metadata=self.checkpoint.user_metadata if is_own else {},
            )
            existing = await self._write(path, copied)
        if existing.request_id != request_id:
            allowed = f"a name that {holder.run_id} has no checkpoint of"
            raise InvalidInputError("source_path", self.wanted.source_path, allowed)
        return path

    async def _find(self, path: CheckpointPath) -> CheckpointRecord | None:
        return await self.gateway.store.checkpoints.get(path.run_id, path.kind, path.name)

    async def _write(self, path: CheckpointPath, copied: CheckpointRecord) -> CheckpointRecord:
        """Return the record, with its files; or that of a copy whose maker was faster."""
        most, wanted = self.gateway.tenants.limits(self.tenant_id).max_checkpoint_bytes_per_tenant, copied.size_bytes
        used = 0 if most is None else await self.gateway.store.usage.storage_of(self.tenant_id)
        # Before anything is written; others may be at it too, so it is checked once more when it goes on record.
        if most is not None and used + wanted > most:
            raise StorageQuotaError(used, wanted, most)
        async with self.gateway.copying.turn(self.tenant_id):
            existing = await self._find(path)
            if existing is not None:
                return existing
            await self._copy_files(copied.directory)
            return await self._add(path, copied, most)

    async def _copy_files(self, directory: str) -> None:
        root = self.gateway.files.root
        try:
            await self._in_thread(partial(copy_whole, root / self.checkpoint.directory, root / directory))
        except FileNotFoundError:  # deleted meanwhile
            raise UnknownCheckpointError(str(self.path)) from None
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise StorageFullError("the server's disk is full: nothing was copied") from error
            raise

    async def _add(self, path: CheckpointPath, copied: CheckpointRecord, most: int | None) -> CheckpointRecord:
        """Return the record, or that of a copy whose maker was faster. ``most`` bytes the tenant may have."""
        try:
            await self.gateway.store.checkpoints.add(copied, most_bytes=most, event="checkpoint_copy")
        except (CheckpointExistsError, StorageFullError, StorageQuotaError) as error:
            existing = await self._find(path)
            if existing is None or existing.directory != copied.directory:
                await self._in_thread(partial(self.gateway.files.remove, copied.directory))
            if existing is None or not isinstance(error, CheckpointExistsError):
                raise
            return existing
        return copied

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await self.gateway.tenants.pools.saving.in_thread(self.tenant_id, work)


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
    payload = LoadWeights(wanted.path, wanted.optimizer)
    return await gateway.create_run(run, Op(run.run_id, 0, OpKind.CREATE_FROM, payload, body))


async def _run_like_source(gateway: Gateway, tenant_id: str, wanted: CreateFromRequest) -> RunRecord:
    path = CheckpointPath.parse(wanted.path)
    checkpoint = await loadable_checkpoint(gateway.store, path, tenant_id)
    if wanted.optimizer and checkpoint.kind != "weights":
        raise InvalidInputError("optimizer", True, f"false: {path} holds no optimizer state")
    source = await gateway.run_of(checkpoint)
    base_model = wanted.base_model or source.base_model
    if gateway.model(base_model).model.name != source.model_name:
        raise InvalidInputError("base_model", base_model, f"a name of {source.base_model!r}, which {path} belongs to")
    run_id = ids.run_id(wanted.session_id, wanted.model_seq_id)
    metadata = wanted.user_metadata or {}
    return gateway.new_run(run_id, tenant_id, wanted.session_id, wanted.model_seq_id, base_model, source.spec, metadata)
