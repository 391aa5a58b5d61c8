"""Checkpoints: their names, owners and directories."""

import time
from collections.abc import Mapping

from sqlalchemy import bindparam, func, select

from twinkle.server.state.database.database import Cursor, Page, Row
from twinkle.server.state.database.mapper import RecordMapper
from twinkle.server.state.database.tables import CHECKPOINTS, RUNS
from twinkle.server.state.errors import CheckpointExistsError
from twinkle.server.state.records.area import Area, in_write
from twinkle.server.state.records.audit import add_entry
from twinkle.server.state.records.usage import check_storage
from twinkle.server.types import CheckpointKind, CheckpointRecord

_CHECKPOINT = RecordMapper(CheckpointRecord, CHECKPOINTS)

_OF_TENANT = CHECKPOINTS.c.tenant_id == bindparam("tenant_id")
_NEWEST_FIRST = (CHECKPOINTS.c.created_at.desc(), CHECKPOINTS.c.run_id, CHECKPOINTS.c.kind, CHECKPOINTS.c.name)

_OF_RUN = select(CHECKPOINTS).where(CHECKPOINTS.c.run_id == bindparam("run")).order_by(*_NEWEST_FIRST)
_NOT_LEFT_OUT = CHECKPOINTS.c.kind != bindparam("left_out")
_COUNT = select(func.count()).select_from(CHECKPOINTS).where(_OF_TENANT, _NOT_LEFT_OUT)
_LIST = (
    select(CHECKPOINTS)
    .where(_OF_TENANT, _NOT_LEFT_OUT)
    .order_by(*_NEWEST_FIRST)
    .limit(bindparam("limit"))
    .offset(bindparam("offset"))
)
_EXPIRED = select(CHECKPOINTS).where(CHECKPOINTS.c.expires_at <= bindparam("now")).order_by(CHECKPOINTS.c.expires_at)
_SUMS = (
    select(func.count().label("count"), func.coalesce(func.sum(CHECKPOINTS.c.size_bytes), 0).label("bytes"))
    .select_from(CHECKPOINTS.join(RUNS))
    .where(RUNS.c.session_id == bindparam("session"))
)
_DELETED = 0.0  # ``expires_at`` of a checkpoint that is being deleted


