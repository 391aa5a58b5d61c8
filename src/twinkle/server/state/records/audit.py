"""The audit log: changes of each tenant's keys, sessions and checkpoints. Entries never change; old ones are deleted.

An entry about a change is written in the same transaction as the change: both are stored or neither is. Reading a
checkpoint changes nothing; it has an entry of its own.
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

_MOST_ENTRIES = 100_000  # of one tenant; beyond that the oldest are deleted

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
    """One entry of the audit log. ``event``: the kind of thing and the action, such as ``checkpoint_delete``."""

    at: float
    event: str
    details: Mapping[str, object]


_ENTRY = RecordMapper(AuditEntry, AUDIT)


class Audit(Area):
    """The audit log of all tenants: adding, listing and deleting entries."""

    async def add(self, tenant_id: str, event: str, details: Mapping[str, object]) -> None:
        """Add an entry, with the present time, about an action that does not change the state."""
        await self._database.write(lambda cursor: add_entry(cursor, tenant_id, event, time.time(), details))

    async def list(self, tenant_id: str, since: float, until: float, limit: int) -> Sequence[AuditEntry]:
        """Return a tenant's newest ``limit`` entries, from ``since`` on and before ``until``, oldest first."""
        entries = await self._all(_ENTRY, _LIST, tenant=tenant_id, since=since, until=until, limit=limit)
        return list(reversed(entries))

    async def prune(self, before: float, most: int = _MOST_ENTRIES) -> None:
        """Delete entries older than ``before``, and for every tenant all but the newest ``most``."""
        await self._execute(_DROP, before=before)
        for row in await self._rows(_COUNTS, most=most):
            await self._drop_oldest(row["tenant_id"], most)

    @in_write
    def _drop_oldest(self, cursor: Cursor, tenant_id: str, most: int) -> None:
        row = cursor.row(_LAST_KEPT, {"tenant": tenant_id, "most": most})
        if row is not None:
            cursor.execute(_DROP_OF_TENANT, {"tenant": tenant_id, "before": row["at"]})


def add_entry(cursor: Cursor, tenant_id: str, event: str, now: float, details: Mapping[str, object]) -> None:
    """Add an entry in the transaction of ``cursor``, in which the caller makes the change that it describes."""
    _ENTRY.insert(cursor, AuditEntry(now, event, details), entry_id=secrets.token_hex(12), tenant_id=tenant_id)
