"""Where processes that share a database meet: leases for work that only one may do, and requests of operators.

Whoever can write to the database is an operator: there is no other way in, no port and no token. The server looks for
requests during its maintenance; the command that made one waits for the answer.
"""

import secrets
from dataclasses import dataclass
from enum import Enum

from sqlalchemy import bindparam, delete, insert, select, update

from twinkle.server.state.database.database import Cursor
from twinkle.server.state.database.mapper import RecordMapper
from twinkle.server.state.database.tables import LEASES, OPERATOR_REQUESTS
from twinkle.server.state.records.area import Area, in_write

# --- leases -----------------------------------------------------------------------------------------------------------

_OF_NAME = LEASES.c.name == bindparam("lease")
_GET_LEASE = select(LEASES).where(_OF_NAME)
_INSERT_LEASE = insert(LEASES)
_TAKE = update(LEASES).where(_OF_NAME).values(holder=bindparam("by"), until=bindparam("end"))


class Claim(Enum):
    """What became of a claim."""

    REFUSED = "refused"  # another holds the lease
    TAKEN = "taken"  # it was free, or another's that ran out
    RENEWED = "renewed"  # it was ours, and nobody has had it since


class Leases(Area):
    """Work that only one of several processes may do is done by whoever holds its lease, until the lease runs out."""

    @in_write
    def claim(self, cursor: Cursor, name: str, holder: str, now: float, seconds: float) -> Claim:
        """Take or renew a lease for so many seconds from now, unless another process holds it."""
        row = cursor.row(_GET_LEASE, {"lease": name})
        if row is None:
            cursor.execute(_INSERT_LEASE, {"name": name, "holder": holder, "until": now + seconds})
            return Claim.TAKEN
        if row["holder"] != holder and row["until"] > now:
            return Claim.REFUSED
        cursor.execute(_TAKE, {"lease": name, "by": holder, "end": now + seconds})
        return Claim.RENEWED if row["holder"] == holder else Claim.TAKEN

    @in_write
    def give_up(self, cursor: Cursor, name: str, holder: str) -> None:
        """End a lease early, so that another process can take it."""
        row = cursor.row(_GET_LEASE, {"lease": name})
        if row is not None and row["holder"] == holder:
            cursor.execute(_TAKE, {"lease": name, "by": holder, "end": 0.0})


# --- requests of operators --------------------------------------------------------------------------------------------

EVICT = "evict"  # an adapter, by its run

_OF_ID = OPERATOR_REQUESTS.c.request_id == bindparam("id")
_GET = select(OPERATOR_REQUESTS).where(_OF_ID)
_OPEN = (
    select(OPERATOR_REQUESTS)
    .where(OPERATOR_REQUESTS.c.answer.is_(None))
    .order_by(OPERATOR_REQUESTS.c.created_at, OPERATOR_REQUESTS.c.request_id)
)
_ANSWER = update(OPERATOR_REQUESTS).where(_OF_ID).values(answer=bindparam("said"), failed=bindparam("is_failed"))
_DELETE = delete(OPERATOR_REQUESTS).where(_OF_ID)
_DELETE_OLD = delete(OPERATOR_REQUESTS).where(OPERATOR_REQUESTS.c.created_at < bindparam("before"))


@dataclass(frozen=True)
class OperatorRequest:
    """``kind``: evict; ``target``: a run. ``answer`` is None until the server has one."""

    request_id: str
    kind: str
    target: str
    created_at: float
    answer: str | None = None
    failed: bool = False


_REQUEST = RecordMapper(OperatorRequest, OPERATOR_REQUESTS)


class OperatorRequests(Area):
    """What operators ask of the running server on the command line, and its answers."""

    async def ask(self, kind: str, target: str, now: float) -> OperatorRequest:
        request = OperatorRequest(f"ask-{secrets.token_hex(8)}", kind, target, now)
        await self._database.write(lambda cursor: _REQUEST.insert(cursor, request))
        return request

    async def get(self, request_id: str) -> OperatorRequest | None:
        return await self._first(_REQUEST, _GET, id=request_id)

    async def open(self) -> tuple[OperatorRequest, ...]:
        """Return the requests without an answer, oldest first."""
        return await self._all(_REQUEST, _OPEN)

    async def answer(self, request_id: str, answer: str, *, failed: bool) -> None:
        await self._execute(_ANSWER, id=request_id, said=answer, is_failed=int(failed))

    async def withdraw(self, request_id: str) -> None:
        """Delete a request that nobody waits for any more."""
        await self._execute(_DELETE, id=request_id)

    async def forget(self, before: float) -> None:
        """Delete the requests made before then, which nobody came back for."""
        await self._execute(_DELETE_OLD, before=before)
