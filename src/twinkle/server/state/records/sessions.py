"""Sessions, which live as long as their client sends signs of life, and the custom losses that belong to them."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Literal

from sqlalchemy import and_, bindparam, delete, exists, func, insert, or_, select, update

from twinkle.errors import QuotaError
from twinkle.server.state.database.database import Cursor, Database, Page, Row
from twinkle.server.state.database.tables import CUSTOM_LOSSES, RUNS, SESSIONS
from twinkle.server.state.records.audit import add_entry
from twinkle.server.state.records.damage import raise_if_damaged
from twinkle.server.types import CustomLossRecord, FinishReason, SessionRecord

__all__ = ["SESSION_ROWS", "CustomLosses", "Sessions"]

SESSION_ROWS = "max_session_rows_per_tenant"
_DELETE_CHECKPOINTS = (
    "sessions that ended are forgotten once they have no checkpoints: delete checkpoints that nobody needs"
)
_END_OF_TIME = 1e18  # seconds

_OF_TENANT = SESSIONS.c.tenant_id == bindparam("tenant_id")
_OF_ID = SESSIONS.c.session_id == bindparam("id")
_ACTIVE = SESSIONS.c.state == "active"

_INSERT = insert(SESSIONS)
_GET = select(SESSIONS).where(_OF_ID)
_BY_KEY = select(SESSIONS).where(_OF_TENANT, SESSIONS.c.idempotency_key == bindparam("idempotency_key"))
_COUNT = select(func.count()).select_from(SESSIONS).where(_OF_TENANT)
_LIST = (
    select(SESSIONS)
    .where(_OF_TENANT)
    .order_by(SESSIONS.c.created_at.desc(), SESSIONS.c.session_id)
    .limit(bindparam("limit"))
    .offset(bindparam("offset"))
)
_AFTER = (
    select(SESSIONS)
    .where(
        _OF_TENANT,
        or_(
            SESSIONS.c.created_at < bindparam("created_at"),
            and_(SESSIONS.c.created_at == bindparam("created_at"), SESSIONS.c.session_id > bindparam("id")),
        ),
    )
    .order_by(SESSIONS.c.created_at.desc(), SESSIONS.c.session_id)
    .limit(bindparam("limit"))
)
_SILENT = select(SESSIONS).where(_ACTIVE, SESSIONS.c.last_seen < bindparam("before")).order_by(SESSIONS.c.last_seen)
_SILENT_OF_TENANT = (
    select(SESSIONS)
    .where(_OF_TENANT, _ACTIVE, SESSIONS.c.last_seen < bindparam("before"))
    .order_by(SESSIONS.c.last_seen)
)
_TOUCH = (
    update(SESSIONS)
    .where(_OF_ID, _ACTIVE, SESSIONS.c.last_seen < bindparam("seen"))
    .values(last_seen=bindparam("seen"))
)
_END = (
    update(SESSIONS)
    .where(_OF_ID, _ACTIVE)
    .values(state=bindparam("end"), finish_reason=bindparam("reason"), finish_detail=bindparam("detail"))
)
_SET_METADATA = update(SESSIONS).where(_OF_ID).values(user_metadata=bindparam("user_metadata"))
_COUNT_ACTIVE = select(func.count()).select_from(SESSIONS).where(_ACTIVE)
_COUNT_ACTIVE_OF_TENANT = select(func.count()).select_from(SESSIONS).where(_OF_TENANT, _ACTIVE)
_SET_PROJECT = update(SESSIONS).where(_OF_ID).values(project_id=bindparam("project_id"))
_FORGIVE = update(SESSIONS).where(_ACTIVE).values(last_seen=bindparam("now"))


class Sessions:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(
        self,
        session: SessionRecord,
        idempotency_key: str | None = None,
        most: int | None = None,
        most_rows: int | None = None,
    ) -> SessionRecord:
        """The session, or the one that this tenant created with the same key before.

        ``most``: active sessions of the tenant, ``most_rows``: all that are on record; where there are as many,
        QuotaError.
        """

        def work(cursor: Cursor) -> SessionRecord | QuotaError:
            if idempotency_key is not None:
                row = cursor.row(_BY_KEY, {"tenant_id": session.tenant_id, "idempotency_key": idempotency_key})
                if row is not None:
                    return _session(row)
            tenant = {"tenant_id": session.tenant_id}
            # Errors are returned: raised here they would have the transaction, which others share, done again.
            if most is not None and cursor.number(_COUNT_ACTIVE_OF_TENANT, tenant) >= most:
                return QuotaError("active sessions", most, most, "max_sessions_per_tenant")
            if most_rows is not None and cursor.number(_COUNT, tenant) >= most_rows:
                return QuotaError("sessions on record", most_rows, most_rows, SESSION_ROWS, _DELETE_CHECKPOINTS)
            cursor.execute(_INSERT, _row(session) | {"idempotency_key": idempotency_key})
            details = {"session_id": session.session_id, "project_id": session.project_id}
            add_entry(cursor, session.tenant_id, "session_create", session.created_at, details)
            return session

        made = await self._database.write(work)
        if isinstance(made, QuotaError):
            raise made
        return made

    async def get(self, session_id: str) -> SessionRecord | None:
        row = await self._database.read(lambda cursor: cursor.row(_GET, {"id": session_id}))
        return None if row is None else _session(row)

    async def list(self, tenant_id: str, limit: int, offset: int = 0) -> Page[SessionRecord]:
        """Newest first."""

        def work(cursor: Cursor) -> Page[SessionRecord]:
            rows = cursor.rows(_LIST, {"tenant_id": tenant_id, "limit": limit, "offset": offset})
            return Page(tuple(map(_session, rows)), cursor.number(_COUNT, {"tenant_id": tenant_id}))

        return await self._database.read(work)

    async def after(self, tenant_id: str, last: SessionRecord | None, limit: int) -> tuple[SessionRecord, ...]:
        """Those that follow ``last`` in the order of :meth:`list`, from the first one on without it."""
        created_at, session_id = (_END_OF_TIME, "") if last is None else (last.created_at, last.session_id)
        parameters = {"tenant_id": tenant_id, "created_at": created_at, "id": session_id, "limit": limit}
        rows = await self._database.read(lambda cursor: cursor.rows(_AFTER, parameters))
        return tuple(map(_session, rows))

    async def silent(self, before: float) -> tuple[SessionRecord, ...]:
        """Active sessions last seen before that time, longest silent first."""
        rows = await self._database.read(lambda cursor: cursor.rows(_SILENT, {"before": before}))
        return tuple(map(_session, rows))

    async def silent_of(self, tenant_id: str, before: float) -> tuple[SessionRecord, ...]:
        """Return a tenant's active sessions last seen before that time, longest silent first."""
        parameters = {"tenant_id": tenant_id, "before": before}
        rows = await self._database.read(lambda cursor: cursor.rows(_SILENT_OF_TENANT, parameters))
        return tuple(map(_session, rows))

    async def touch(self, last_seen: Mapping[str, float]) -> None:
        """Note signs of life by session id. Sessions that are over stay over; time never runs backwards."""
        seen = [{"id": session_id, "seen": time} for session_id, time in last_seen.items()]
        await self._database.write(lambda cursor: cursor.execute_many(_TOUCH, seen))

    async def end(
        self,
        session_id: str,
        state: Literal["finished", "expired"],
        now: float,
        reason: FinishReason | None = None,
        detail: str | None = None,
    ) -> bool:
        """Whether it was active. Of one that had ended before, state and reason stay what they are."""
        parameters = {"id": session_id, "end": state, "reason": reason, "detail": detail}

        def work(cursor: Cursor) -> bool:
            if not cursor.execute(_END, parameters):
                return False
            row = cursor.row(_GET, {"id": session_id})
            assert row is not None, "it was just changed"
            event = "session_finish" if state == "finished" else "session_expire"
            add_entry(cursor, row["tenant_id"], event, now, {"session_id": session_id, "reason": reason})
            return True

        return await self._database.write(work)

    async def note(self, session_id: str, key: str, name: str, value: object) -> None:
        """Set ``user_metadata[key][name]`` of a session that exists."""

        def work(cursor: Cursor) -> None:
            row = cursor.row(_GET, {"id": session_id})
            assert row is not None, "the caller has the session"
            metadata = json.loads(row["user_metadata"])
            metadata[key] = {**metadata.get(key, {}), name: value}
            cursor.execute(_SET_METADATA, {"id": session_id, "user_metadata": json.dumps(metadata)})

        await self._database.write(work)

    async def active(self) -> int:
        """How many there are."""
        return await self._database.read(lambda cursor: cursor.number(_COUNT_ACTIVE, {}))

    async def set_project(self, session: SessionRecord, project_id: str, now: float) -> None:
        parameters = {"id": session.session_id, "project_id": project_id}

        def work(cursor: Cursor) -> None:
            cursor.execute(_SET_PROJECT, parameters)
            details = {"session_id": session.session_id, "project_id": project_id}
            add_entry(cursor, session.tenant_id, "project_assign", now, details)

        await self._database.write(work)

    async def forgive_downtime(self, now: float) -> int:
        """Count all active sessions as seen now, because nobody could reach a server that was down; how many."""
        return await self._database.write(lambda cursor: cursor.execute(_FORGIVE, {"now": now}))


