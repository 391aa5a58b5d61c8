"""The names of tenants, and an overview of all tenants for operators.

A tenant is known by its id, which never changes, and may have a name, which belongs to it alone. Tenants of an open
server, and those whose key was created without a name, have no name until an operator gives them one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import bindparam, func, select, union

from twinkle.errors import InvalidInputError
from twinkle.server.state.database.database import Cursor
from twinkle.server.state.database.mapper import RecordMapper
from twinkle.server.state.database.tables import API_KEYS, RUNS, SESSIONS, TENANTS, USAGE
from twinkle.server.state.records.area import Area, in_write

_LONGEST_NAME = 100
_LIKE_AN_ID = re.compile(r"tenant-[0-9a-f]{24}|key-[0-9a-f]{16}")
_ALLOWED = (
    f"1 to {_LONGEST_NAME} printable characters, not beginning with - and without spaces at either end, that do not "
    "look like the id of a tenant or a key"
)

_NAMES = select(TENANTS).order_by(TENANTS.c.name)
_IDS = union(*(select(table.c.tenant_id) for table in (TENANTS, API_KEYS, SESSIONS, RUNS, USAGE))).subquery()
_ALL = (
    select(_IDS.c.tenant_id, TENANTS.c.name)
    .select_from(_IDS.outerjoin(TENANTS, TENANTS.c.tenant_id == _IDS.c.tenant_id))
    .order_by(TENANTS.c.name, _IDS.c.tenant_id)
)
_LAST_SEEN = select(SESSIONS.c.tenant_id, func.max(SESSIONS.c.last_seen).label("at")).group_by(SESSIONS.c.tenant_id)
_LIVE = select(RUNS.c.tenant_id, func.count().label("runs")).where(RUNS.c.state == "live").group_by(RUNS.c.tenant_id)
_OTHERS_KEY = select(API_KEYS).where(API_KEYS.c.name == bindparam("name"), API_KEYS.c.tenant_id != bindparam("tenant"))


@dataclass(frozen=True)
class TenantName:
    """The name of a tenant. ``named_at``: when it got this name, in seconds since the epoch."""

    tenant_id: str
    name: str
    named_at: float


@dataclass(frozen=True)
class Activity:
    """What a tenant has on record: the number of its live runs, and the last heartbeat of any of its sessions."""

    live_runs: int = 0
    last_seen: float | None = None


_NAME = RecordMapper(TenantName, TENANTS)


class TenantRecords(Area):
    """The tenants on record: those with a name, a key, a session, a run or usage."""

    async def names(self) -> dict[str, str]:
        """Return the names of tenants by id; tenants without a name are left out."""
        return {each.tenant_id: each.name for each in await self._all(_NAME, _NAMES)}

    async def name_of(self, tenant_id: str) -> str | None:
        found = await self._find(_NAME, tenant_id=tenant_id)
        return None if found is None else found.name

    async def known(self) -> dict[str, str | None]:
        """Return all tenants on record by id, with their names; None: it has no name."""
        return {row["tenant_id"]: row["name"] for row in await self._rows(_ALL)}

    async def activity(self) -> Mapping[str, Activity]:
        """Return what each tenant has on record, by id; tenants without sessions and live runs are left out."""
        seen = {row["tenant_id"]: row["at"] for row in await self._rows(_LAST_SEEN)}
        live = {row["tenant_id"]: row["runs"] for row in await self._rows(_LIVE)}
        return {tenant: Activity(live.get(tenant, 0), seen.get(tenant)) for tenant in seen.keys() | live.keys()}

    @in_write
    def rename(self, cursor: Cursor, tenant_id: str, name: str, now: float) -> None:
        """Give a tenant this name instead of the one that it has, if any.

        InvalidInputError if the name is not allowed, or belongs to another tenant.
        """
        check_name(name)
        check_is_free(cursor, name, tenant_id)
        cursor.delete(TENANTS, tenant_id=tenant_id)
        _NAME.insert(cursor, TenantName(tenant_id, name, now))


# --- parts of writes --------------------------------------------------------------------------------------------------


def check_name(name: str) -> None:
    """Raise InvalidInputError if this cannot be the name of a tenant."""
    fits = 0 < len(name) <= _LONGEST_NAME and name == name.strip() and name.isprintable() and not name.startswith("-")
    if not fits or _LIKE_AN_ID.fullmatch(name):
        raise InvalidInputError("name", name, _ALLOWED)


def tenant_named(cursor: Cursor, name: str) -> str | None:
    """Return the id of the tenant that a name belongs to: it has this name, or a key and this id. None: no tenant."""
    found = _NAME.find(cursor, name=name)
    if found is not None:
        return found.tenant_id
    return name if cursor.count(API_KEYS, tenant_id=name) else None


def check_no_other_tenant(cursor: Cursor, name: str, tenant_id: str) -> None:
    """Raise InvalidInputError if another tenant has this name, or this id."""
    owner = tenant_named(cursor, name)
    if owner not in (None, tenant_id):
        raise InvalidInputError("name", name, f"a name that no other tenant has: it belongs to tenant {owner}")


def check_is_free(cursor: Cursor, name: str, tenant_id: str) -> None:
    """Raise InvalidInputError if another tenant has this name, this id, or a key of this name.

    The last of these counts because a configuration may name a tenant by one of its keys.
    """
    check_no_other_tenant(cursor, name, tenant_id)
    other = cursor.row(_OTHERS_KEY, {"name": name, "tenant": tenant_id})
    if other is not None:
        key = f"{other['key_id']} of tenant {other['tenant_id']}"
        raise InvalidInputError(
            "name",
            name,
            f"a name that no key of another tenant has: {key} has it (--tenant creates another key for it)",
        )


def name_new_tenant(cursor: Cursor, tenant_id: str, name: str, now: float) -> None:
    """Store the name of a new tenant. If another tenant has the name, the database refuses the transaction."""
    _NAME.insert(cursor, TenantName(tenant_id, name, now))
