"""Checkpoints: which directories exist under which names."""

import json
import time
from collections.abc import Mapping

from sqlalchemy import Update, bindparam, delete, func, insert, select, update

from twinkle.server.state.audit import add_entry
from twinkle.server.state.database import Cursor, Database, Page, Row
from twinkle.server.state.errors import CheckpointExistsError
from twinkle.server.state.tables import CHECKPOINTS, RUNS
from twinkle.server.state.usage import check_storage
from twinkle.server.types import CheckpointKind, CheckpointRecord

__all__ = ["Checkpoints"]

_NAMED = (
    (CHECKPOINTS.c.run_id == bindparam("run"))
    & (CHECKPOINTS.c.kind == bindparam("kind_"))
    & (CHECKPOINTS.c.name == bindparam("name_"))
)
_OF_TENANT = CHECKPOINTS.c.tenant_id == bindparam("tenant_id")
_NEWEST_FIRST = (CHECKPOINTS.c.created_at.desc(), CHECKPOINTS.c.run_id, CHECKPOINTS.c.kind, CHECKPOINTS.c.name)

_INSERT = insert(CHECKPOINTS)
_GET = select(CHECKPOINTS).where(_NAMED)
_DELETE = delete(CHECKPOINTS).where(_NAMED)
_OF_RUN = select(CHECKPOINTS).where(CHECKPOINTS.c.run_id == bindparam("run")).order_by(*_NEWEST_FIRST)
_AT = select(func.count()).select_from(CHECKPOINTS).where(CHECKPOINTS.c.directory == bindparam("place"))
_COUNT = select(func.count()).select_from(CHECKPOINTS).where(_OF_TENANT)
_LIST = (
    select(CHECKPOINTS).where(_OF_TENANT).order_by(*_NEWEST_FIRST).limit(bindparam("limit")).offset(bindparam("offset"))
)
_EXPIRED = select(CHECKPOINTS).where(CHECKPOINTS.c.expires_at <= bindparam("now")).order_by(CHECKPOINTS.c.expires_at)
_SET_EXPIRY = update(CHECKPOINTS).where(_NAMED).values(expires_at=bindparam("expires_at"))
_SET_PUBLIC = update(CHECKPOINTS).where(_NAMED).values(public=bindparam("public"))
_SUMS = (
    select(func.count().label("count"), func.coalesce(func.sum(CHECKPOINTS.c.size_bytes), 0).label("bytes"))
    .select_from(CHECKPOINTS.join(RUNS, RUNS.c.run_id == CHECKPOINTS.c.run_id))
    .where(RUNS.c.session_id == bindparam("session"))
)

_DELETED = 0.0  # when a checkpoint expired that is being deleted