class CheckpointRecords(Area):
    """The records of checkpoints.

    A caller that deletes a record must delete its directory too, unless an active session samples from it.
    """

    @in_write
    def add(
        self,
        cursor: Cursor,
        checkpoint: CheckpointRecord,
        overwrite: bool = False,
        most_bytes: int | None = None,
        event: str = "checkpoint_save",
    ) -> CheckpointRecord | None:
        """Store a checkpoint; return the one that it replaces, or None.

        The caller must delete the directory of the replaced one, unless the new one has the same directory or an active
        session samples from it. If the name is taken, CheckpointExistsError, unless ``overwrite`` is set or the same
        request took it: an op that is replayed after a crash adds its checkpoint again. ``most_bytes``: the limit for
        all checkpoints and sampler versions of the tenant; beyond it StorageQuotaError. ``event``: the event in the
        audit log.
        """
        key = _key(checkpoint.run_id, checkpoint.kind, checkpoint.name)
        known = _CHECKPOINT.find(cursor, **key)
        is_replayed = known is not None and known.request_id == checkpoint.request_id
        if known is not None:
            if not overwrite and not is_replayed:
                raise CheckpointExistsError(checkpoint.run_id, checkpoint.kind, checkpoint.name)
            cursor.delete(CHECKPOINTS, **key)
        _CHECKPOINT.insert(cursor, checkpoint)
        check_storage(cursor, checkpoint.tenant_id, checkpoint.size_bytes, most_bytes)
        if not is_replayed:
            _audit(cursor, checkpoint, event, checkpoint.created_at, size_bytes=checkpoint.size_bytes)
        return known

    async def get(self, run_id: str, kind: CheckpointKind, name: str) -> CheckpointRecord | None:
        return await self._find(_CHECKPOINT, **_key(run_id, kind, name))

    async def of_run(self, run_id: str) -> tuple[CheckpointRecord, ...]:
        """Return the checkpoints of a run, newest first."""
        return await self._all(_CHECKPOINT, _OF_RUN, run=run_id)

    async def latest(self, run_id: str) -> Mapping[CheckpointKind, CheckpointRecord]:
        """Return the newest checkpoint of each kind that the run has."""
        return {checkpoint.kind: checkpoint for checkpoint in reversed(await self.of_run(run_id))}

    async def list(
        self, tenant_id: str, limit: int, offset: int = 0, left_out: CheckpointKind | None = None
    ) -> Page[CheckpointRecord]:
        """Return a page of a tenant's checkpoints, newest first, also of those that have expired.

        ``left_out``: a kind that is neither listed nor counted.
        """
        which = {"tenant_id": tenant_id, "left_out": left_out or ""}
        return await self._page(_CHECKPOINT, _LIST, _COUNT, **which, limit=limit, offset=offset)

    async def expired(self, now: float) -> tuple[CheckpointRecord, ...]:
        """Return the checkpoints that have expired, including those whose deletion was interrupted."""
        return await self._all(_CHECKPOINT, _EXPIRED, now=now)

    @in_write
    def begin_delete(self, cursor: Cursor, checkpoint: CheckpointRecord, event: str = "checkpoint_delete") -> None:
        """Mark a checkpoint as expired, so that it cannot be used any more. ``event``: the event in the audit log.

        The caller then deletes the files, and after that the record (:meth:`finish_delete`). If the process dies in
        between, the record is among the expired ones, and the next maintenance deletes both.
        """
        key = _key(checkpoint.run_id, checkpoint.kind, checkpoint.name)
        known = _CHECKPOINT.find(cursor, **key)
        if known is not None and known.directory == checkpoint.directory and known.expires_at != _DELETED:
            cursor.update(CHECKPOINTS, key, expires_at=_DELETED)
            _audit(cursor, checkpoint, event, time.time())

    @in_write
    def finish_delete(self, cursor: Cursor, checkpoint: CheckpointRecord) -> None:
        """Delete the record of a checkpoint, unless another checkpoint was saved under its name meanwhile."""
        key = _key(checkpoint.run_id, checkpoint.kind, checkpoint.name)
        cursor.delete(CHECKPOINTS, **key, directory=checkpoint.directory)

    async def lie_in(self, directory: str) -> bool:
        """Return whether a checkpoint on record has its files in this directory."""
        return await self._database.read(lambda cursor: cursor.count(CHECKPOINTS, directory=directory)) > 0

    async def set_expiry(self, run_id: str, kind: CheckpointKind, name: str, expires_at: float | None) -> bool:
        """Set the expiry of a checkpoint (None: never); return whether the checkpoint exists."""
        return await self._change(_key(run_id, kind, name), "checkpoint_set_ttl", "expires_at", expires_at)

    async def set_public(self, run_id: str, kind: CheckpointKind, name: str, public: bool) -> bool:
        """Publish a checkpoint or make it private again; return whether the checkpoint exists."""
        event = "checkpoint_publish" if public else "checkpoint_unpublish"
        return await self._change(_key(run_id, kind, name), event, "public", int(public))

    @in_write
    def _change(self, cursor: Cursor, key: Row, event: str, column: str, value: float | None) -> bool:
        row = cursor.find(CHECKPOINTS, **key)
        if row is None:
            return False
        if row[column] != value:
            cursor.update(CHECKPOINTS, key, **{column: value})
            _audit(cursor, _CHECKPOINT.record(row), event, time.time(), **{column: value})
        return True

    async def of_session(self, session_id: str) -> tuple[int, int]:
        """Return the number and the total size in bytes of the checkpoints of a session's runs."""
        (row,) = await self._rows(_SUMS, session=session_id)
        return int(row["count"]), int(row["bytes"])


def _audit(cursor: Cursor, checkpoint: CheckpointRecord, event: str, now: float, **details: float | None) -> None:
    path = f"tinker://{checkpoint.run_id}/{checkpoint.kind}/{checkpoint.name}"
    about = {"model_id": checkpoint.run_id, "tinker_path": path, **details}
    add_entry(cursor, checkpoint.tenant_id, event, now, about)


def _key(run_id: str, kind: CheckpointKind, name: str) -> Row:
    return {"run_id": run_id, "kind": kind, "name": name}
