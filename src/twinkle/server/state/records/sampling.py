"""Sampling sessions: clients' handles for samples from a base model or from one published version."""

from sqlalchemy import bindparam, func, select

from twinkle.errors import LimitReachedError
from twinkle.server.state.database.database import Cursor
from twinkle.server.state.database.mapper import RecordMapper
from twinkle.server.state.database.tables import CHECKPOINTS, SAMPLING_CLIENTS, SAMPLING_SESSIONS, SESSIONS
from twinkle.server.state.records.area import Area, in_read, in_write
from twinkle.server.state.records.damage import raise_if_damaged
from twinkle.server.state.records.usage import check_storage
from twinkle.server.types import SamplingSessionRecord

SAMPLING_SESSION_ROWS = "max_sampling_session_rows_per_tenant"
_END_SESSIONS = "those of sessions that ended are deleted: end sessions that you do not need, or reuse a sampler"

_SAMPLING = RecordMapper(SamplingSessionRecord, SAMPLING_SESSIONS)

_OF_SESSION = (
    select(SAMPLING_SESSIONS)
    .where(SAMPLING_SESSIONS.c.session_id == bindparam("session_id"))
    .order_by(SAMPLING_SESSIONS.c.number)
)
_ABANDONED = (
    select(SAMPLING_SESSIONS)
    .join(SESSIONS)
    .where(
        SAMPLING_SESSIONS.c.version_id == SAMPLING_SESSIONS.c.sampling_session_id,
        SESSIONS.c.state != "active",
        SESSIONS.c.last_seen < bindparam("before"),
    )
)
_UNNAMED_BY_AGE = (
    select(
        SAMPLING_SESSIONS.c.sampling_session_id,
        func.row_number()
        .over(partition_by=SAMPLING_SESSIONS.c.session_id, order_by=SAMPLING_SESSIONS.c.number.desc())
        .label("place"),
    )
    .join(SESSIONS)
    .where(
        SAMPLING_SESSIONS.c.version_id == SAMPLING_SESSIONS.c.sampling_session_id,
        SESSIONS.c.state == "active",
    )
    .subquery()
)
_SUPERSEDED = (
    select(SAMPLING_SESSIONS)
    .join(_UNNAMED_BY_AGE, _UNNAMED_BY_AGE.c.sampling_session_id == SAMPLING_SESSIONS.c.sampling_session_id)
    .where(_UNNAMED_BY_AGE.c.place > bindparam("newest"))
)
# Directories with weights that an active session may still sample from.
ACTIVE_DIRECTORIES = (
    select(SAMPLING_SESSIONS.c.directory)
    .join(SESSIONS)
    .where(SESSIONS.c.state == "active", SAMPLING_SESSIONS.c.directory.is_not(None))
)
_COUNT_ACTIVE = select(func.count()).select_from(SAMPLING_SESSIONS.join(SESSIONS)).where(SESSIONS.c.state == "active")
_REFERRING = select(func.count()).select_from(
    ACTIVE_DIRECTORIES.where(SAMPLING_SESSIONS.c.directory == bindparam("directory")).subquery()
)
_ORPHANED = (
    select(SAMPLING_SESSIONS)
    .join(SESSIONS)
    .where(
        SAMPLING_SESSIONS.c.version_id != SAMPLING_SESSIONS.c.sampling_session_id,
        SESSIONS.c.state != "active",
        SAMPLING_SESSIONS.c.directory.not_in(select(CHECKPOINTS.c.directory)),
        SAMPLING_SESSIONS.c.directory.not_in(ACTIVE_DIRECTORIES),
    )
)
_LAST_CLIENT = select(func.coalesce(func.max(SAMPLING_CLIENTS.c.client), 0)).where(
    SAMPLING_CLIENTS.c.sampling_session_id == bindparam("id")
)


