"""Runs, each the life of an adapter from its creation to long after it left the device, and their snapshots.

A run has at most one snapshot: the state from which its adapter is recovered. Ops that it covers need no journal.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Literal

from sqlalchemy import bindparam, delete, func, insert, or_, select, update

from twinkle.errors import QuotaError
from twinkle.model.types import LoraSpec
from twinkle.server.state.database.database import Cursor, Database, Page, Row
from twinkle.server.state.database.tables import OPS, RUNS, SESSIONS, SNAPSHOTS
from twinkle.server.state.records.sessions import SESSION_ROWS
from twinkle.server.types import OpKind, RunRecord, SnapshotRecord

__all__ = ["RunState", "Runs", "Snapshots", "insert_run"]

RunState = Literal["live", "failed", "parked"]

_DELETE_CHECKPOINTS = (
    "runs of sessions that ended are forgotten once they have no checkpoints: delete checkpoints that nobody needs"
)
_OF_ID = RUNS.c.run_id == bindparam("id")
_OF_TENANT = RUNS.c.tenant_id == bindparam("tenant_id")
_OF_PROJECT = RUNS.c.session_id.in_(
    select(SESSIONS.c.session_id).where(SESSIONS.c.project_id == bindparam("project_id"))
)

_INSERT = insert(RUNS)
_GET = select(RUNS).where(_OF_ID)
_BY_NUMBER = select(RUNS).where(RUNS.c.session_id == bindparam("session_id"), RUNS.c.number == bindparam("number"))
_OF_SESSION = select(RUNS).where(RUNS.c.session_id == bindparam("session_id")).order_by(RUNS.c.number)
_IN_STATE = select(RUNS).where(RUNS.c.state == bindparam("state")).order_by(RUNS.c.created_at, RUNS.c.run_id)
_LIVE_NOTED = (
    select(RUNS)
    .where(RUNS.c.state == "live", RUNS.c.note == bindparam("note"))
    .order_by(RUNS.c.created_at, RUNS.c.run_id)
)
_LEFT_BEHIND = (
    select(RUNS)
    .join(SESSIONS, SESSIONS.c.session_id == RUNS.c.session_id)
    .where(RUNS.c.state == "live", SESSIONS.c.state != "active")
    .order_by(RUNS.c.created_at, RUNS.c.run_id)
)
_COUNT_LIVE = (
    select(func.count())
    .select_from(RUNS.join(SESSIONS, SESSIONS.c.session_id == RUNS.c.session_id))
    .where(_OF_TENANT, RUNS.c.state == "live", SESSIONS.c.state == "active")
)
_LIVE_OF_TENANT = (
    select(RUNS)
    .join(SESSIONS, SESSIONS.c.session_id == RUNS.c.session_id)
    .where(_OF_TENANT, RUNS.c.state == "live", SESSIONS.c.state == "active")
    .order_by(RUNS.c.created_at, RUNS.c.run_id)
)
_LIVE_BY_REPLICA = (
    select(RUNS.c.replica, func.count().label("runs"))
    .where(RUNS.c.state == "live", RUNS.c.model_name == bindparam("model_name"))
    .group_by(RUNS.c.replica)
)
_COUNT = select(func.count()).select_from(RUNS).where(_OF_TENANT)
_LIST = (
    select(RUNS)
    .where(_OF_TENANT)
    .order_by(RUNS.c.last_request_at.desc(), RUNS.c.run_id)
    .limit(bindparam("limit"))
    .offset(bindparam("offset"))
)
_COUNT_OF_PROJECT = _COUNT.where(_OF_PROJECT)
_LIST_OF_PROJECT = _LIST.where(_OF_PROJECT)
_SET_STATE = update(RUNS).where(_OF_ID).values(state=bindparam("state"), note=bindparam("note"))
_NOTE_LIVE = update(RUNS).where(_OF_ID, RUNS.c.state == "live").values(note=bindparam("note"))
_TOUCH = (
    update(RUNS).where(_OF_ID, RUNS.c.last_request_at < bindparam("time")).values(last_request_at=bindparam("time"))
)


class Runs:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, run: RunRecord) -> RunRecord:
        """The run, or the one with this number that its session has already."""
        made = await self._database.write(lambda cursor: insert_run(cursor, run))
        assert isinstance(made, RunRecord), "without a limit there is room"
        return made

    async def get(self, run_id: str) -> RunRecord | None:
        row = await self._database.read(lambda cursor: cursor.row(_GET, {"id": run_id}))
        return None if row is None else _run(row)

    async def by_number(self, session_id: str, number: int) -> RunRecord | None:
        parameters = {"session_id": session_id, "number": number}
        row = await self._database.read(lambda cursor: cursor.row(_BY_NUMBER, parameters))
        return None if row is None else _run(row)

    async def of_session(self, session_id: str) -> tuple[RunRecord, ...]:
        """By number."""
        rows = await self._database.read(lambda cursor: cursor.rows(_OF_SESSION, {"session_id": session_id}))
        return tuple(map(_run, rows))

    async def in_state(self, state: RunState) -> tuple[RunRecord, ...]:
        """Oldest first."""
        rows = await self._database.read(lambda cursor: cursor.rows(_IN_STATE, {"state": state}))
        return tuple(map(_run, rows))

    async def left_behind(self) -> tuple[RunRecord, ...]:
        """Live ones of sessions that have ended, oldest first."""
        rows = await self._database.read(lambda cursor: cursor.rows(_LEFT_BEHIND, {}))
        return tuple(map(_run, rows))

    async def live_of_tenant(self, tenant_id: str) -> tuple[RunRecord, ...]:
        """Return the runs that count against a tenant's limit of adapters, oldest first."""
        rows = await self._database.read(lambda cursor: cursor.rows(_LIVE_OF_TENANT, {"tenant_id": tenant_id}))
        return tuple(map(_run, rows))

    async def live_noted(self, note: str) -> tuple[RunRecord, ...]:
        """Live ones with this note, oldest first."""
        rows = await self._database.read(lambda cursor: cursor.rows(_LIVE_NOTED, {"note": note}))
        return tuple(map(_run, rows))

    async def live_by_replica(self, model_name: str) -> dict[str, int]:
        """How many live runs of a base model each replica of it has."""
        rows = await self._database.read(lambda cursor: cursor.rows(_LIVE_BY_REPLICA, {"model_name": model_name}))
        return {row["replica"]: row["runs"] for row in rows}

    async def list(self, tenant_id: str, limit: int, offset: int = 0, project_id: str | None = None) -> Page[RunRecord]:
        """The one with the newest request first; ``project_id`` keeps those whose session belongs to it."""
        listing, count = (_LIST, _COUNT) if project_id is None else (_LIST_OF_PROJECT, _COUNT_OF_PROJECT)
        parameters = {"tenant_id": tenant_id, "project_id": project_id, "limit": limit, "offset": offset}

        def work(cursor: Cursor) -> Page[RunRecord]:
            return Page(tuple(map(_run, cursor.rows(listing, parameters))), cursor.number(count, parameters))

        return await self._database.read(work)

    async def set_state(self, run_id: str, state: RunState, note: str | None = None) -> None:
        parameters = {"id": run_id, "state": state, "note": note}
        await self._database.write(lambda cursor: cursor.execute(_SET_STATE, parameters))

    async def note_live(self, run_id: str, note: str) -> None:
        """Of a run that is live; one that has just left keeps the note that it left with."""
        await self._database.write(lambda cursor: cursor.execute(_NOTE_LIVE, {"id": run_id, "note": note}))

    async def touch(self, last_request_at: Mapping[str, float]) -> None:
        """Note the time of the newest request by run id."""
        times = [{"id": run_id, "time": time} for run_id, time in last_request_at.items()]
        await self._database.write(lambda cursor: cursor.execute_many(_TOUCH, times))


