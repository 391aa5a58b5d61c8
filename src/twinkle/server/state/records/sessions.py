"""Sessions, which are active until their client finishes them or falls silent, and the custom losses in them."""

import json
from collections.abc import Mapping
from typing import Literal

from sqlalchemy import and_, bindparam, delete, exists, func, or_, select, update

from twinkle.errors import LimitReachedError
from twinkle.server.state.database.database import Cursor, Page
from twinkle.server.state.database.mapper import RecordMapper
from twinkle.server.state.database.tables import CUSTOM_LOSSES, RUNS, SESSIONS
from twinkle.server.state.records.area import Area, in_read, in_write
from twinkle.server.state.records.audit import add_entry
from twinkle.server.state.records.damage import raise_if_damaged
from twinkle.server.types import CustomLossRecord, FinishReason, SessionRecord

SESSION_ROWS = "max_session_rows_per_tenant"
_DELETE_CHECKPOINTS = (
    "sessions that ended are deleted once they have no checkpoints: delete checkpoints that you do not need"
)
_END_OF_TIME = 1e18  # seconds

_SESSION = RecordMapper(SessionRecord, SESSIONS)
_OF_TENANT = SESSIONS.c.tenant_id == bindparam("tenant_id")
_OF_ID = SESSIONS.c.session_id == bindparam("id")
_ACTIVE = SESSIONS.c.state == "active"
_NEWEST_FIRST = (SESSIONS.c.created_at.desc(), SESSIONS.c.session_id)

_COUNT = select(func.count()).select_from(SESSIONS).where(_OF_TENANT)
_FIRST = select(SESSIONS).where(_OF_TENANT).order_by(*_NEWEST_FIRST).limit(bindparam("limit"))
_LIST = _FIRST.offset(bindparam("offset"))
_AFTER = _FIRST.where(
    or_(
        SESSIONS.c.created_at < bindparam("created_at"),
        and_(SESSIONS.c.created_at == bindparam("created_at"), SESSIONS.c.session_id > bindparam("id")),
    )
)
_SILENT = select(SESSIONS).where(_ACTIVE, SESSIONS.c.last_seen < bindparam("before")).order_by(SESSIONS.c.last_seen)
_SILENT_OF_TENANT = _SILENT.where(_OF_TENANT)
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
_FORGIVE = update(SESSIONS).where(_ACTIVE).values(last_seen=bindparam("now"))


