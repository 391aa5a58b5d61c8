"""Copies of checkpoints: into a run of a session that the client names, or into a new session of a project.

A copy shares no files with its source, which may be deleted afterwards. The run that holds a copy has no adapter and
cannot train: its checkpoints are there to be loaded. Models that are created from a checkpoint are made here, too.
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
    """Copy a checkpoint and return the path of the copy.

    A repeated request, with the same idempotency key or into the same run, returns the path of the existing copy.
    """
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
    """One copy request: the tenant, the request, and the source checkpoint with its path and its run."""

    gateway: Gateway
    tenant_id: str
    wanted: CopyWeightsRequest
    path: CheckpointPath
    checkpoint: CheckpointRecord
    run: RunRecord

    async def given_place(self, session_id: str) -> tuple[SessionRecord, int]:
        """Return the session and the run number that the request names as the copy's destination."""
        project, number = self.wanted.destination_project_id, self.wanted.model_seq_id
        if project is not None:
            allowed = "null: the copy is in the project of session_id"
            raise InvalidInputError("destination_project_id", project, allowed)
        if number is None:
            raise InvalidInputError("model_seq_id", None, "a number of a run, together with session_id")
        return await self.gateway.active_session(session_id, self.tenant_id), number

    async def new_session(self, idempotency_key: str | None) -> SessionRecord:
        """Create the session that a copy into a project belongs to, or return that of an earlier identical request.

        It has ended from the start: no client sends heartbeats for it, and checkpoints do not need an active session.
        """
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
        """Create the run that the copy belongs to, or return the existing one that holds copies under this number."""
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
            user_metadata=self.run.user_metadata if is_own else {},  # metadata is only for its owner
            note=_NOTE,
        )
        holder = await self.gateway.store.runs.add(wanted)
        if (holder.note, holder.model_name, holder.spec) != (_NOTE, wanted.model_name, wanted.spec):
            raise InvalidInputError("model_seq_id", number, "a number not used before in this session")
        return holder

    async def copy_to(self, holder: RunRecord) -> CheckpointPath:
        """Copy the checkpoint into a run, unless the run has this copy already, and return the copy's path."""
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
                # The directory depends on the content: samplers may still use an earlier copy of this name.
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
        """Write files and record of a copy, and return the record; or that of a concurrent request that was faster."""
        most, wanted = self.gateway.tenants.limits(self.tenant_id).max_checkpoint_bytes_per_tenant, copied.size_bytes
        used = 0 if most is None else await self.gateway.store.usage.storage_of(self.tenant_id)
        # Check the limit before files are written. Concurrent requests may use the same space, so the database checks
        # it again when the record is added.
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
        except FileNotFoundError:  # the source was deleted meanwhile
            raise UnknownCheckpointError(str(self.path)) from None
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise StorageFullError("the server's disk is full: nothing was copied") from error
            raise

    async def _add(self, path: CheckpointPath, copied: CheckpointRecord, most: int | None) -> CheckpointRecord:
        """Add the record of a copy and return it, or that of a concurrent request that was faster.

        If the record cannot be added, its files are deleted, unless another record has the same ones. ``most``: bytes
        of checkpoints that the tenant may have.
        """
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
    """Create a model whose first weights are a checkpoint's, and return the id of the request.

    A repeated request concerns the existing model, even if the checkpoint has been deleted since.
    """
    wanted.check()
    await gateway.active_session(wanted.session_id, tenant_id)
    run = await gateway.store.runs.get(ids.run_id(wanted.session_id, wanted.model_seq_id))
    if run is None:
        run = await _run_like_source(gateway, tenant_id, wanted)
    payload = LoadWeights(wanted.path, wanted.optimizer)
    return await gateway.create_tinker_run(run, Op(run.run_id, 0, OpKind.CREATE_FROM, payload, body), "path")


async def _run_like_source(gateway: Gateway, tenant_id: str, wanted: CreateFromRequest) -> RunRecord:
    """Return the record of a new run that trains what the checkpoint's run trained."""
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