def insert_run(
    cursor: Cursor, run: RunRecord, most: int | None = None, most_rows: int | None = None
) -> RunRecord | QuotaError:
    """Inside a write: the run, or the one with this number that its session has already.

    QuotaError: the tenant has ``most`` live ones, or ``most_rows`` on record. Live ones of a session that has ended do
    not count: they are being parked.
    """
    row = cursor.row(_BY_NUMBER, {"session_id": run.session_id, "number": run.number})
    if row is not None:
        return _run(row)
    tenant = {"tenant_id": run.tenant_id}
    if most is not None and cursor.number(_COUNT_LIVE, tenant) >= most:
        return QuotaError("adapters", most, most, "max_adapters_per_tenant")
    if most_rows is not None and cursor.number(_COUNT, tenant) >= most_rows:
        return QuotaError("training runs on record", most_rows, most_rows, SESSION_ROWS, _DELETE_CHECKPOINTS)
    cursor.execute(_INSERT, _row(run))
    return run


def _row(run: RunRecord) -> Row:
    return {
        "run_id": run.run_id,
        "session_id": run.session_id,
        "number": run.number,
        "tenant_id": run.tenant_id,
        "base_model": run.base_model,
        "model_name": run.model_name,
        "spec": json.dumps(asdict(run.spec)),
        "created_at": run.created_at,
        "last_request_at": run.last_request_at,
        "state": run.state,
        "user_metadata": json.dumps(dict(run.user_metadata)),
        "note": run.note,
        "replica": run.replica,
    }


