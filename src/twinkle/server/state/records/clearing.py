"""Forget what is under way: sessions, adapters, futures and samplers. What tenants own and what is owed stays.

Checkpoints stay, with the runs and sessions that they belong to, and so do API keys, usage and the audit log.
"""

from sqlalchemy import delete, select, update

from twinkle.server.state.database.database import Cursor, Database
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

__all__ = ["clear"]

_WHY = "the operator cleared the server's state; its checkpoints can be loaded into a new run"
_WITH_CHECKPOINTS = select(CHECKPOINTS.c.run_id)
# In this order: each names only what comes after it.
_DELETIONS = (
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


async def clear(database: Database) -> int:
    """How many records are gone. No server may run."""

    def work(cursor: Cursor) -> int:
        gone = sum(cursor.execute(statement, {}) for statement in _DELETIONS)
        cursor.execute(_ENDED_RUNS, {})
        cursor.execute(_ENDED_SESSIONS, {})
        return gone

    return await database.write(work)
