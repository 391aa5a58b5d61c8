"""What the routes of our own protocol share: whose request it is, and of which session."""

from dataclasses import dataclass

from fastapi import Request

from twinkle.errors import InvalidInputError
from twinkle.server.http.requests import gateway_of, tenant_of

SESSION_HEADER = "x-twinkle-session-id"
IDEMPOTENCY_HEADER = "x-idempotency-key"
NUMBER_HEADER = "X-Twinkle-Seq-Id"  # of an answer: the number that the request has in its adapter's sequence
# Of requests with rows. Parsing lets no other thread work: so much takes a quarter of a second, for two million tokens.
ROWS_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Caller:
    tenant_id: str
    session_id: str


async def native_tenant_of(request: Request) -> str:
    """Any token is a tenant of its own, unless the server has keys."""
    return await tenant_of(request, prefix="")


async def caller_of(request: Request) -> Caller:
    """Who asks, in which of its sessions that is still active."""
    tenant_id = await native_tenant_of(request)
    session_id = request.headers.get(SESSION_HEADER)
    if not session_id:
        raise InvalidInputError("X-Twinkle-Session-Id header", session_id, "the id that create_session returned")
    await gateway_of(request).active_session(session_id, tenant_id)
    return Caller(tenant_id, session_id)
