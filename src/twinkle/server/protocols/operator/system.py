"""The client handshake, what is served, health, and metrics for operators.

Health and metrics never wait for the compute thread, which may be busy for a while.
"""

import asyncio
import shutil
import time
from collections.abc import Mapping
from functools import partial

from fastapi import Request, Response

from twinkle.errors import NotFoundError, UnauthorizedError
from twinkle.server.config.sections import names_this_machine
from twinkle.server.gateway.fleet import ModelReport, stopped_in
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.gateway.reporting import Telemetry
from twinkle.server.http.owners import anybody
from twinkle.server.http.requests import PREFIX, bearer_of, gateway_of, is_loopback, json_response
from twinkle.server.http.routes import Call, Routes, json_body, raw_body
from twinkle.server.telemetry.metrics import render
from twinkle.server.types import Budget
from twinkle.server.wire.requests import MAX_TELEMETRY_BYTES, ClientConfigRequest

routes = Routes()

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
# Whoever passes a request on for somebody else says so in one of these.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")


@routes.post(f"{PREFIX}/client/config", anybody, json_body(ClientConfigRequest))
async def client_config(call: Call[ClientConfigRequest]) -> Response:
    config = call.gateway.config
    clients = config.clients
    switches = {
        "pjwt_auth_enabled": config.auth.jwt,
        "create_model_via_load_weights": clients.create_model_by_loading,
        "sample_use_retrieve_futures": clients.batched_sample_polls,
        "custom_loss_server_side": clients.custom_loss_server_side,
    }
    return json_response({**_CLIENT_CONFIG, **switches})


@routes.post(f"{PREFIX}/client/dynamic_config", anybody, json_body(ClientConfigRequest))
async def dynamic_config(_call: Call[ClientConfigRequest]) -> Response:
    return json_response({"refresh_interval_sec": 300, "sample_cancel_enabled": True})


@routes.post(f"{PREFIX}/telemetry", anybody, raw_body(limit=MAX_TELEMETRY_BYTES), public=True, traced=False)
async def telemetry(_call: Call[bytes]) -> Response:
    """Accept what a client reports and drop it: a client whose telemetry is refused repeats it for ever."""
    return json_response({"status": "accepted"})


@routes.get(f"{PREFIX}/get_server_capabilities", anybody)
async def capabilities(call: Call[bytes]) -> Response:
    models = [
        {
            "model_name": name,
            "max_context_length": model.max_context_length,
            "trainable": True,
            "sampleable": model.sampleable,
        }
        for name, model in (await call.gateway.listed_models()).items()
    ]
    return json_response({"supported_models": models})


@routes.get(f"{PREFIX}/status", anybody, public=True, traced=False)
async def status(call: Call[bytes]) -> Response:
    """Return sums over all tenants: nothing here says who does what."""
    return json_response(
        {
            "uptime_seconds": time.time() - call.gateway.started_at,
            "budgets": await _budgets(call.gateway),
            "models": await status_of_models(call.gateway),
        }
    )


async def _budgets(gateway: Gateway) -> dict[str, Mapping[str, int]]:
    """Return what is in use of each resource in bytes, and its limit: of this process, and of the disk."""
    disk = await asyncio.to_thread(shutil.disk_usage, gateway.files.root)
    budgets = [*gateway.budgets, Budget("disk", disk.used, disk.total)]
    return {budget.resource: {"used": budget.used, "limit": budget.limit} for budget in budgets}


async def status_of_models(gateway: Gateway) -> dict[str, Mapping[str, object]]:
    return {name: report.numbers for name, report in (await gateway.fleet.reports()).items()}


# --- health -----------------------------------------------------------------------------------------------------------


@routes.get(f"{PREFIX}/healthz", anybody, public=True, traced=False, any_host=True)
async def live(call: Call[bytes]) -> Response:
    """Return whether the process answers and its loops run. One that does not, or whose do not, is to be restarted."""
    failure = failure_of(call.gateway)
    if failure is not None:
        return json_response({"status": "failed", "detail": failure}, 503)
    return json_response({"status": "ok"})


@routes.get(f"{PREFIX}/healthz/ready", anybody, public=True, traced=False)
async def ready(call: Call[bytes]) -> Response:
    """Return whether to send clients here: not while adapters are recovered after a restart, nor while it ends."""
    if call.gateway.stopping:
        return json_response({"ready": False, "detail": "the server is shutting down"}, 503)
    reports = await call.gateway.fleet.reports()
    recovering = [name for name, report in reports.items() if report.recovering]
    if recovering:
        return json_response({"ready": False, "detail": f"recovering: {', '.join(recovering)}"}, 503)
    return json_response({"ready": True, "detail": "serving"})


@routes.get(f"{PREFIX}/twinkle/healthz/deep", anybody, public=True, traced=False)
@routes.get(f"{PREFIX}/healthz/deep", anybody, public=True, traced=False)
async def deep(call: Call[bytes]) -> Response:
    """Return of every model whether its loops run, and whether its device is stuck."""
    reports = (await call.gateway.fleet.reports()).items()
    models = {name: health_of(report) for name, report in reports}
    healthy = all(model["healthy"] for model in models.values())
    return json_response({"healthy": healthy, "models": models}, 200 if healthy else 503)


def failure_of(gateway: Gateway) -> str | None:
    """Return what in this process does not run though it should, and will not until it is restarted."""
    stopped = {name: stopped_in(entry, ending=gateway.stopping) for name, entry in gateway.services.items()}
    return "; ".join(f"{name}: {what}" for name, what in stopped.items() if what is not None) or None


def health_of(report: ModelReport) -> dict[str, object]:
    return {"healthy": report.healthy, "detail": report.detail}


# --- metrics, in the form that Prometheus reads; tenants' keys open nothing here --------------------------------------


# Callers are checked below, by more than their Host header.
@routes.get("/metrics", anybody, public=True, traced=False, any_host=True)
async def metrics(call: Call[bytes]) -> Response:
    telemetry: Telemetry = call.request.app.state.telemetry
    _check_reader(call.request, telemetry)
    families = await telemetry.families(call.gateway)
    rendered = partial(render, families, call.request.headers.get("accept", ""))
    body, content_type = await call.gateway.tenants.pools.monitoring.in_thread("", rendered)
    return Response(body, headers={"Content-Type": content_type})


def _check_reader(request: Request, telemetry: Telemetry) -> None:
    """Raise unless the caller has the token, or calls from this machine with nobody in between where that will do."""
    who = telemetry.config.metrics
    if who == "off":
        raise NotFoundError("page", "/metrics")
    if telemetry.has_token(bearer_of(request)):
        return
    if who == "local" and _is_local(request):
        return
    raise UnauthorizedError("the token in telemetry.metrics_token_file, as Authorization: Bearer")


def _is_local(request: Request) -> bool:
    """Return whether a caller is on this machine. A proxy here calls from here, too: with a public_url nobody is."""
    if gateway_of(request).config.public_url is not None or any(name in request.headers for name in _FORWARDED):
        return False
    return is_loopback(request) and names_this_machine(request.url.hostname or "")