def _run(row: Row) -> RunRecord:
    return RunRecord(
        run_id=row["run_id"],
        session_id=row["session_id"],
        number=row["number"],
        tenant_id=row["tenant_id"],
        base_model=row["base_model"],
        model_name=row["model_name"],
        spec=_spec(json.loads(row["spec"])),
        created_at=row["created_at"],
        last_request_at=row["last_request_at"],
        state=row["state"],
        user_metadata=json.loads(row["user_metadata"]),
        note=row["note"],
        replica=row["replica"],
    )


def _spec(fields: Row) -> LoraSpec:
    targets = fields.pop("target_modules")
    return LoraSpec(**fields, target_modules=tuple(targets) if isinstance(targets, list) else targets)


_OF_ADAPTER = SNAPSHOTS.c.adapter_id == bindparam("id")

_INSERT_SNAPSHOT = insert(SNAPSHOTS)
_GET_SNAPSHOT = select(SNAPSHOTS).where(_OF_ADAPTER)
_DELETE_SNAPSHOT = delete(SNAPSHOTS).where(_OF_ADAPTER)
# An op between the snapshot and ``new_seq`` that may have changed its adapter, or has no outcome on record yet.
_MATTERING = (
    select(func.count())
    .select_from(OPS)
    .where(
        OPS.c.adapter_id == bindparam("id"),
        OPS.c.seq > bindparam("after"),
        OPS.c.seq <= bindparam("new_seq"),
        or_(OPS.c.kind != OpKind.FORWARD.value, OPS.c.finished_at.is_(None)),
    )
)


class Snapshots:
    """One an adapter."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def set(self, snapshot: SnapshotRecord) -> SnapshotRecord | None:
        """The one that it replaces, whose directory is now nobody's."""

        def work(cursor: Cursor) -> SnapshotRecord | None:
            row = cursor.row(_GET_SNAPSHOT, {"id": snapshot.adapter_id})
            cursor.execute(_DELETE_SNAPSHOT, {"id": snapshot.adapter_id})
            cursor.execute(_INSERT_SNAPSHOT, asdict(snapshot))
            return None if row is None else SnapshotRecord(**row)

        return await self._database.write(work)

    async def advance(self, adapter_id: str, seq: int, failed_seq: int | None) -> bool:
        """Let the adapter's snapshot cover all ops up to ``seq`` too, none of which changed the adapter.

        Only for adapters of Tinker's protocol, whose forward passes leave nothing behind. Returns False and changes
        nothing where one of these ops is not an answered forward pass, or where there is no snapshot.
        """

        def work(cursor: Cursor) -> bool:
            row = cursor.row(_GET_SNAPSHOT, {"id": adapter_id})
            if row is None:
                return False
            if row["seq"] >= seq:
                return True
            if cursor.number(_MATTERING, {"id": adapter_id, "after": row["seq"], "new_seq": seq}):
                return False
            cursor.execute(_DELETE_SNAPSHOT, {"id": adapter_id})
            cursor.execute(_INSERT_SNAPSHOT, asdict(replace(SnapshotRecord(**row), seq=seq, failed_seq=failed_seq)))
            return True

        return await self._database.write(work)

    async def get(self, adapter_id: str) -> SnapshotRecord | None:
        row = await self._database.read(lambda cursor: cursor.row(_GET_SNAPSHOT, {"id": adapter_id}))
        return None if row is None else SnapshotRecord(**row)

    async def delete(self, adapter_id: str) -> SnapshotRecord | None:
        """The one that there was."""

        def work(cursor: Cursor) -> SnapshotRecord | None:
            row = cursor.row(_GET_SNAPSHOT, {"id": adapter_id})
            cursor.execute(_DELETE_SNAPSHOT, {"id": adapter_id})
            return None if row is None else SnapshotRecord(**row)

        return await self._database.write(work)
