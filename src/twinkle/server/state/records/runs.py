"""Runs and their snapshots. A run is the life of one adapter; its row stays long after the adapter was evicted.

With ``train_mode: full`` a live run is also the record that its tenant holds the replica. Its state changes only after
its last weights are saved and the replica has those of the base model again, so that no run begins before that.

A run has at most one snapshot on record: the state from which its adapter is recovered. A snapshot covers the ops up to
its ``seq``; these are not replayed any more, so their bodies can be deleted from the journal.
"""

from collections.abc import Mapping
from typing import Literal

from sqlalchemy import bindparam, delete, exists, func, or_, select, update

from twinkle.errors import LimitReachedError
from twinkle.model.types import FullSpec
from twinkle.server.state.database.database import Cursor, Page
from twinkle.server.state.database.mapper import RecordMapper
from twinkle.server.state.database.tables import OPS, RUNS, SESSIONS, SNAPSHOTS
from twinkle.server.state.errors import Refusal, ReplicaHeldError
from twinkle.server.state.records.area import Area, in_write
from twinkle.server.state.records.sessions import SESSION_ROWS
from twinkle.server.types import OpKind, RunRecord, SnapshotRecord

RunState = Literal["live", "failed", "parked"]

_DELETE_CHECKPOINTS = (
    "runs of sessions that ended are deleted once they have no checkpoints: delete checkpoints that you do not need"
)
_RUN = RecordMapper(RunRecord, RUNS)
_OF_TENANT = RUNS.c.tenant_id == bindparam("tenant_id")
_IS_LIVE = RUNS.c.state == "live"
_OF_PROJECT = RUNS.c.session_id.in_(
    select(SESSIONS.c.session_id).where(SESSIONS.c.project_id == bindparam("project_id"))
)
_OLDEST_FIRST = (RUNS.c.created_at, RUNS.c.run_id)

_OF_SESSION = select(RUNS).where(RUNS.c.session_id == bindparam("session_id")).order_by(RUNS.c.number)
_IN_STATE = select(RUNS).where(RUNS.c.state == bindparam("state")).order_by(*_OLDEST_FIRST)
_LIVE_NOTED = select(RUNS).where(_IS_LIVE, RUNS.c.note == bindparam("note")).order_by(*_OLDEST_FIRST)
_LEFT_BEHIND = select(RUNS).join(SESSIONS).where(_IS_LIVE, SESSIONS.c.state != "active").order_by(*_OLDEST_FIRST)
# The runs that count against a tenant's limit of adapters. Runs of ended sessions do not: they will be evicted.
_COUNTED = (_OF_TENANT, _IS_LIVE, SESSIONS.c.state == "active")
_COUNT_LIVE = select(func.count()).select_from(RUNS.join(SESSIONS)).where(*_COUNTED)
_LIVE_OF_TENANT = select(RUNS).join(SESSIONS).where(*_COUNTED).order_by(*_OLDEST_FIRST)
_LIVE_BY_REPLICA = (
    select(RUNS.c.replica, func.count().label("runs"))
    .where(_IS_LIVE, RUNS.c.model_name == bindparam("model_name"))
    .group_by(RUNS.c.replica)
)
_LIVE_OF_MODEL = select(RUNS).where(_IS_LIVE, RUNS.c.model_name == bindparam("model_name")).order_by(*_OLDEST_FIRST)
_COUNT = select(func.count()).select_from(RUNS).where(_OF_TENANT)
_LIST = (
    select(RUNS)
    .where(_OF_TENANT)
    .order_by(RUNS.c.last_request_at.desc(), RUNS.c.run_id)
    .limit(bindparam("limit"))
    .offset(bindparam("offset"))
)
_COUNT_OF_OTHERS = select(func.count()).select_from(RUNS).where(RUNS.c.tenant_id != bindparam("tenant_id"))
_LATEST = select(RUNS).order_by(RUNS.c.last_request_at.desc(), RUNS.c.run_id)
_COUNT_OF_PROJECT = _COUNT.where(_OF_PROJECT)
_LIST_OF_PROJECT = _LIST.where(_OF_PROJECT)
# Runs that were never created, so that they have no ops, nor requests after the first.
_FORGET_REFUSED = delete(RUNS).where(
    RUNS.c.session_id == bindparam("session_id"),
    RUNS.c.state == "failed",
    RUNS.c.created_at < bindparam("before"),
    RUNS.c.last_request_at == RUNS.c.created_at,
    ~exists().where(OPS.c.adapter_id == RUNS.c.run_id),
)
_REFUSED_SECONDS = 600.0
_TOUCH = (
    update(RUNS)
    .where(RUNS.c.run_id == bindparam("id"), RUNS.c.last_request_at < bindparam("time"))
    .values(last_request_at=bindparam("time"))
)


