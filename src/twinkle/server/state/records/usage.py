"""Usage by tenant and day (UTC). Several processes may add to the same rows."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from sqlalchemy import bindparam, func, select, update

from twinkle.errors import StorageQuotaError
from twinkle.server.state.database.database import Cursor, Row
from twinkle.server.state.database.tables import CHECKPOINTS, RUNS, SAMPLING_SESSIONS, SESSIONS, USAGE
from twinkle.server.state.records.area import Area
from twinkle.server.usage import UsageCounts

_COUNTERS = tuple(field.name for field in fields(UsageCounts))
_AT = (USAGE.c.tenant_id == bindparam("tenant")) & (USAGE.c.day == bindparam("on_day"))

_ADD = update(USAGE).where(_AT).values({name: USAGE.c[name] + bindparam(f"new_{name}") for name in _COUNTERS})
_LIST = (
    select(USAGE)
    .where(USAGE.c.day >= bindparam("since"), USAGE.c.day < bindparam("until"))
    .order_by(USAGE.c.day, USAGE.c.tenant_id)
)
_LIST_OF_TENANT = _LIST.where(USAGE.c.tenant_id == bindparam("tenant"))

# Files on disk: checkpoints and sampler versions. A sampling session that was made from a checkpoint has the directory
# of the checkpoint, even if the checkpoint was deleted since. The UNION counts such a directory once.
_CHECKPOINTS = select(CHECKPOINTS.c.tenant_id, CHECKPOINTS.c.directory, CHECKPOINTS.c.size_bytes)
_VERSIONS = select(SAMPLING_SESSIONS.c.tenant_id, SAMPLING_SESSIONS.c.directory, SAMPLING_SESSIONS.c.size_bytes).where(
    SAMPLING_SESSIONS.c.size_bytes > 0
)
_FILES = _CHECKPOINTS.union(_VERSIONS).subquery()
_FILES_OF_TENANT = (
    _CHECKPOINTS.where(CHECKPOINTS.c.tenant_id == bindparam("tenant"))
    .union(_VERSIONS.where(SAMPLING_SESSIONS.c.tenant_id == bindparam("tenant")))
    .subquery()
)
_STORAGE = select(_FILES.c.tenant_id, func.sum(_FILES.c.size_bytes).label("bytes")).group_by(_FILES.c.tenant_id)
_BY_PROJECT = (
    select(
        SESSIONS.c.project_id,
        func.count().label("checkpoints"),
        func.sum(CHECKPOINTS.c.size_bytes).label("bytes"),
    )
    .select_from(CHECKPOINTS.join(RUNS).join(SESSIONS, SESSIONS.c.session_id == RUNS.c.session_id))
    .where(CHECKPOINTS.c.tenant_id == bindparam("tenant"))
    .group_by(SESSIONS.c.project_id)
)
_STORAGE_OF_TENANT = select(func.coalesce(func.sum(_FILES_OF_TENANT.c.size_bytes), 0))


@dataclass(frozen=True)
class DailyUsage:
    """The usage of one tenant on one day. ``day``: 2026-01-31, UTC. ``storage_bytes``: the maximum of that day."""

    tenant_id: str
    day: str
    counts: UsageCounts
    storage_bytes: int


@dataclass(frozen=True)
class ProjectStorage:
    """Number and size of a tenant's checkpoints in one project; ``project_id`` None: in no project."""

    project_id: str | None
    checkpoints: int
    size_bytes: int


class UsageRecords(Area):
    """The daily usage of all tenants, and the size of their files on disk."""

    async def add(self, counts: Mapping[tuple[str, str], UsageCounts]) -> None:
        """Add counts by (tenant, day) to those on record, all in one transaction."""

        def work(cursor: Cursor) -> None:
            for (tenant_id, day), each in counts.items():
                added = {f"new_{name}": vars(each)[name] for name in _COUNTERS}
                if cursor.execute(_ADD, {"tenant": tenant_id, "on_day": day, **added}) == 0:
                    cursor.insert(USAGE, tenant_id=tenant_id, day=day, storage_bytes=0, **vars(each))

        if counts:
            await self._database.write(work)

    async def note_storage(self, day: str, storage: Mapping[str, int]) -> None:
        """Store the bytes that tenants have on disk on this day, where they exceed the value on record for the day."""

        def work(cursor: Cursor) -> None:
            for tenant_id, size in storage.items():
                known = cursor.find(USAGE, tenant_id=tenant_id, day=day)
                if known is None:
                    cursor.insert(USAGE, tenant_id=tenant_id, day=day, storage_bytes=size, **vars(UsageCounts()))
                elif known["storage_bytes"] < size:
                    cursor.update(USAGE, {"tenant_id": tenant_id, "day": day}, storage_bytes=size)

        if storage:
            await self._database.write(work)

    async def list(self, since: str, until: str, tenant_id: str | None = None) -> tuple[DailyUsage, ...]:
        """Return the usage of the days from ``since`` (inclusive) to ``until`` (exclusive), oldest first.

        With ``tenant_id`` None, return that of all tenants.
        """
        statement = _LIST if tenant_id is None else _LIST_OF_TENANT
        return tuple(map(_usage, await self._rows(statement, since=since, until=until, tenant=tenant_id)))

    async def storage(self) -> Mapping[str, int]:
        """Return the bytes on disk (checkpoints and sampler versions) of every tenant that has files."""
        return {row["tenant_id"]: int(row["bytes"]) for row in await self._rows(_STORAGE)}

    async def stored_by_project(self, tenant_id: str) -> tuple[ProjectStorage, ...]:
        """Return the size of a tenant's checkpoints by project, the largest project first."""
        rows = await self._rows(_BY_PROJECT, tenant=tenant_id)
        stored = (ProjectStorage(row["project_id"], int(row["checkpoints"]), int(row["bytes"])) for row in rows)
        return tuple(sorted(stored, key=lambda each: -each.size_bytes))

    async def storage_of(self, tenant_id: str) -> int:
        """Return the bytes on disk (checkpoints and sampler versions) of one tenant."""
        return await self._number(_STORAGE_OF_TENANT, tenant=tenant_id)


def check_storage(cursor: Cursor, tenant_id: str, added: int, most: int | None) -> None:
    """Raise StorageQuotaError if the tenant's checkpoints and versions exceed ``most`` bytes; None: no limit.

    Call it inside the transaction that has already recorded the new files. ``added`` is their size, for the message.
    """
    if most is not None:
        total = cursor.number(_STORAGE_OF_TENANT, {"tenant": tenant_id})
        if total > most:
            raise StorageQuotaError(total - added, added, most)


def _usage(row: Row) -> DailyUsage:
    counts = UsageCounts(**{name: row[name] for name in _COUNTERS})
    return DailyUsage(row["tenant_id"], row["day"], counts, row["storage_bytes"])
