"""The configuration for clients, the served models, health, and metrics for operators.

Health and metrics never wait for the compute thread, which may be busy for a while.
"""

import asyncio
import shutil
import time
from collections.abc import Mapping
from functools import partial

from fastapi import Request, Response

import twinkle
from twinkle.errors import NotFoundError, UnauthorizedError
from twinkle.server.config.meshes import describe_mesh
from twinkle.server.gateway.fleet import ModelReport, stopped_in
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.gateway.reporting import Telemetry
from twinkle.server.http.owners import anybody
from twinkle.server.http.requests import PREFIX, bearer_of, is_local, json_response
from twinkle.server.http.routes import Call, Routes, json_body, raw_body
from twinkle.server.telemetry.metrics import render
from twinkle.server.telemetry.readings import host_memory, process_memory
from twinkle.server.types import Budget
from twinkle.server.wire.requests import MAX_TELEMETRY_BYTES, ClientConfigRequest

routes = Routes()

# Settings for the SDK. parallel_fwdbwd_chunks: the chunks of a large batch may come in parallel and in any order. The
# others are the SDK's defaults, written out where this server depends on them.
_CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "proto_write_fwdbwd": True,  # without this, SDKs up to 0.25 send JSON, which is slower to read
    "fwd_via_fwdbwd": True,
    "sample_join_sampling_session": True,
    "sample_max_concurrent_requests": 512,
}


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
    """Accept a client's telemetry and drop it: a client whose telemetry is refused sends it again for ever."""
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
    """Return the version, and numbers of this process and of each model, over all tenants, not by tenant."""
    gateway = call.gateway
    models = await status_of_models(gateway)
    disk = await asyncio.to_thread(shutil.disk_usage, gateway.files.root)
    budgets = [*gateway.budgets, Budget("disk", disk.used, disk.total)]
    return json_response(
        {
            "version": twinkle.__version__,
            "runtime": gateway.config.runtime,
            "uptime_seconds": time.time() - gateway.started_at,
            "memory": await asyncio.to_thread(_memory),
            "disk": {"free_bytes": disk.free, "total_bytes": disk.total},
            "queue": {
                "training_ops": sum_of(models, "queued_ops"),
                "samples": sum_of(models, "waiting_samples"),
            },
            "budgets": {budget.resource: {"used": budget.used, "limit": budget.limit} for budget in budgets},
            "models": models,
        }
    )


def _memory() -> dict[str, int]:
    host = host_memory()
    return {
        "process_bytes": process_memory(),
        "machine_available_bytes": host["available"],
        "machine_bytes": host["total"],
    }


async def status_of_models(gateway: Gateway) -> dict[str, dict[str, object]]:
    """Return state, mesh, device, replicas and numbers of each configured model, by name."""
    reports = await gateway.fleet.reports()
    found: dict[str, dict[str, object]] = {}
    for served in gateway.config.served_models:
        report = reports.get(served.name)
        known = {"state": "no replica has answered yet"} if report is None else _status(report)
        found[served.name] = {**known, "mesh": describe_mesh(served.model)}
    return found


def _status(report: ModelReport) -> dict[str, object]:
    away = report.silent_replicas
    replicas = {"configured": len(report.replicas), "answering": len(report.replicas) - len(away), "silent": away}
    state = "recovering" if report.healthy and report.recovering else report.detail
    return {"state": state, "device": report.device, "replicas": replicas, **report.numbers}


def sum_of(models: Mapping[str, Mapping[str, object]], number: str) -> int:
    return sum(value for model in models.values() if isinstance(value := model.get(number), int))


# --- health -----------------------------------------------------------------------------------------------------------


@routes.get(f"{PREFIX}/healthz", anybody, public=True, traced=False, any_host=True)
async def live(call: Call[bytes]) -> Response:
    """Return whether the process is alive and its service loops run. If this fails, the process must be restarted."""
    failure = failure_of(call.gateway)
    if failure is not None:
        return json_response({"status": "failed", "detail": failure}, 503)
    return json_response({"status": "ok"})


@routes.get(f"{PREFIX}/healthz/ready", anybody, public=True, traced=False)
async def ready(call: Call[bytes]) -> Response:
    """Return whether the server is ready for clients: not during recovery after a restart or during a shutdown.

    On Ray it is ready when all replicas of all models answer.
    """
    if call.gateway.stopping:
        return json_response({"ready": False, "detail": "the server is shutting down"}, 503)
    reports = await call.gateway.fleet.reports()
    unready = [f"no replica of {name} has answered" for name in _never_heard(call.gateway, reports)]
    unready += [
        f"no answer from {', '.join(report.silent_replicas)}" if report.silent_replicas else f"recovering: {name}"
        for name, report in reports.items()
        if report.recovering
    ]
    if unready:
        return json_response({"ready": False, "detail": "; ".join(unready)}, 503)
    return json_response({"ready": True, "detail": "serving"})


@routes.get(f"{PREFIX}/twinkle/healthz/deep", anybody, public=True, traced=False)
@routes.get(f"{PREFIX}/healthz/deep", anybody, public=True, traced=False)
async def deep(call: Call[bytes]) -> Response:
    """Return for each model whether its service loops run, and whether a step is stuck."""
    reports = await call.gateway.fleet.reports()
    models = {name: health_of(report) for name, report in reports.items()}
    for name in _never_heard(call.gateway, reports):
        models[name] = {"healthy": False, "detail": "none of its replicas has answered"}
    healthy = all(model["healthy"] for model in models.values())
    return json_response({"healthy": healthy, "models": models}, 200 if healthy else 503)


def _never_heard(gateway: Gateway, reports: Mapping[str, ModelReport]) -> list[str]:
    """Return the configured models of which no process has reported yet; on the embedded runtime there are none."""
    return [served.name for served in gateway.config.served_models if served.name not in reports]


def failure_of(gateway: Gateway) -> str | None:
    """Return which service loops of this process have stopped, one for each model, as text; None if all run.

    A loop that has stopped starts again only with the process.
    """
    stopped = {name: stopped_in(entry, ending=gateway.stopping) for name, entry in gateway.services.items()}
    return "; ".join(f"{name}: {what}" for name, what in stopped.items() if what is not None) or None


def health_of(report: ModelReport) -> dict[str, object]:
    return {"healthy": report.healthy, "detail": report.detail}


# --- metrics for Prometheus; the keys of tenants do not give access ---------------------------------------------------


# Any Host header is accepted here, because _check_reader checks more than that.
@routes.get("/metrics", anybody, public=True, traced=False, any_host=True)
async def metrics(call: Call[bytes]) -> Response:
    telemetry: Telemetry = call.request.app.state.telemetry
    _check_reader(call.request, telemetry)
    families = await telemetry.families(call.gateway)
    rendered = partial(render, families, call.request.headers.get("accept", ""))
    body, content_type = await call.gateway.tenants.pools.monitoring.in_thread("", rendered)
    return Response(body, headers={"Content-Type": content_type})


def _check_reader(request: Request, telemetry: Telemetry) -> None:
    """Raise unless the caller may read metrics: with the token or, if configured, from this machine without a proxy."""
    who = telemetry.config.metrics
    if who == "off":
        raise NotFoundError("page", "/metrics")
    if telemetry.has_token(bearer_of(request)):
        return
    if who == "local" and is_local(request):
        return
    raise UnauthorizedError("the token in telemetry.metrics_token_file, as Authorization: Bearer")