class Checkpoints:
    """Rows only: whoever deletes a row deletes its directory too."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(
        self,
        checkpoint: CheckpointRecord,
        overwrite: bool = False,
        most_bytes: int | None = None,
        event: str = "checkpoint_save",
    ) -> CheckpointRecord | None:
        """The one that it replaces, whose directory is now nobody's. ``most_bytes``: of all files of the tenant.

        A name that is taken is an error unless ``overwrite`` is set or the same request took it: an op that is
        replayed after a crash adds its checkpoint again.
        """
        name = _key(checkpoint.run_id, checkpoint.kind, checkpoint.name)

        def work(cursor: Cursor) -> CheckpointRecord | None:
            row = cursor.row(_GET, name)
            if row is not None:
                if not overwrite and row["request_id"] != checkpoint.request_id:
                    raise CheckpointExistsError(checkpoint.run_id, checkpoint.kind, checkpoint.name)
                cursor.execute(_DELETE, name)
            cursor.execute(_INSERT, _row(checkpoint))
            check_storage(cursor, checkpoint.tenant_id, checkpoint.size_bytes, most_bytes)
            if row is None or row["request_id"] != checkpoint.request_id:
                _tell(cursor, checkpoint, event, checkpoint.created_at, size_bytes=checkpoint.size_bytes)
            return None if row is None else _checkpoint(row)

        return await self._database.write(work)

    async def get(self, run_id: str, kind: CheckpointKind, name: str) -> CheckpointRecord | None:
        row = await self._database.read(lambda cursor: cursor.row(_GET, _key(run_id, kind, name)))
        return None if row is None else _checkpoint(row)

    async def of_run(self, run_id: str) -> tuple[CheckpointRecord, ...]:
        """Newest first."""
        rows = await self._database.read(lambda cursor: cursor.rows(_OF_RUN, {"run": run_id}))
        return tuple(map(_checkpoint, rows))

    async def latest(self, run_id: str) -> Mapping[CheckpointKind, CheckpointRecord]:
        """The newest of each kind that the run has."""
        return {checkpoint.kind: checkpoint for checkpoint in reversed(await self.of_run(run_id))}

    async def list(self, tenant_id: str, limit: int, offset: int = 0) -> Page[CheckpointRecord]:
        """Newest first."""

        def work(cursor: Cursor) -> Page[CheckpointRecord]:
            rows = cursor.rows(_LIST, {"tenant_id": tenant_id, "limit": limit, "offset": offset})
            return Page(tuple(map(_checkpoint, rows)), cursor.number(_COUNT, {"tenant_id": tenant_id}))

        return await self._database.read(work)

    async def expired(self, now: float) -> tuple[CheckpointRecord, ...]:
        rows = await self._database.read(lambda cursor: cursor.rows(_EXPIRED, {"now": now}))
        return tuple(map(_checkpoint, rows))

    async def begin_delete(self, checkpoint: CheckpointRecord, event: str = "checkpoint_delete") -> None:
        """Make a checkpoint expired, so that nobody can use it any more. ``event``: what the audit log calls this.

        Its files are deleted next, then its record (:meth:`finish_delete`). If the process dies in between, the record
        is among the expired ones, and the next maintenance deletes both.
        """
        key = _key(checkpoint.run_id, checkpoint.kind, checkpoint.name)

        def work(cursor: Cursor) -> None:
            row = cursor.row(_GET, key)
            if row is not None and row["directory"] == checkpoint.directory and row["expires_at"] != _DELETED:
                cursor.execute(_SET_EXPIRY, key | {"expires_at": _DELETED})
                _tell(cursor, checkpoint, event, time.time())

        await self._database.write(work)

    async def lie_in(self, directory: str) -> bool:
        """Return whether a checkpoint's files are in this directory."""
        return await self._database.read(lambda cursor: cursor.number(_AT, {"place": directory})) > 0

    async def finish_delete(self, checkpoint: CheckpointRecord) -> None:
        """Delete the record, unless another checkpoint has its name by now."""
        key = _key(checkpoint.run_id, checkpoint.kind, checkpoint.name)

        def work(cursor: Cursor) -> None:
            row = cursor.row(_GET, key)
            if row is not None and row["directory"] == checkpoint.directory:
                cursor.execute(_DELETE, key)

        await self._database.write(work)

    async def set_expiry(self, run_id: str, kind: CheckpointKind, name: str, expires_at: float | None) -> bool:
        """Whether there is such a checkpoint."""
        return await self._change(_SET_EXPIRY, _key(run_id, kind, name), "checkpoint_set_ttl", "expires_at", expires_at)

    async def set_public(self, run_id: str, kind: CheckpointKind, name: str, public: bool) -> bool:
        """Whether there is such a checkpoint."""
        event = "checkpoint_publish" if public else "checkpoint_unpublish"
        return await self._change(_SET_PUBLIC, _key(run_id, kind, name), event, "public", int(public))

    async def _change(self, statement: Update, key: Row, event: str, column: str, value: float | None) -> bool:
        def work(cursor: Cursor) -> bool:
            row = cursor.row(_GET, key)
            if row is None:
                return False
            if row[column] != value:
                cursor.execute(statement, key | {column: value})
                _tell(cursor, _checkpoint(row), event, time.time(), **{column: value})
            return True

        return await self._database.write(work)

    async def of_session(self, session_id: str) -> tuple[int, int]:
        """How many the runs of a session have, and how large they are together."""
        row = await self._database.read(lambda cursor: cursor.row(_SUMS, {"session": session_id}))
        assert row is not None, "sums have a row"
        return int(row["count"]), int(row["bytes"])


def _tell(cursor: Cursor, checkpoint: CheckpointRecord, event: str, now: float, **details: float | None) -> None:
    path = f"tinker://{checkpoint.run_id}/{checkpoint.kind}/{checkpoint.name}"
    about = {"model_id": checkpoint.run_id, "tinker_path": path, **details}
    add_entry(cursor, checkpoint.tenant_id, event, now, about)


def _key(run_id: str, kind: CheckpointKind, name: str) -> Row:
    return {"run": run_id, "kind_": kind, "name_": name}


def _row(checkpoint: CheckpointRecord) -> Row:
    return {
        "run_id": checkpoint.run_id,
        "kind": checkpoint.kind,
        "name": checkpoint.name,
        "tenant_id": checkpoint.tenant_id,
        "request_id": checkpoint.request_id,
        "directory": checkpoint.directory,
        "created_at": checkpoint.created_at,
        "size_bytes": checkpoint.size_bytes,
        "expires_at": checkpoint.expires_at,
        "public": int(checkpoint.public),
        "user_metadata": json.dumps(dict(checkpoint.user_metadata)),
    }


def _checkpoint(row: Row) -> CheckpointRecord:
    return CheckpointRecord(
        run_id=row["run_id"],
        kind=row["kind"],
        name=row["name"],
        tenant_id=row["tenant_id"],
        request_id=row["request_id"],
        directory=row["directory"],
        created_at=row["created_at"],
        size_bytes=row["size_bytes"],
        expires_at=row["expires_at"],
        public=bool(row["public"]),
        user_metadata=json.loads(row["user_metadata"]),
    )
