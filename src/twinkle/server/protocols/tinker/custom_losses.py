"""Losses that tenants make."""

from fastapi import APIRouter, Request, Response

from twinkle.server.http.requests import PREFIX, body_of, gateway_of, json_response, tenant_of
from twinkle.server.wire import fields
from twinkle.server.wire.custom_losses import MAX_BODY_BYTES, Place

router = APIRouter(prefix=PREFIX)


@router.post("/create_custom_loss")
async def create_custom_loss(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    body = await body_of(request, MAX_BODY_BYTES)
    place = fields.parse(Place, body)
    gateway = gateway_of(request)
    session = await gateway.active_session(place.session_id, tenant_id)
    return json_response({"request_id": await gateway.custom_losses.create(session, place.custom_loss_seq_id, body)})
