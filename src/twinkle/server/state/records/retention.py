"""Deletion of rows: those of sessions that have ended, and all current work when an operator clears the state.

Rows of ended sessions are deleted after a while, and earlier if their tenant reaches a limit of rows. Rows that own
files stay: runs as long as they have checkpoints or a snapshot, sampler versions until their files are deleted. A run
also stays as long as it is live or has ops, whose outcomes clients may still fetch, and a session as long as anything
of it stays. The database reuses the space of deleted rows.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Delete,
    Select,
    and_,
    bindparam,
    delete,
    exists,
    literal_column,
    or_,
    select,
    update,
)

from twinkle.server.state.database.database import Cursor, Row
from twinkle.server.state.database.tables import (
    CHECKPOINTS,
    CUSTOM_LOSSES,
    DAMAGE,
    LEASES,
    OPERATOR_REQUESTS,
    OPS,
    RUN_METRIC_NAMES,
    RUN_METRICS,
    RUNS,
    SAMPLING_CLIENTS,
    SAMPLING_SESSIONS,
    SESSIONS,
    SNAPSHOTS,
)
from twinkle.server.state.records.area import Area, in_write

_AT_ONCE = 100  # rows deleted in one transaction, so that requests are accepted in between
# Rows of sessions seen within this time stay. A copy of weights belongs to a session that is created as ended, and gets
# its checkpoint last: until then its run looks unused.
_YOUNG_SECONDS = 3600.0

_ENDED = and_(SESSIONS.c.state != "active", SESSIONS.c.last_seen < bindparam("before"))
_OF_TENANT = or_(bindparam("tenant_id") == literal_column("''"), SESSIONS.c.tenant_id == bindparam("tenant_id"))


def _of_ended(ids: Select[Any], unused: ColumnElement[bool]) -> Select[Any]:
    """Return a query for the ids of ``unused`` rows of sessions that have ended, those last seen longest ago first."""
    return ids.where(_ENDED, _OF_TENANT, unused).order_by(SESSIONS.c.last_seen).limit(bindparam("limit"))


# A version that owns files is deleted together with them: see SamplingSessions.abandoned() and orphaned().
_HAS_NO_FILES = or_(
    SAMPLING_SESSIONS.c.directory.is_(None),
    and_(
        SAMPLING_SESSIONS.c.version_id != SAMPLING_SESSIONS.c.sampling_session_id,
        exists().where(CHECKPOINTS.c.directory == SAMPLING_SESSIONS.c.directory),
    ),
)
_SAMPLERS = _of_ended(select(SAMPLING_SESSIONS.c.sampling_session_id.label("id")).join(SESSIONS), _HAS_NO_FILES)
_UNUSED_RUN = and_(
    RUNS.c.state != "live",
    ~exists().where(CHECKPOINTS.c.run_id == RUNS.c.run_id),
    ~exists().where(OPS.c.adapter_id == RUNS.c.run_id),
    ~exists().where(SNAPSHOTS.c.adapter_id == RUNS.c.run_id),
)
_RUNS = _of_ended(select(RUNS.c.run_id.label("id")).join(SESSIONS), _UNUSED_RUN)
_EMPTY_SESSION = and_(
    ~exists().where(RUNS.c.session_id == SESSIONS.c.session_id),
    ~exists().where(SAMPLING_SESSIONS.c.session_id == SESSIONS.c.session_id),
    ~exists().where(CUSTOM_LOSSES.c.session_id == SESSIONS.c.session_id),
)
_SESSIONS = _of_ended(select(SESSIONS.c.session_id.label("id")), _EMPTY_SESSION)

_DELETIONS = {
    _SAMPLERS: (
        delete(SAMPLING_CLIENTS).where(SAMPLING_CLIENTS.c.sampling_session_id == bindparam("id")),
        delete(SAMPLING_SESSIONS).where(SAMPLING_SESSIONS.c.sampling_session_id == bindparam("id")),
    ),
    _RUNS: (
        delete(RUN_METRICS).where(RUN_METRICS.c.run_id == bindparam("id")),
        delete(RUN_METRIC_NAMES).where(RUN_METRIC_NAMES.c.run_id == bindparam("id")),
        delete(RUNS).where(RUNS.c.run_id == bindparam("id"), _UNUSED_RUN),
    ),
    _SESSIONS: (
        delete(SESSIONS).where(SESSIONS.c.session_id == bindparam("id"), SESSIONS.c.state != "active", _EMPTY_SESSION),
    ),
}

# --- clearing the state ----------------------------------------------------------------------------------------------

_WHY = "the operator cleared the server's state; its checkpoints can be loaded into a new run"
_WITH_CHECKPOINTS = select(CHECKPOINTS.c.run_id)
# The order matters: rows refer only to tables that come later in this list.
_CLEARED = (
    delete(DAMAGE),
    delete(OPERATOR_REQUESTS),
    delete(LEASES),
    delete(SAMPLING_CLIENTS),
    delete(SAMPLING_SESSIONS),
    delete(CUSTOM_LOSSES),
    delete(OPS),
    delete(SNAPSHOTS),
    delete(RUN_METRICS).where(RUN_METRICS.c.run_id.not_in(_WITH_CHECKPOINTS)),
    delete(RUN_METRIC_NAMES).where(RUN_METRIC_NAMES.c.run_id.not_in(_WITH_CHECKPOINTS)),
    delete(RUNS).where(RUNS.c.run_id.not_in(_WITH_CHECKPOINTS)),
    delete(SESSIONS).where(SESSIONS.c.session_id.not_in(select(RUNS.c.session_id))),
)
_ENDED_RUNS = update(RUNS).where(RUNS.c.state == "live").values(state="failed", note=_WHY)
_ENDED_SESSIONS = update(SESSIONS).where(SESSIONS.c.state == "active").values(state="expired")


class Retention(Area):
    """Deletes sessions that have ended, with their runs, curves and sampling sessions; clears all current work.

    An ended session never becomes active again, and nothing new is created in it, except in its first hour the copy of
    weights for which it may have been made. So a row that was found unused is still unused when it is deleted in a
    later transaction.
    """

    async def delete_ended(self, before: float) -> int:
        """Delete unused rows of sessions that have ended and were last seen before that time.

        Return how many sessions, runs and sampling sessions were deleted.
        """
        return await self._delete("", before, None)

    async def make_room(self, tenant_id: str, now: float) -> int:
        """Delete up to 100 unused sampling sessions, 100 runs and 100 sessions of the tenant; return how many.

        Their sessions have ended; those last seen longest ago come first, and those seen within the last hour stay.
        """
        return await self._delete(tenant_id, now - _YOUNG_SECONDS, 1)

    async def _delete(self, tenant_id: str, before: float, rounds: int | None) -> int:
        total = 0
        for search, deletions in _DELETIONS.items():
            done = 0
            while rounds is None or done < rounds:
                # The search runs in a reader thread, beside the writer.
                found = await self._rows(search, tenant_id=tenant_id, before=before, limit=_AT_ONCE)
                if found:
                    await self._remove(deletions, found)
                total += len(found)
                done += 1
                if len(found) < _AT_ONCE:
                    break
        return total

    @in_write
    def _remove(self, cursor: Cursor, deletions: Sequence[Delete], found: Sequence[Row]) -> None:
        for statement in deletions:
            cursor.execute_many(statement, found)

    @in_write
    def clear(self, cursor: Cursor) -> int:
        """Delete all current work, so that a server starts afresh; return how many rows were deleted.

        The records of sessions, runs, ops, snapshots, sampling sessions, custom losses, damage, leases and operators'
        requests are deleted; no files are. Checkpoints stay, with the runs and sessions that they belong to, which are
        ended, and so do API keys, usage and the audit log. No server may run meanwhile.
        """
        gone = sum(cursor.execute(statement, {}) for statement in _CLEARED)
        cursor.execute(_ENDED_RUNS, {})
        cursor.execute(_ENDED_SESSIONS, {})
        return gone