class SamplingSessions(Area):
    """The sampling sessions of all tenants, and the clients that share one."""

    @in_write
    def create(
        self,
        cursor: Cursor,
        sampling: SamplingSessionRecord,
        most_bytes: int | None = None,
        most_rows: int | None = None,
    ) -> SamplingSessionRecord | LimitReachedError:
        """Store a sampling session and return it, or return the existing one of its session with this number.

        Raises LimitReachedError if the tenant has ``most_rows`` sampling sessions on record, and StorageQuotaError if
        all its files together are larger than ``most_bytes``.
        """
        known = _SAMPLING.find(cursor, session_id=sampling.session_id, number=sampling.number)
        if known is not None:
            return known
        if most_rows is not None and cursor.count(SAMPLING_SESSIONS, tenant_id=sampling.tenant_id) >= most_rows:
            return LimitReachedError(
                "sampling sessions on record", most_rows, most_rows, SAMPLING_SESSION_ROWS, _END_SESSIONS
            )
        _SAMPLING.insert(cursor, sampling)
        check_storage(cursor, sampling.tenant_id, sampling.size_bytes, most_bytes)
        return sampling

    async def active(self) -> int:
        """Return the number of sampling sessions that belong to active sessions."""
        return await self._number(_COUNT_ACTIVE)

    @in_read
    def get(self, cursor: Cursor, sampling_session_id: str) -> SamplingSessionRecord | None:
        """Return a sampling session; None if there is none; DamagedRecordError if it was removed because of damage."""
        found = _SAMPLING.find(cursor, sampling_session_id=sampling_session_id)
        if found is None:
            raise_if_damaged(cursor, f"sampling session {sampling_session_id}")
        return found

    async def of_session(self, session_id: str) -> tuple[SamplingSessionRecord, ...]:
        """Return the sampling sessions of a session, by number."""
        return await self._all(_SAMPLING, _OF_SESSION, session_id=session_id)

    async def abandoned(self, before: float) -> tuple[SamplingSessionRecord, ...]:
        """Return the unnamed versions of sessions that have ended and were last seen before that time.

        An unnamed version owns its files, so they can be deleted with it.
        """
        return await self._all(_SAMPLING, _ABANDONED, before=before)

    async def superseded(self, newest: int) -> tuple[SamplingSessionRecord, ...]:
        """Return the unnamed versions of active sessions, but for the ``newest`` ones of each session."""
        return await self._all(_SAMPLING, _SUPERSEDED, newest=newest)

    async def refer_to(self, directory: str) -> bool:
        """Return whether an active session may still sample from the weights in a directory."""
        return await self._number(_REFERRING, directory=directory) > 0

    async def orphaned(self) -> tuple[SamplingSessionRecord, ...]:
        """Return sampling sessions whose checkpoint was replaced or deleted, if no active session uses its files.

        Their own sessions have ended too, so the files can be deleted.
        """
        return await self._all(_SAMPLING, _ORPHANED)

    @in_write
    def delete(self, cursor: Cursor, sampling_session_id: str) -> None:
        cursor.delete(SAMPLING_CLIENTS, sampling_session_id=sampling_session_id)
        cursor.delete(SAMPLING_SESSIONS, sampling_session_id=sampling_session_id)

    # --- clients of a sampling session --------------------------------------------------------------------------------

    @in_write
    def join(self, cursor: Cursor, sampling_session_id: str) -> int:
        """Return a new client number for a sampling session. The client that created the session has number 0."""
        number = 1 + cursor.number(_LAST_CLIENT, {"id": sampling_session_id})
        cursor.insert(SAMPLING_CLIENTS, sampling_session_id=sampling_session_id, client=number, first_seq=0, next_seq=0)
        return number

    @in_write
    def set_numbers_in_use(self, cursor: Cursor, sampling_session_id: str, client: int, numbers: range) -> None:
        """Store the sequence numbers that the client may be using, from now until the next call."""
        key = {"sampling_session_id": sampling_session_id, "client": client}
        in_use = {"first_seq": numbers.start, "next_seq": numbers.stop}
        if cursor.update(SAMPLING_CLIENTS, key, **in_use) == 0:
            cursor.insert(SAMPLING_CLIENTS, **key, **in_use)

    @in_read
    def numbers_in_use(self, cursor: Cursor, sampling_session_id: str, client: int) -> range:
        """Return the sequence numbers that were stored last for the client; an empty range if none were."""
        row = cursor.find(SAMPLING_CLIENTS, sampling_session_id=sampling_session_id, client=client)
        return range(row["first_seq"], row["next_seq"]) if row is not None else range(0)
