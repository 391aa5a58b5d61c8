"""Checkpoints: expiry, publishing within this server, copies."""

from fastapi import APIRouter, Request, Response

from twinkle.server.gateway.weight_copies import copy_weights
from twinkle.server.http.requests import PREFIX, gateway_of, json_response, parsed, tenant_of
from twinkle.server.protocols.tinker.runs import path_of
from twinkle.server.wire.checkpoint_requests import CopyWeightsRequest, SetTtlRequest
from twinkle.server.wire.requests import check_access_token

router = APIRouter(prefix=PREFIX)

_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


@router.put(f"{_CHECKPOINT}/ttl")
async def set_ttl(request: Request, run_id: str, kind: str, name: str) -> Response:
    tenant_id = await tenant_of(request)
    wanted = await parsed(SetTtlRequest, request)
    actions = gateway_of(request).checkpoint_actions
    await actions.set_ttl(path_of(run_id, kind, name), tenant_id, wanted.ttl_seconds)
    return json_response({})


@router.post(f"{_CHECKPOINT}/publish")
async def publish(request: Request, run_id: str, kind: str, name: str) -> Response:
    tenant_id = await tenant_of(request)
    await gateway_of(request).checkpoint_actions.set_public(path_of(run_id, kind, name), tenant_id, True)
    return json_response({})


@router.delete(f"{_CHECKPOINT}/publish")
async def unpublish(request: Request, run_id: str, kind: str, name: str) -> Response:
    tenant_id = await tenant_of(request)
    await gateway_of(request).checkpoint_actions.set_public(path_of(run_id, kind, name), tenant_id, False)
    return json_response({})


@router.post("/copy_weights")
async def copy(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    wanted = await parsed(CopyWeightsRequest, request)
    check_access_token(request.headers.get("x-tinker-weights-access-token"))
    key = request.headers.get("x-idempotency-key")
    path = await copy_weights(gateway_of(request), tenant_id, wanted, key)
    return json_response({"tinker_path": str(path)})
