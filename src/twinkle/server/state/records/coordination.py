"""Coordination of processes that share a database: leases for work that only one may do, and requests of operators.

Whoever can write to the database may make requests as an operator; there is no port and no token for that. The server
looks for requests during its maintenance, and the command that made a request waits for the answer.
"""

import secrets
from dataclasses import dataclass
from enum import Enum

from sqlalchemy import bindparam, delete, select

from twinkle.server.state.database.database import Cursor
from twinkle.server.state.database.mapper import RecordMapper
from twinkle.server.state.database.tables import LEASES, OPERATOR_REQUESTS
from twinkle.server.state.records.area import Area, in_write

# --- leases -----------------------------------------------------------------------------------------------------------


class Claim(Enum):
    """The result of :meth:`Leases.claim`."""

    REFUSED = "refused"  # another process holds the lease
    TAKEN = "taken"  # it was free, or the lease of another process had expired
    RENEWED = "renewed"  # this process had it last


class Leases(Area):
    """The leases. Work that only one process may do is done by the holder of its lease, until the lease expires."""

    @in_write
    def claim(self, cursor: Cursor, name: str, holder: str, now: float, seconds: float) -> Claim:
        """Take or renew a lease for ``seconds`` from now, unless another process holds it."""
        row = cursor.find(LEASES, name=name)
        if row is None:
            cursor.insert(LEASES, name=name, holder=holder, until=now + seconds)
            return Claim.TAKEN
        if row["holder"] != holder and row["until"] > now:
            return Claim.REFUSED
        cursor.update(LEASES, {"name": name}, holder=holder, until=now + seconds)
        return Claim.RENEWED if row["holder"] == holder else Claim.TAKEN

    async def give_up(self, name: str, holder: str) -> None:
        """End a lease early, so that another process can take it."""
        await self._update(LEASES, {"name": name, "holder": holder}, until=0.0)


# --- requests of operators --------------------------------------------------------------------------------------------

EVICT = "evict"  # evict the adapter of the run ``target``

_OPEN = (
    select(OPERATOR_REQUESTS)
    .where(OPERATOR_REQUESTS.c.answer.is_(None))
    .order_by(OPERATOR_REQUESTS.c.created_at, OPERATOR_REQUESTS.c.request_id)
)
_DELETE_OLD = delete(OPERATOR_REQUESTS).where(OPERATOR_REQUESTS.c.created_at < bindparam("before"))


@dataclass(frozen=True)
class OperatorRequest:
    """One request of an operator. ``kind`` is ``EVICT``, ``target`` a run id, ``answer`` None until there is one."""

    request_id: str
    kind: str
    target: str
    created_at: float
    answer: str | None = None
    failed: bool = False


_REQUEST = RecordMapper(OperatorRequest, OPERATOR_REQUESTS)


class OperatorRequests(Area):
    """The requests that operators send to the running server with the command line, and its answers."""

    async def ask(self, kind: str, target: str, now: float) -> OperatorRequest:
        """Store a request for the server and return it. Poll :meth:`get` for the answer."""
        request = OperatorRequest(f"ask-{secrets.token_hex(8)}", kind, target, now)
        await self._database.write(lambda cursor: _REQUEST.insert(cursor, request))
        return request

    async def get(self, request_id: str) -> OperatorRequest | None:
        return await self._find(_REQUEST, request_id=request_id)

    async def open(self) -> tuple[OperatorRequest, ...]:
        """Return the requests without an answer, oldest first."""
        return await self._all(_REQUEST, _OPEN)

    async def answer(self, request_id: str, answer: str, *, failed: bool) -> None:
        await self._update(OPERATOR_REQUESTS, {"request_id": request_id}, answer=answer, failed=int(failed))

    async def withdraw(self, request_id: str) -> None:
        """Delete a request whose command does not wait for the answer any more."""
        await self._database.write(lambda cursor: cursor.delete(OPERATOR_REQUESTS, request_id=request_id))

    async def forget(self, before: float) -> None:
        """Delete requests made before that time: their commands have ended without deleting them."""
        await self._execute(_DELETE_OLD, before=before)
