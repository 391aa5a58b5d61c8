"""The client handshake, what is served, and how the server is doing."""

import asyncio
import shutil
import time
from collections.abc import Mapping

from fastapi import APIRouter, Request, Response

from twinkle.server.gateway.gateway import Gateway
from twinkle.server.http.requests import PREFIX, body_of, gateway_of, json_response, parsed, tenant_of
from twinkle.server.types import Budget
from twinkle.server.wire.requests import MAX_TELEMETRY_BYTES, ClientConfigRequest

router = APIRouter(prefix=PREFIX)

# Chunks of a large batch may come in parallel and in any order; the rest are the SDK's defaults, made explicit where
# they matter to us.
_CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "proto_write_fwdbwd": True,  # up to 0.25 the SDK writes JSON, which we do not read, unless it is told to
    "fwd_via_fwdbwd": True,
    "sample_join_sampling_session": True,
    "sample_max_concurrent_requests": 512,
}


@router.post("/client/config")
async def client_config(request: Request) -> Response:
    await tenant_of(request)
    await parsed(ClientConfigRequest, request)
    config = gateway_of(request).config
    clients = config.clients
    switches = {
        "pjwt_auth_enabled": config.auth.jwt,
        "create_model_via_load_weights": clients.create_model_by_loading,
        "sample_use_retrieve_futures": clients.batched_sample_polls,
        "custom_loss_server_side": clients.custom_loss_server_side,
    }
    return json_response({**_CLIENT_CONFIG, **switches})


@router.post("/client/dynamic_config")
async def dynamic_config(request: Request) -> Response:
    await tenant_of(request)
    await parsed(ClientConfigRequest, request)
    return json_response({"refresh_interval_sec": 300, "sample_cancel_enabled": True})


@router.post("/telemetry")
async def telemetry(request: Request) -> Response:
    """Thrown away, whatever it says: a client whose telemetry is refused repeats it for ever."""
    await body_of(request, MAX_TELEMETRY_BYTES)
    return json_response({"status": "accepted"})


@router.get("/get_server_capabilities")
async def capabilities(request: Request) -> Response:
    await tenant_of(request)
    models = [
        {
            "model_name": name,
            "max_context_length": model.max_context_length,
            "trainable": True,
            "sampleable": model.sampleable,
        }
        for name, model in (await gateway_of(request).listed_models()).items()
    ]
    return json_response({"supported_models": models})


@router.get("/status")
async def status(request: Request) -> Response:
    """Sums over all tenants: nothing here says who does what."""
    gateway = gateway_of(request)
    return json_response(
        {
            "uptime_seconds": time.time() - gateway.started_at,
            "budgets": await _budgets(gateway),
            "models": await status_of_models(gateway),
        }
    )


async def _budgets(gateway: Gateway) -> dict[str, Mapping[str, int]]:
    """Return what is in use of each resource in bytes, and its limit: of this process, and of the disk."""
    disk = await asyncio.to_thread(shutil.disk_usage, gateway.files.root)
    budgets = [*gateway.budgets, Budget("disk", disk.used, disk.total)]
    return {budget.resource: {"used": budget.used, "limit": budget.limit} for budget in budgets}


async def status_of_models(gateway: Gateway) -> dict[str, Mapping[str, object]]:
    return {name: report.numbers for name, report in (await gateway.fleet.reports()).items()}