def _row(session: SessionRecord) -> Row:
    return {
        "session_id": session.session_id,
        "tenant_id": session.tenant_id,
        "created_at": session.created_at,
        "last_seen": session.last_seen,
        "state": session.state,
        "sdk_version": session.sdk_version,
        "display_name": session.display_name,
        "project_id": session.project_id,
        "tags": json.dumps(session.tags),
        "user_metadata": json.dumps(dict(session.user_metadata)),
        "finish_reason": session.finish_reason,
        "finish_detail": session.finish_detail,
    }


def _session(row: Row) -> SessionRecord:
    return SessionRecord(
        session_id=row["session_id"],
        tenant_id=row["tenant_id"],
        created_at=row["created_at"],
        last_seen=row["last_seen"],
        state=row["state"],
        sdk_version=row["sdk_version"],
        display_name=row["display_name"],
        project_id=row["project_id"],
        tags=tuple(json.loads(row["tags"])),
        user_metadata=json.loads(row["user_metadata"]),
        finish_reason=row["finish_reason"],
        finish_detail=row["finish_detail"],
    )


_INSERT_LOSS = insert(CUSTOM_LOSSES)
_GET_LOSS = select(CUSTOM_LOSSES).where(CUSTOM_LOSSES.c.loss_id == bindparam("id"))
_COUNT_LOSSES = (
    select(func.count()).select_from(CUSTOM_LOSSES).where(CUSTOM_LOSSES.c.tenant_id == bindparam("tenant_id"))
)
# An adapter of a session that ended may still have to be brought back from its journal before it can be parked.
_PRUNE_LOSSES = delete(CUSTOM_LOSSES).where(
    ~exists().where(SESSIONS.c.session_id == CUSTOM_LOSSES.c.session_id, SESSIONS.c.state == "active"),
    ~exists().where(RUNS.c.session_id == CUSTOM_LOSSES.c.session_id, RUNS.c.state == "live"),
)


