"""Futures: a request waits here until its result exists, or for a while."""

from fastapi import APIRouter, Request, Response

from twinkle.errors import NotFoundError
from twinkle.server import ids
from twinkle.server.gateway import Gateway
from twinkle.server.routes.http import PREFIX, gateway_of, parsed, tenant_of
from twinkle.server.types import Outcome
from twinkle.server.wire import responses
from twinkle.server.wire.requests import RetrieveFutureRequest

router = APIRouter(prefix=PREFIX)

# The SDK gives up on a poll after 45 s.
_LONG_POLL_SECONDS = 25.0


@router.post("/retrieve_future")
async def retrieve_future(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    request_id = (await parsed(RetrieveFutureRequest, request)).request_id
    outcome = await _outcome(gateway_of(request), request_id, tenant_id)
    if outcome is None:
        return Response(responses.pending(request_id, "active"), 408, media_type="application/json")
    return Response(outcome.body, media_type=outcome.encoding.value)


async def _outcome(gateway: Gateway, request_id: str, tenant_id: str) -> Outcome | None:
    """None while there is none. Unknown ids and other tenants' ids answer alike."""
    parts = ids.split_request_id(request_id)
    if parts is None:
        raise NotFoundError("request", request_id)
    owner, seq = parts
    if ":sample:" in owner:
        session = await gateway.sampling_session(owner, tenant_id)
        return await gateway.sampler_of(session).wait(request_id, _LONG_POLL_SECONDS)
    run = await gateway.run(owner, tenant_id)
    return await gateway.serving(run.model_name).training.wait(request_id, owner, seq, _LONG_POLL_SECONDS)
