"""Snapshots: from where an adapter is brought back, and up to which op its journal is no longer needed."""

from dataclasses import asdict, replace

from sqlalchemy import bindparam, delete, func, insert, or_, select

from twinkle.server.state.database.database import Cursor, Database
from twinkle.server.state.database.tables import OPS, SNAPSHOTS
from twinkle.server.types import OpKind, SnapshotRecord

__all__ = ["Snapshots"]

_OF_ADAPTER = SNAPSHOTS.c.adapter_id == bindparam("id")

_INSERT = insert(SNAPSHOTS)
_GET = select(SNAPSHOTS).where(_OF_ADAPTER)
_DELETE = delete(SNAPSHOTS).where(_OF_ADAPTER)
# An op between the snapshot and ``new_seq`` that may have changed its adapter, or has no outcome on record yet.
_MATTERING = (
    select(func.count())
    .select_from(OPS)
    .where(
        OPS.c.adapter_id == bindparam("id"),
        OPS.c.seq > bindparam("after"),
        OPS.c.seq <= bindparam("new_seq"),
        or_(OPS.c.kind != OpKind.FORWARD.value, OPS.c.finished_at.is_(None)),
    )
)


class Snapshots:
    """One an adapter."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def set(self, snapshot: SnapshotRecord) -> SnapshotRecord | None:
        """The one that it replaces, whose directory is now nobody's."""

        def work(cursor: Cursor) -> SnapshotRecord | None:
            row = cursor.row(_GET, {"id": snapshot.adapter_id})
            cursor.execute(_DELETE, {"id": snapshot.adapter_id})
            cursor.execute(_INSERT, asdict(snapshot))
            return None if row is None else SnapshotRecord(**row)

        return await self._database.write(work)

    async def advance(self, adapter_id: str, seq: int, failed_seq: int | None) -> bool:
        """Let the adapter's snapshot cover all ops up to ``seq`` too, none of which changed the adapter.

        Only for adapters of Tinker's protocol, whose forward passes leave nothing behind. Returns False and changes
        nothing where one of these ops is not an answered forward pass, or where there is no snapshot.
        """

        def work(cursor: Cursor) -> bool:
            row = cursor.row(_GET, {"id": adapter_id})
            if row is None:
                return False
            if row["seq"] >= seq:
                return True
            if cursor.number(_MATTERING, {"id": adapter_id, "after": row["seq"], "new_seq": seq}):
                return False
            cursor.execute(_DELETE, {"id": adapter_id})
            cursor.execute(_INSERT, asdict(replace(SnapshotRecord(**row), seq=seq, failed_seq=failed_seq)))
            return True

        return await self._database.write(work)

    async def get(self, adapter_id: str) -> SnapshotRecord | None:
        row = await self._database.read(lambda cursor: cursor.row(_GET, {"id": adapter_id}))
        return None if row is None else SnapshotRecord(**row)

    async def delete(self, adapter_id: str) -> SnapshotRecord | None:
        """The one that there was."""

        def work(cursor: Cursor) -> SnapshotRecord | None:
            row = cursor.row(_GET, {"id": adapter_id})
            cursor.execute(_DELETE, {"id": adapter_id})
            return None if row is None else SnapshotRecord(**row)

        return await self._database.write(work)
