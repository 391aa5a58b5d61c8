"""Snapshots: from where an adapter is brought back, and up to which op its journal is no longer needed."""

from dataclasses import asdict

from sqlalchemy import bindparam, delete, insert, select

from twinkle.server.state.database import Cursor, Database
from twinkle.server.state.tables import SNAPSHOTS
from twinkle.server.types import SnapshotRecord

__all__ = ["Snapshots"]

_OF_ADAPTER = SNAPSHOTS.c.adapter_id == bindparam("id")

_INSERT = insert(SNAPSHOTS)
_GET = select(SNAPSHOTS).where(_OF_ADAPTER)
_DELETE = delete(SNAPSHOTS).where(_OF_ADAPTER)


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
