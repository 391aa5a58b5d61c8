"""The client handshake, what is served, health, and metrics for operators."""

import asyncio
import shutil
import time
from collections.abc import Mapping
from functools import partial

from fastapi import APIRouter, Request, Response

from twinkle.errors import NotFoundError, UnauthorizedError
from twinkle.server.config.sections import names_this_machine
from twinkle.server.gateway.fleet import ModelReport, stopped_in
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.gateway.reporting import Telemetry
from twinkle.server.http.requests import (
    PREFIX,
    bearer_of,
    body_of,
    gateway_of,
    is_loopback,
    json_response,
    parsed,
    tenant_of,
)
from twinkle.server.telemetry.metrics import render
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


@router.get("/healthz")
async def live(request: Request) -> Response:
    """Whether the process answers and its loops run: one that does not, or whose do not, is to be restarted."""
    failure = failure_of(gateway_of(request))
    if failure is not None:
        return json_response({"status": "failed", "detail": failure}, 503)
    return json_response({"status": "ok"})


@router.get("/healthz/ready")
async def ready(request: Request) -> Response:
    """Whether to send clients here: not while adapters are brought back after a restart, nor while it ends."""
    gateway = gateway_of(request)
    if gateway.stopping:
        return json_response({"ready": False, "detail": "the server is shutting down"}, 503)
    reports = await gateway.fleet.reports()
    recovering = [name for name, report in reports.items() if report.recovering]
    if recovering:
        return json_response({"ready": False, "detail": f"recovering: {', '.join(recovering)}"}, 503)
    return json_response({"ready": True, "detail": "serving"})


@router.get("/healthz/deep")
async def deep(request: Request) -> Response:
    """Of every model: whether its loops run, and whether its device is stuck."""
    models = await models_health(gateway_of(request))
    healthy = all(model["healthy"] for model in models.values())
    return json_response({"healthy": healthy, "models": models}, 200 if healthy else 503)


def failure_of(gateway: Gateway) -> str | None:
    """What in this process does not run though it should, and will not until it is restarted."""
    stopped = {name: stopped_in(entry, ending=gateway.stopping) for name, entry in gateway.services.items()}
    return "; ".join(f"{name}: {what}" for name, what in stopped.items() if what is not None) or None


async def models_health(gateway: Gateway) -> dict[str, dict[str, object]]:
    return {name: health_of(report) for name, report in (await gateway.fleet.reports()).items()}


def health_of(report: ModelReport) -> dict[str, object]:
    return {"healthy": report.healthy, "detail": report.detail}


router = APIRouter()

# Whoever passes a request on for somebody else says so in one of these.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")


def telemetry_of(request: Request) -> Telemetry:
    telemetry: Telemetry = request.app.state.telemetry
    return telemetry


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    telemetry = telemetry_of(request)
    _check_reader(request, telemetry)
    gateway = gateway_of(request)
    families = await telemetry.families(gateway)
    rendered = partial(render, families, request.headers.get("accept", ""))
    body, content_type = await gateway.tenants.pools.monitoring.in_thread("", rendered)
    return Response(body, headers={"Content-Type": content_type})


def _check_reader(request: Request, telemetry: Telemetry) -> None:
    """The token always does; without it callers on this machine, where nobody stands in between."""
    who = telemetry.config.metrics
    if who == "off":
        raise NotFoundError("page", "/metrics")
    if telemetry.has_token(bearer_of(request)):
        return
    if who == "local" and _is_local(request):
        return
    raise UnauthorizedError("the token in telemetry.metrics_token_file, as Authorization: Bearer")


def _is_local(request: Request) -> bool:
    """A proxy on this machine also calls from here: a server that has a public_url trusts no address."""
    if gateway_of(request).config.public_url is not None or any(name in request.headers for name in _FORWARDED):
        return False
    return is_loopback(request) and names_this_machine(request.url.hostname or "")
