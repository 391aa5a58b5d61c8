"""Datasets, loaders and the like on the server: make one, call a function of one.

Bodies are not read here: JSON of many rows would keep everybody waiting. The session's worker reads them.
"""

from fastapi import APIRouter, Request, Response

from twinkle.errors import UnsupportedError
from twinkle.server.http.requests import PREFIX, body_of, gateway_of, json_response
from twinkle.server.processors.service import ProcessorService
from twinkle.server.protocols.native.http import IDEMPOTENCY_HEADER, caller_of

router = APIRouter(prefix=f"{PREFIX}/processor/twinkle")


@router.post("/create")
async def create(request: Request) -> Response:
    caller = await caller_of(request)
    service = _service(request)
    gateway_of(request).memory.guard.check()
    body, key = await body_of(request), request.headers.get(IDEMPOTENCY_HEADER)
    made = await service.create(caller.tenant_id, caller.session_id, body, key)
    session = await gateway_of(request).session(caller.session_id, caller.tenant_id)
    if session.state != "active":  # it ended meanwhile, and did not know of this processor
        await service.end_session(caller.session_id)
    return json_response({"processor_id": made})


@router.post("/call")
async def call(request: Request) -> Response:
    caller = await caller_of(request)
    service = _service(request)
    gateway_of(request).memory.guard.check()
    body, key = await body_of(request), request.headers.get(IDEMPOTENCY_HEADER)
    result = await service.call(caller.tenant_id, caller.session_id, body, key)
    return Response(result, media_type="application/json")


def _service(request: Request) -> ProcessorService:
    service = gateway_of(request).processors
    if not isinstance(service, ProcessorService):
        raise UnsupportedError("this server has no processors: its configuration has no application of theirs")
    return service