class Sessions(Area):
    """The sessions of all tenants: creating, listing and ending them, and the times of their heartbeats."""

    @in_write
    def create(
        self,
        cursor: Cursor,
        session: SessionRecord,
        idempotency_key: str | None = None,
        most: int | None = None,
        most_rows: int | None = None,
    ) -> SessionRecord | LimitReachedError:
        """Store a session and return it, or the one that this tenant created before with the same idempotency key.

        Raises LimitReachedError for a new one if the tenant has ``most`` active sessions, or ``most_rows`` sessions on
        record.
        """
        tenant = {"tenant_id": session.tenant_id}
        if idempotency_key is not None:
            known = _SESSION.find(cursor, **tenant, idempotency_key=idempotency_key)
            if known is not None:
                return known
        if most is not None and cursor.count(SESSIONS, **tenant, state="active") >= most:
            return LimitReachedError("active sessions", most, most, "max_sessions_per_tenant")
        if most_rows is not None and cursor.count(SESSIONS, **tenant) >= most_rows:
            return LimitReachedError("sessions on record", most_rows, most_rows, SESSION_ROWS, _DELETE_CHECKPOINTS)
        _SESSION.insert(cursor, session, idempotency_key=idempotency_key)
        details = {"session_id": session.session_id, "project_id": session.project_id}
        add_entry(cursor, session.tenant_id, "session_create", session.created_at, details)
        return session

    async def get(self, session_id: str) -> SessionRecord | None:
        return await self._find(_SESSION, session_id=session_id)

    async def list(self, tenant_id: str, limit: int, offset: int = 0) -> Page[SessionRecord]:
        """Return a page of a tenant's sessions, newest first."""
        return await self._page(_SESSION, _LIST, _COUNT, tenant_id=tenant_id, limit=limit, offset=offset)

    async def after(self, tenant_id: str, last: SessionRecord | None, limit: int) -> tuple[SessionRecord, ...]:
        """Return at most ``limit`` sessions that follow ``last`` in the order of :meth:`list`; with None, the first."""
        created_at, session_id = (_END_OF_TIME, "") if last is None else (last.created_at, last.session_id)
        return await self._all(_SESSION, _AFTER, tenant_id=tenant_id, created_at=created_at, id=session_id, limit=limit)

    async def silent(self, before: float) -> tuple[SessionRecord, ...]:
        """Return the active sessions whose last heartbeat was before this time, the longest silent first."""
        return await self._all(_SESSION, _SILENT, before=before)

    async def silent_of(self, tenant_id: str, before: float) -> tuple[SessionRecord, ...]:
        """Return a tenant's active sessions whose last heartbeat was before this time, the longest silent first."""
        return await self._all(_SESSION, _SILENT_OF_TENANT, tenant_id=tenant_id, before=before)

    async def touch(self, last_seen: Mapping[str, float]) -> None:
        """Store the times of heartbeats by session id. Sessions that have ended, and older times, are ignored."""
        await self._execute_many(_TOUCH, [{"id": session_id, "seen": time} for session_id, time in last_seen.items()])

    @in_write
    def end(
        self,
        cursor: Cursor,
        session_id: str,
        state: Literal["finished", "expired"],
        now: float,
        reason: FinishReason | None = None,
        detail: str | None = None,
    ) -> bool:
        """End a session; return whether it was active. A session that had ended before keeps its state and reason."""
        parameters = {"id": session_id, "end": state, "reason": reason, "detail": detail}
        if not cursor.execute(_END, parameters):
            return False
        session = _existing(cursor, session_id)
        event = "session_finish" if state == "finished" else "session_expire"
        add_entry(cursor, session.tenant_id, event, now, {"session_id": session_id, "reason": reason})
        return True

    @in_write
    def remember(self, cursor: Cursor, session_id: str, key: str, name: str, value: object) -> None:
        """Set ``user_metadata[key][name]`` of an existing session."""
        metadata: dict[str, object] = dict(_existing(cursor, session_id).user_metadata)
        noted = metadata.get(key, {})
        assert isinstance(noted, dict), "it was made here"
        metadata[key] = {**noted, name: value}
        cursor.update(SESSIONS, {"session_id": session_id}, user_metadata=json.dumps(metadata))

    async def active(self) -> int:
        """Return the number of active sessions."""
        return await self._database.read(lambda cursor: cursor.count(SESSIONS, state="active"))

    @in_write
    def set_project(self, cursor: Cursor, session: SessionRecord, project_id: str, now: float) -> None:
        details = {"session_id": session.session_id, "project_id": project_id}
        cursor.update(SESSIONS, {"session_id": session.session_id}, project_id=project_id)
        add_entry(cursor, session.tenant_id, "project_assign", now, details)

    async def extend_deadlines_after_downtime(self, now: float) -> int:
        """Set the last heartbeat of all active sessions to now: no client could send one while the server was down.

        Return the number of sessions.
        """
        return await self._execute(_FORGIVE, now=now)


def _existing(cursor: Cursor, session_id: str) -> SessionRecord:
    session = _SESSION.find(cursor, session_id=session_id)
    assert session is not None, "the caller has it"
    return session


# --- custom losses ----------------------------------------------------------------------------------------------------

_LOSS = RecordMapper(CustomLossRecord, CUSTOM_LOSSES)
# After a session has ended, its live adapters may still have to be recovered from the journal before they are evicted.
# Replay needs their losses.
_PRUNE_LOSSES = delete(CUSTOM_LOSSES).where(
    ~exists().where(SESSIONS.c.session_id == CUSTOM_LOSSES.c.session_id, SESSIONS.c.state == "active"),
    ~exists().where(RUNS.c.session_id == CUSTOM_LOSSES.c.session_id, RUNS.c.state == "live"),
)


class CustomLossRecords(Area):
    """The custom losses of all sessions: the request bodies from which loss graphs are built."""

    @in_write
    def create(self, cursor: Cursor, loss: CustomLossRecord, limit: int) -> CustomLossRecord | None:
        """Store a loss and return it, or the existing one with this id; None if its tenant has ``limit`` losses."""
        known = _LOSS.find(cursor, loss_id=loss.loss_id)
        if known is not None:
            return known
        if cursor.count(CUSTOM_LOSSES, tenant_id=loss.tenant_id) >= limit:
            return None
        _LOSS.insert(cursor, loss)
        return loss

    @in_read
    def get(self, cursor: Cursor, loss_id: str) -> CustomLossRecord | None:
        """Return a loss; None if there is none; DamagedRecordError if its record was removed because of damage."""
        found = _LOSS.find(cursor, loss_id=loss_id)
        if found is None:
            raise_if_damaged(cursor, f"custom loss {loss_id}")
        return found

    async def prune(self) -> int:
        """Delete the losses of sessions that have ended and have no live run; return how many."""
        return await self._execute(_PRUNE_LOSSES)
