"""Sampling sessions: which immutable weights a client samples from."""

from dataclasses import asdict

from sqlalchemy import bindparam, delete, func, insert, select

from twinkle.server.state.database import Cursor, Database
from twinkle.server.state.tables import SAMPLING_SESSIONS, SESSIONS
from twinkle.server.types import SamplingSessionRecord

__all__ = ["SamplingSessions"]

_OF_SESSION = SAMPLING_SESSIONS.c.session_id == bindparam("session_id")

_INSERT = insert(SAMPLING_SESSIONS)
_GET = select(SAMPLING_SESSIONS).where(SAMPLING_SESSIONS.c.sampling_session_id == bindparam("id"))
_BY_NUMBER = select(SAMPLING_SESSIONS).where(_OF_SESSION, SAMPLING_SESSIONS.c.number == bindparam("number"))
_ABANDONED = (
    select(SAMPLING_SESSIONS)
    .join(SESSIONS, SESSIONS.c.session_id == SAMPLING_SESSIONS.c.session_id)
    .where(
        SAMPLING_SESSIONS.c.version_id == SAMPLING_SESSIONS.c.sampling_session_id,
        SESSIONS.c.state != "active",
        SESSIONS.c.last_seen < bindparam("before"),
    )
)
_REFERRING = (
    select(func.count())
    .select_from(SAMPLING_SESSIONS)
    .join(SESSIONS, SESSIONS.c.session_id == SAMPLING_SESSIONS.c.session_id)
    .where(SAMPLING_SESSIONS.c.directory == bindparam("directory"), SESSIONS.c.state == "active")
)
_DELETE = delete(SAMPLING_SESSIONS).where(SAMPLING_SESSIONS.c.sampling_session_id == bindparam("id"))
_LIST = select(SAMPLING_SESSIONS).where(_OF_SESSION).order_by(SAMPLING_SESSIONS.c.number)


class SamplingSessions:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, sampling: SamplingSessionRecord) -> SamplingSessionRecord:
        """The sampling session, or the one with this number that its session has already."""

        def work(cursor: Cursor) -> SamplingSessionRecord:
            row = cursor.row(_BY_NUMBER, {"session_id": sampling.session_id, "number": sampling.number})
            if row is not None:
                return SamplingSessionRecord(**row)
            cursor.execute(_INSERT, asdict(sampling))
            return sampling

        return await self._database.write(work)

    async def get(self, sampling_session_id: str) -> SamplingSessionRecord | None:
        row = await self._database.read(lambda cursor: cursor.row(_GET, {"id": sampling_session_id}))
        return None if row is None else SamplingSessionRecord(**row)

    async def of_session(self, session_id: str) -> tuple[SamplingSessionRecord, ...]:
        """By number."""
        rows = await self._database.read(lambda cursor: cursor.rows(_LIST, {"session_id": session_id}))
        return tuple(SamplingSessionRecord(**row) for row in rows)

    async def abandoned(self, before: float) -> tuple[SamplingSessionRecord, ...]:
        """Unnamed versions, which have files of their own, of sessions that ended and were last seen before then."""
        rows = await self._database.read(lambda cursor: cursor.rows(_ABANDONED, {"before": before}))
        return tuple(SamplingSessionRecord(**row) for row in rows)

    async def refer_to(self, directory: str) -> bool:
        """Whether somebody may still sample from the weights there."""
        count = await self._database.read(lambda cursor: cursor.number(_REFERRING, {"directory": directory}))
        return count > 0

    async def delete(self, sampling_session_id: str) -> None:
        await self._database.write(lambda cursor: cursor.execute(_DELETE, {"id": sampling_session_id}))