class Runs(Area):
    """The runs of all tenants: storing and finding them, and changing their state, note and last request's time."""

    async def add(self, run: RunRecord) -> RunRecord:
        """Store a run and return it, or return the existing one of its session with this number."""
        return await self._database.write(lambda cursor: insert_run(cursor, run))

    @in_write
    def add_refused(self, cursor: Cursor, run: RunRecord) -> None:
        """Store a run that was not created, unless its number is in use; ``note`` says why it was not.

        Of earlier such runs of the session, those older than ten minutes are deleted: a client may ask again and again.
        """
        cursor.execute(_FORGET_REFUSED, {"session_id": run.session_id, "before": run.created_at - _REFUSED_SECONDS})
        if _RUN.find(cursor, session_id=run.session_id, number=run.number) is None:
            _RUN.insert(cursor, run)

    async def get(self, run_id: str) -> RunRecord | None:
        return await self._find(_RUN, run_id=run_id)

    async def of_session(self, session_id: str) -> tuple[RunRecord, ...]:
        """Return the runs of a session, by number."""
        return await self._all(_RUN, _OF_SESSION, session_id=session_id)

    async def in_state(self, state: RunState) -> tuple[RunRecord, ...]:
        """Return the runs in one state, oldest first."""
        return await self._all(_RUN, _IN_STATE, state=state)

    async def left_behind(self) -> tuple[RunRecord, ...]:
        """Return the live runs of sessions that have ended, oldest first."""
        return await self._all(_RUN, _LEFT_BEHIND)

    async def live_of_tenant(self, tenant_id: str) -> tuple[RunRecord, ...]:
        """Return a tenant's live runs in active sessions, which count against its limit of adapters, oldest first."""
        return await self._all(_RUN, _LIVE_OF_TENANT, tenant_id=tenant_id)

    async def holders(self, model_name: str) -> tuple[RunRecord, ...]:
        """Return the live runs that hold a replica of a served model, because they train all its parameters; the
        oldest first.
        """
        live = await self._all(_RUN, _LIVE_OF_MODEL, model_name=model_name)
        return tuple(run for run in live if isinstance(run.spec, FullSpec))

    async def live_noted(self, note: str) -> tuple[RunRecord, ...]:
        """Return the live runs with this note, oldest first."""
        return await self._all(_RUN, _LIVE_NOTED, note=note)

    async def live_by_replica(self, model_name: str) -> dict[str, int]:
        """Return by replica the number of live runs of the served model ``model_name``."""
        rows = await self._rows(_LIVE_BY_REPLICA, model_name=model_name)
        return {row["replica"]: row["runs"] for row in rows}

    async def list(self, tenant_id: str, limit: int, offset: int = 0, project_id: str | None = None) -> Page[RunRecord]:
        """Return a tenant's runs, latest request first; with ``project_id`` only those of sessions in that project."""
        listing, count = (_LIST, _COUNT) if project_id is None else (_LIST_OF_PROJECT, _COUNT_OF_PROJECT)
        return await self._page(
            _RUN, listing, count, tenant_id=tenant_id, project_id=project_id, limit=limit, offset=offset
        )

    async def latest(self) -> tuple[RunRecord, ...]:
        """Return the runs of all tenants, latest request first."""
        return await self._all(_RUN, _LATEST)

    async def count_of_others(self, tenant_id: str) -> int:
        """Return how many runs all other tenants have."""
        return await self._number(_COUNT_OF_OTHERS, tenant_id=tenant_id)

    async def set_state(self, run_id: str, state: RunState, note: str | None = None) -> None:
        await self._update(RUNS, {"run_id": run_id}, state=state, note=note)

    async def note_live(self, run_id: str, note: str) -> None:
        """Set the note of a live run. A run that is not live any more keeps the note that explains its end."""
        await self._update(RUNS, {"run_id": run_id, "state": "live"}, note=note)

    async def touch(self, last_request_at: Mapping[str, float]) -> None:
        """Store the time of the newest request by run id; an older time is ignored."""
        await self._execute_many(_TOUCH, [{"id": run_id, "time": time} for run_id, time in last_request_at.items()])


