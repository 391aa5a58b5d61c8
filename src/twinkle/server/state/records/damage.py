"""Damage that was found on disk, on record for operators and for clients whose data it affects."""

import time

from sqlalchemy import bindparam, select

from twinkle.server.state.database.database import Cursor
from twinkle.server.state.database.mapper import RecordMapper
from twinkle.server.state.database.tables import DAMAGE
from twinkle.server.state.errors import Damage, DamagedRecordError, lost_run
from twinkle.server.state.records.area import Area, in_write

_LIST = select(DAMAGE).order_by(DAMAGE.c.found_at, DAMAGE.c.subject)
_OF_RUN = select(DAMAGE).where(DAMAGE.c.run_id == bindparam("run")).order_by(DAMAGE.c.found_at.desc())

_DAMAGE = RecordMapper(Damage, DAMAGE)


class DamageRecords(Area):
    """The damage that was found, one entry for each subject."""

    @in_write
    def record(self, cursor: Cursor, damage: Damage) -> None:
        """Store an entry. It replaces an earlier one about the same subject."""
        cursor.delete(DAMAGE, subject=damage.subject)
        _DAMAGE.insert(cursor, damage)

    async def list(self) -> tuple[Damage, ...]:
        """Return all entries, oldest first."""
        return await self._all(_DAMAGE, _LIST)

    async def of_run(self, run_id: str) -> Damage | None:
        """Return the newest entry about a run or something that belongs to it; None if there is no entry."""
        return next(iter(await self._all(_DAMAGE, _OF_RUN, run=run_id)), None)

    async def fail_run(self, run_id: str, tenant_id: str, what: str) -> str:
        """Record that a run cannot continue because of damage; return the message for its client.

        This does not set the run's state to failed; the caller does.
        """
        message = lost_run(run_id, what)
        await self.record(Damage(f"run {run_id}", message, time.time(), tenant_id, run_id))
        return message


def raise_if_damaged(cursor: Cursor, subject: str) -> None:
    """Raise DamagedRecordError if there is an entry about ``subject``. Call it when the record is not found."""
    damage = _DAMAGE.find(cursor, subject=subject)
    if damage is not None:
        raise DamagedRecordError(damage.message)
