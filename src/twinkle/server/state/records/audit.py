"""The audit log: who did what to keys, sessions and checkpoints. Entries are added and, when they are old, dropped.

An entry is written in the transaction of what it tells of: both are there or neither.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import bindparam, delete, func, select

from twinkle.server.state.database.database import Cursor
from twinkle.server.state.database.mapper import RecordMapper
from twinkle.server.state.database.tables import AUDIT
from twinkle.server.state.records.area import Area, in_write

_MOST_ENTRIES = 100_000  # of one tenant; the oldest go first

_OF_TENANT = AUDIT.c.tenant_id == bindparam("tenant")

_LIST = (
    select(AUDIT)
    .where(_OF_TENANT, AUDIT.c.at >= bindparam("since"), AUDIT.c.at < bindparam("until"))
    .order_by(AUDIT.c.at.desc(), AUDIT.c.entry_id)
    .limit(bindparam("limit"))
)
_COUNTS = select(AUDIT.c.tenant_id).group_by(AUDIT.c.tenant_id).having(func.count() > bindparam("most"))
_LAST_KEPT = select(AUDIT.c.at).where(_OF_TENANT).order_by(AUDIT.c.at.desc()).limit(1).offset(bindparam("most"))
_DROP = delete(AUDIT).where(AUDIT.c.at < bindparam("before"))
_DROP_OF_TENANT = delete(AUDIT).where(_OF_TENANT, AUDIT.c.at <= bindparam("before"))


@dataclass(frozen=True)
class AuditEntry:
    """``event``: what it is about and what was done to it, ``checkpoint_delete``."""

    at: float
    event: str
    details: Mapping[str, object]


_ENTRY = RecordMapper(AuditEntry, AUDIT)


class Audit(Area):
    """The audit log of all tenants."""

    async def add(self, tenant_id: str, event: str, details: Mapping[str, object]) -> None:
        """Add an entry about something that is no change of the state."""
        await self._database.write(lambda cursor: add_entry(cursor, tenant_id, event, time.time(), details))

    async def list(self, tenant_id: str, since: float, until: float, limit: int) -> Sequence[AuditEntry]:
        """Return the newest ``limit`` of a tenant's entries in that time, oldest first."""
        entries = await self._all(_ENTRY, _LIST, tenant=tenant_id, since=since, until=until, limit=limit)
        return list(reversed(entries))

    async def prune(self, before: float, most: int = _MOST_ENTRIES) -> None:
        """Forget what is older than ``before``, and of every tenant all but the newest ``most``."""
        await self._execute(_DROP, before=before)
        for row in await self._rows(_COUNTS, most=most):
            await self._drop_oldest(row["tenant_id"], most)

    @in_write
    def _drop_oldest(self, cursor: Cursor, tenant_id: str, most: int) -> None:
        row = cursor.row(_LAST_KEPT, {"tenant": tenant_id, "most": most})
        if row is not None:
            cursor.execute(_DROP_OF_TENANT, {"tenant": tenant_id, "before": row["at"]})


def add_entry(cursor: Cursor, tenant_id: str, event: str, now: float, details: Mapping[str, object]) -> None:
    """Add an entry inside a write."""
    _ENTRY.insert(cursor, AuditEntry(now, event, details), entry_id=secrets.token_hex(12), tenant_id=tenant_id)
