"""Custom losses: what the graphs of a session were created from."""

from dataclasses import asdict

from sqlalchemy import bindparam, delete, exists, func, insert, select

from twinkle.server.state.database.database import Cursor, Database, Row
from twinkle.server.state.database.tables import CUSTOM_LOSSES, RUNS, SESSIONS
from twinkle.server.state.integrity.damage import raise_if_damaged
from twinkle.server.types import CustomLossRecord

__all__ = ["CustomLosses"]

_INSERT = insert(CUSTOM_LOSSES)
_GET = select(CUSTOM_LOSSES).where(CUSTOM_LOSSES.c.loss_id == bindparam("id"))
_COUNT = select(func.count()).select_from(CUSTOM_LOSSES).where(CUSTOM_LOSSES.c.tenant_id == bindparam("tenant_id"))
# An adapter of a session that ended may still have to be brought back from its journal before it can be parked.
_PRUNE = delete(CUSTOM_LOSSES).where(
    ~exists().where(SESSIONS.c.session_id == CUSTOM_LOSSES.c.session_id, SESSIONS.c.state == "active"),
    ~exists().where(RUNS.c.session_id == CUSTOM_LOSSES.c.session_id, RUNS.c.state == "live"),
)


class CustomLosses:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, loss: CustomLossRecord, limit: int) -> CustomLossRecord | None:
        """The loss, or the one of this id that there is already; None where its tenant has ``limit`` of them."""

        def work(cursor: Cursor) -> CustomLossRecord | None:
            row = cursor.row(_GET, {"id": loss.loss_id})
            if row is not None:
                return _record(row)
            if cursor.number(_COUNT, {"tenant_id": loss.tenant_id}) >= limit:
                return None
            cursor.execute(_INSERT, asdict(loss))
            return loss

        return await self._database.write(work)

    async def get(self, loss_id: str) -> CustomLossRecord | None:
        def work(cursor: Cursor) -> CustomLossRecord | None:
            row = cursor.row(_GET, {"id": loss_id})
            if row is None:
                raise_if_damaged(cursor, f"custom loss {loss_id}")
                return None
            return _record(row)

        return await self._database.read(work)

    async def prune(self) -> int:
        """Drop those of sessions that ended, once nothing of the session's can need them; how many."""
        return await self._database.write(lambda cursor: cursor.execute(_PRUNE, {}))


def _record(row: Row) -> CustomLossRecord:
    return CustomLossRecord(**{**row, "digest": bytes(row["digest"]), "body": bytes(row["body"])})