class CustomLosses:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, loss: CustomLossRecord, limit: int) -> CustomLossRecord | None:
        """The loss, or the one of this id that there is already; None where its tenant has ``limit`` of them."""

        def work(cursor: Cursor) -> CustomLossRecord | None:
            row = cursor.row(_GET_LOSS, {"id": loss.loss_id})
            if row is not None:
                return _record(row)
            if cursor.number(_COUNT_LOSSES, {"tenant_id": loss.tenant_id}) >= limit:
                return None
            cursor.execute(_INSERT_LOSS, asdict(loss))
            return loss

        return await self._database.write(work)

    async def get(self, loss_id: str) -> CustomLossRecord | None:
        def work(cursor: Cursor) -> CustomLossRecord | None:
            row = cursor.row(_GET_LOSS, {"id": loss_id})
            if row is None:
                raise_if_damaged(cursor, f"custom loss {loss_id}")
                return None
            return _record(row)

        return await self._database.read(work)

    async def prune(self) -> int:
        """Drop those of sessions that ended, once nothing of the session's can need them; how many."""
        return await self._database.write(lambda cursor: cursor.execute(_PRUNE_LOSSES, {}))


def _record(row: Row) -> CustomLossRecord:
    return CustomLossRecord(**{**row, "digest": bytes(row["digest"]), "body": bytes(row["body"])})
