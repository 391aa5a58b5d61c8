"""Giving a model back before its session ends."""

from fastapi import APIRouter, Request, Response

from twinkle.server.http.requests import PREFIX, gateway_of, json_response, parsed, tenant_of
from twinkle.server.wire.requests import UnloadModelRequest

router = APIRouter(prefix=PREFIX)


@router.post("/unload_model")
async def unload_model(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    model_id = (await parsed(UnloadModelRequest, request)).model_id
    request_id = await gateway_of(request).unloading.ask(model_id, tenant_id)
    return json_response({"request_id": request_id, "model_id": model_id})