def insert_run(
    cursor: Cursor, run: RunRecord, most: int | None = None, most_rows: int | None = None
) -> RunRecord | Refusal:
    """Insert a run and return it, or return the existing one of its session with this number. Part of a write.

    Returns (does not raise) an error for a new run: ReplicaHeldError if it is to train all parameters of a replica that
    another live run holds, LimitReachedError if the tenant has ``most`` live runs in active sessions, or ``most_rows``
    runs on record.
    """
    known = _RUN.find(cursor, session_id=run.session_id, number=run.number)
    if known is not None:
        return known
    if run.state == "live" and isinstance(run.spec, FullSpec):
        # Only the replica's own process adds runs to it, so two such writes never run at the same time.
        for other in _RUN.all(cursor, _LIVE_OF_MODEL, model_name=run.model_name):
            if isinstance(other.spec, FullSpec) and other.replica == run.replica:
                return ReplicaHeldError(other)
    if most is not None and cursor.number(_COUNT_LIVE, {"tenant_id": run.tenant_id}) >= most:
        return LimitReachedError("adapters", most, most, "max_adapters_per_tenant")
    if most_rows is not None and cursor.count(RUNS, tenant_id=run.tenant_id) >= most_rows:
        return LimitReachedError("training runs on record", most_rows, most_rows, SESSION_ROWS, _DELETE_CHECKPOINTS)
    _RUN.insert(cursor, run)
    return run


# --- snapshots --------------------------------------------------------------------------------------------------------

_SNAPSHOT = RecordMapper(SnapshotRecord, SNAPSHOTS)
# Counts ops after the snapshot, up to ``new_seq``, that may have changed the adapter or have no outcome yet.
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


class SnapshotRecords(Area):
    """The records of snapshots: which directory holds an adapter's snapshot, and which ops that covers."""

    @in_write
    def set(self, cursor: Cursor, snapshot: SnapshotRecord) -> SnapshotRecord | None:
        """Store the record of a snapshot; return the one that it replaces, whose directory the caller must delete."""
        replaced = _take(cursor, snapshot.adapter_id)
        _SNAPSHOT.insert(cursor, snapshot)
        return replaced

    @in_write
    def advance(self, cursor: Cursor, adapter_id: str, seq: int, failed_seq: int | None) -> bool:
        """Extend the adapter's snapshot to cover all ops up to ``seq``, without writing a new one.

        This is correct if none of these ops changed the adapter, that is, if all are forward passes with an outcome.
        Otherwise, or if there is no snapshot, change nothing and return False; True if the ops are covered now or were
        before. Call it only for adapters of Tinker's
        protocol, whose forward passes leave nothing behind.
        """
        snapshot = _SNAPSHOT.find(cursor, adapter_id=adapter_id)
        if snapshot is None or snapshot.seq >= seq:
            return snapshot is not None
        if cursor.number(_MATTERING, {"id": adapter_id, "after": snapshot.seq, "new_seq": seq}):
            return False
        cursor.update(SNAPSHOTS, {"adapter_id": adapter_id}, seq=seq, failed_seq=failed_seq)
        return True

    async def get(self, adapter_id: str) -> SnapshotRecord | None:
        return await self._find(_SNAPSHOT, adapter_id=adapter_id)

    async def delete(self, adapter_id: str) -> SnapshotRecord | None:
        """Delete the record of an adapter's snapshot and return it; None if there was none."""
        return await self._database.write(lambda cursor: _take(cursor, adapter_id))


def _take(cursor: Cursor, adapter_id: str) -> SnapshotRecord | None:
    """Delete the record of an adapter's snapshot and return it; None if there was none."""
    snapshot = _SNAPSHOT.find(cursor, adapter_id=adapter_id)
    cursor.delete(SNAPSHOTS, adapter_id=adapter_id)
    return snapshot
