"""Leases: work that only one of several processes may do is done by whoever holds its lease, until it runs out."""

from enum import Enum

from sqlalchemy import bindparam, insert, select, update

from twinkle.server.state.database.database import Cursor, Database
from twinkle.server.state.database.tables import LEASES

__all__ = ["Claim", "Leases"]

_OF_NAME = LEASES.c.name == bindparam("lease")
_GET = select(LEASES).where(_OF_NAME)
_INSERT = insert(LEASES)
_TAKE = update(LEASES).where(_OF_NAME).values(holder=bindparam("by"), until=bindparam("end"))


class Claim(Enum):
    """What became of a claim."""

    REFUSED = "refused"  # another holds the lease
    TAKEN = "taken"  # it was free, or another's that ran out
    RENEWED = "renewed"  # it was ours, and nobody has had it since


class Leases:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim(self, name: str, holder: str, now: float, seconds: float) -> Claim:
        """Hold the lease from now on for so many seconds, unless another holds it."""

        def work(cursor: Cursor) -> Claim:
            row = cursor.row(_GET, {"lease": name})
            if row is None:
                cursor.execute(_INSERT, {"name": name, "holder": holder, "until": now + seconds})
                return Claim.TAKEN
            if row["holder"] != holder and row["until"] > now:
                return Claim.REFUSED
            cursor.execute(_TAKE, {"lease": name, "by": holder, "end": now + seconds})
            return Claim.RENEWED if row["holder"] == holder else Claim.TAKEN

        return await self._database.write(work)

    async def give_up(self, name: str, holder: str) -> None:
        """Let the next one in."""

        def work(cursor: Cursor) -> None:
            row = cursor.row(_GET, {"lease": name})
            if row is not None and row["holder"] == holder:
                cursor.execute(_TAKE, {"lease": name, "by": holder, "end": 0.0})

        await self._database.write(work)
