"""Routes of the native protocol beside verbs and samples: sessions, health, status, runs, checkpoints, metrics.

Runs and checkpoints of all protocols are listed here, also those of Tinker's SDK; and Tinker's routes list those of the
native protocol.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated

from fastapi import Query, Request, Response
from fastapi.responses import PlainTextResponse

from twinkle.errors import InvalidInputError
from twinkle.server import ids
from twinkle.server.gateway.fleet import report_of
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.http.owners import anybody, by_first_replica, by_run_in_path
from twinkle.server.http.requests import PREFIX, json_response, key_id_of, listing
from twinkle.server.http.routes import Call, Routes, json_body, raw_body
from twinkle.server.ids import CheckpointPath
from twinkle.server.protocols.native.requests import (
    ANY_KEY,
    TEMPLATES_KEY,
    sampling_services_of,
    services_of,
    wire_response,
)
from twinkle.server.protocols.operator.system import failure_of, health_of, status_of_models, sum_of
from twinkle.server.protocols.tinker.runs import (
    Limit,
    Offset,
    archive_title,
    checkpoint_body,
    path_of,
    run_body,
    tar_response,
)
from twinkle.server.services.checkpoints.export import check_format
from twinkle.server.services.training.adapters import AdapterStatus, Residency
from twinkle.server.types import CheckpointRecord, MetricPoint, RunRecord, SessionRecord
from twinkle.server.wire import fields
from twinkle_client.protocol import runs as run_types
from twinkle_client.protocol import sessions as session_types
from twinkle_client.protocol.base import IDEMPOTENCY_HEADER

routes = Routes(key_prefix=ANY_KEY)

_TWINKLE = f"{PREFIX}/twinkle"
_METRICS = f"{_TWINKLE}/training_runs/{{run_id}}/metrics"
Since = Annotated[int, Query(ge=0, lt=2**63)]
Points = Annotated[int, Query(ge=1, le=4096)]
Form = Annotated[str | None, Query(alias="format")]
Few = Annotated[int, Query(ge=1, le=100)]
_MAX_KEY = 256  # characters of an idempotency key
_PUBLIC_OWNER = "public"  # shown instead of the tenant that owns a public checkpoint


class CreateSessionRequest(fields.Request):
    """The body of create_session, with limits on the size of the metadata."""

    metadata: fields.AnyMetadata | None = None


# --- sessions ---------------------------------------------------------------------------------------------------------


@routes.post(f"{_TWINKLE}/create_session", anybody, json_body(CreateSessionRequest))
async def create_session(call: Call[CreateSessionRequest]) -> Response:
    metadata = call.body.metadata or {}
    if TEMPLATES_KEY in metadata:
        raise InvalidInputError("metadata", TEMPLATES_KEY, "any other key: this one is reserved")
    now = time.time()
    session = SessionRecord(
        session_id=ids.new_native_session_id(),
        tenant_id=call.tenant_id,
        created_at=now,
        last_seen=now,
        sdk_version="twinkle",
        user_metadata=metadata,
    )
    made = await call.gateway.create_session(session, _idempotency_key(call.request))
    return wire_response(session_types.CreateSessionResponse(session_id=made.session_id))


@routes.post(f"{_TWINKLE}/session_heartbeat", anybody, json_body(session_types.SessionHeartbeatRequest), traced=False)
async def heartbeat(call: Call[session_types.SessionHeartbeatRequest]) -> Response:
    await call.gateway.heartbeat(call.body.session_id, call.tenant_id)
    return wire_response(session_types.SessionHeartbeatResponse())


@routes.post(f"{_TWINKLE}/finish_session", anybody, json_body(session_types.FinishSessionRequest))
async def finish_session(call: Call[session_types.FinishSessionRequest]) -> Response:
    await call.gateway.finish_session(call.body.session_id, call.tenant_id)
    return wire_response(session_types.FinishSessionResponse())


def _idempotency_key(request: Request) -> str | None:
    """Return the idempotency key with a prefix, so that the same key in Tinker's protocol is another session."""
    key = request.headers.get(IDEMPOTENCY_HEADER)
    if key is not None and len(key) > _MAX_KEY:
        raise InvalidInputError(f"{IDEMPOTENCY_HEADER} header", f"{len(key)} characters", f"at most {_MAX_KEY}")
    return None if key is None else f"native:{key}"


# --- the server -------------------------------------------------------------------------------------------------------


@routes.get("/-/routes", anybody, public=True)
async def route_prefixes(call: Call[bytes]) -> Response:
    """List the applications of this server by prefix; processors are always listed. Clients poll this at the start."""
    reports = await call.gateway.fleet.reports()
    models = {f"{PREFIX}/model/{name}": "model" for name in reports}
    samplers = {f"{PREFIX}/sampler/{name}": "sampler" for name, report in reports.items() if report.sampleable}
    return json_response({PREFIX: "server", **models, **samplers, f"{PREFIX}/processor": "processor"})


@routes.get("/-/healthz", anybody, public=True, traced=False, any_host=True)
async def serve_health(_call: Call[bytes]) -> Response:
    """Answer as Ray Serve's proxy does by itself, so that both runtimes can be monitored in the same way."""
    return PlainTextResponse("success")


@routes.get(f"{_TWINKLE}/healthz", anybody, public=True, traced=False, any_host=True)
async def health(call: Call[bytes]) -> Response:
    failure = failure_of(call.gateway)
    return wire_response(session_types.HealthResponse(status=failure or "ok"), 200 if failure is None else 503)


@routes.get(f"{PREFIX}/model/{{model:path}}/healthz", by_first_replica, public=True, traced=False)
async def health_of_model(call: Call[bytes], model: str) -> Response:
    report = report_of(services_of(call.gateway, model), call.gateway.config.telemetry.stuck_step_seconds)
    return _health_response(health_of(report))


@routes.get(f"{PREFIX}/sampler/{{model:path}}/healthz", by_first_replica, public=True, traced=False)
async def sampler_health(call: Call[bytes], model: str) -> Response:
    sampling = sampling_services_of(call.gateway, model).sampling
    alive = sampling is not None and sampling.loop.alive
    return _health_response({"healthy": alive, "detail": "samples" if alive else "sampling has stopped"})


def _health_response(health: dict[str, object]) -> Response:
    return json_response(health, 200 if health["healthy"] else 503)


@routes.get(f"{_TWINKLE}/get_server_capabilities", anybody)
async def capabilities(call: Call[bytes]) -> Response:
    models = [session_types.SupportedModel(model_name=name) for name in await call.gateway.listed_models()]
    return wire_response(session_types.GetServerCapabilitiesResponse(supported_models=models))


@routes.get(f"{_TWINKLE}/capacity_info", anybody)
async def capacity_info(call: Call[bytes]) -> Response:
    """Return how many adapters the calling tenant may have, has, and may still create."""
    most = call.gateway.tenants.limits(call.tenant_id).max_adapters_per_tenant
    used = sum(report.adapters.get(call.tenant_id, 0) for report in (await call.gateway.fleet.reports()).values())
    return wire_response(
        session_types.CapacityInfoResponse(max_loras=most, used_loras=used, free_loras=max(0, most - used)),
    )


@routes.get(f"{_TWINKLE}/status", anybody, public=True, traced=False)
async def status(call: Call[bytes]) -> Response:
    """Return numbers of the whole server and of each model. They are over all tenants, not by tenant."""
    models = await status_of_models(call.gateway)
    resources = {
        "sessions": await call.gateway.store.sessions.active(),
        "models": sum_of(models, "adapters"),
        "sampling_sessions": await call.gateway.store.sampling_sessions.active(),
        "futures": sum_of(models, "queued_ops") + sum_of(models, "waiting_samples"),
    }
    cleanup = {"running": True, "expiration_timeout": call.gateway.config.limits.session_timeout_seconds}
    return json_response({"resources": resources, "cleanup": cleanup, "models": models})


# --- runs and checkpoints ---------------------------------------------------------------------------------------------


@routes.get(f"{_TWINKLE}/training_runs", anybody)
async def training_runs(call: Call[bytes], limit: Limit = 20, offset: Offset = 0, all_users: bool = False) -> Response:
    """List the tenant's runs. ``all_users``, which older clients send, is ignored: a tenant sees only its own runs."""
    page = await call.gateway.store.runs.list(call.tenant_id, limit, offset)
    runs = [await _training_run(call.gateway, run) for run in page.items]
    cursor = run_types.Cursor(limit=limit, offset=offset, total_count=page.total)
    return wire_response(run_types.TrainingRunsResponse(training_runs=runs, cursor=cursor))


@routes.get(f"{_TWINKLE}/training_runs/{{run_id}}", anybody)
async def training_run(call: Call[bytes], run_id: str) -> Response:
    return wire_response(await _training_run(call.gateway, await call.gateway.run_record(run_id, call.tenant_id)))


@routes.get(f"{_TWINKLE}/training_runs/{{run_id}}/checkpoints", anybody)
async def checkpoints_of_run(call: Call[bytes], run_id: str) -> Response:
    """List a run's checkpoints, oldest first: the last one is the newest."""
    run = await call.gateway.run_record(run_id, call.tenant_id)
    records = await call.gateway.store.checkpoints.of_run(run_id)
    listed = [_checkpoint(record, run) for record in reversed(records)]
    return wire_response(run_types.CheckpointsListResponse(checkpoints=listed))


@routes.delete(f"{_TWINKLE}/training_runs/{{run_id}}/checkpoints/{{checkpoint_id:path}}", anybody)
async def delete_checkpoint(call: Call[bytes], run_id: str, checkpoint_id: str) -> Response:
    path = _path(run_id, checkpoint_id)
    await call.gateway.checkpoint_actions.delete(path, call.tenant_id)
    return wire_response(run_types.DeleteCheckpointResponse(success=True, message=f"deleted {path.native}"))


@routes.get(f"{_TWINKLE}/checkpoint_path/{{run_id}}/{{checkpoint_id:path}}", anybody)
async def checkpoint_path(call: Call[bytes], run_id: str, checkpoint_id: str) -> Response:
    """Return the address of a checkpoint in both fields, ``path`` and ``twinkle_path``; clients see no directories."""
    path = _path(run_id, checkpoint_id)
    await call.gateway.checkpoint(path, call.tenant_id)
    return wire_response(run_types.CheckpointPathResponse(path=path.native, twinkle_path=path.native))


@routes.post(f"{_TWINKLE}/weights_info", anybody, json_body(run_types.WeightsInfoRequest))
async def weights_info(call: Call[run_types.WeightsInfoRequest]) -> Response:
    run = await call.gateway.run_of_checkpoint(call.body.twinkle_path, call.tenant_id, "twinkle_path")
    return wire_response(
        run_types.WeightsInfoResponse(
            training_run_id=run.run_id,
            base_model=run.base_model,
            model_owner=run.tenant_id if run.tenant_id == call.tenant_id else _PUBLIC_OWNER,
            is_lora=run.lora is not None,
            lora_rank=None if run.lora is None else run.lora.rank,
        )
    )


def _path(run_id: str, checkpoint_id: str) -> CheckpointPath:
    return CheckpointPath.from_segments([run_id, *checkpoint_id.split("/")], f"{run_id}/{checkpoint_id}", "checkpoint")


async def _training_run(gateway: Gateway, run: RunRecord) -> run_types.TrainingRun:
    last = await gateway.store.checkpoints.latest(run.run_id)
    weights, sampler = last.get("weights"), last.get("sampler_weights")
    return run_types.TrainingRun.model_validate(
        {
            **run_body(run),
            # In a run of Tinker's protocol, save_dir is a label like any other: the server writes nothing there.
            "save_dir": run.user_metadata.get("save_dir") if ids.is_native_run(run.run_id) else None,
            "last_checkpoint": None if weights is None else _checkpoint(weights, run).model_dump(mode="json"),
            "last_sampler_checkpoint": None if sampler is None else _checkpoint(sampler, run).model_dump(mode="json"),
        }
    )


def _checkpoint(record: CheckpointRecord, run: RunRecord) -> run_types.Checkpoint:
    lora = run.lora
    by_kind = lora is not None and lora.target_modules is None  # else the modules to train were named one by one
    return run_types.Checkpoint.model_validate(
        {
            **checkpoint_body(record),
            "twinkle_path": CheckpointPath(record.run_id, record.kind, record.name).native,
            "base_model": run.base_model,
            "is_lora": lora is not None,
            "lora_rank": None if lora is None else lora.rank,
            "train_unembed": lora.train_unembed if lora is not None and by_kind else None,
            "train_mlp": lora.train_mlp if lora is not None and by_kind else None,
            "train_attn": lora.train_attn if lora is not None and by_kind else None,
        }
    )


# --- metrics of runs: those that the server measures, and those that clients log --------------------------------------


@routes.get(_METRICS, anybody, traced=False)
async def metrics(call: Call[bytes], run_id: str, since: Since = 0, limit: Points = 1024) -> Response:
    """Return up to ``limit`` points after number ``since``, oldest first."""
    run = await call.gateway.run_record(run_id, call.tenant_id)
    points = await call.gateway.store.run_metrics.since(run.run_id, since, limit + 1)
    answer = partial(_response, points[:limit], since, len(points) > limit)
    return await call.gateway.reading.in_thread(call.tenant_id, answer)


# The owner is the run's replica, because only that one knows the newest step.
@routes.post(_METRICS, by_run_in_path, raw_body(run_types.LogMetricsRequest), traced=False)
async def log_metrics(call: Call[bytes], run_id: str) -> Response:
    """Log values that the client has measured, for a run that may have ended."""
    run = await call.gateway.run_record(run_id, call.tenant_id)
    # Parsed only now, so that another tenant's run is answered as unknown, even if the body is wrong, too.
    logged = fields.parse(run_types.LogMetricsRequest, call.raw)
    for name in logged.values:
        if not name.isprintable():
            raise InvalidInputError("values", name, "names of printable characters")
    training = call.gateway.services[run.model_name].training if run.model_name in call.gateway.services else None
    if logged.step is None and training is not None:
        await training.context.measurements.write()  # the newest step may not be in the database yet
    point = await call.gateway.store.run_metrics.log(run.run_id, logged.step, logged.values, time.time())
    return wire_response(_point(point))


def _response(points: Sequence[MetricPoint], since: int, more: bool) -> Response:
    last = points[-1].number if points else since
    return wire_response(run_types.RunMetricsResponse(points=[_point(each) for each in points], next=last, more=more))


def _point(point: MetricPoint) -> run_types.MetricPoint:
    return run_types.MetricPoint.model_validate(point, from_attributes=True)


# --- routes for the dashboard: a tenant's adapters and where they are, sessions, checkpoints as files -----------------


@routes.get(f"{_TWINKLE}/whoami", anybody)
async def whoami(call: Call[bytes]) -> Response:
    """Return who the caller is to this server: its tenant and key, and how the server treats keys.

    ``other_runs``: how many runs other tenants have, on a server in open mode, where a person may have typed another
    key than the script used; None where keys are checked.
    """
    store, is_open = call.gateway.store, call.gateway.config.auth_mode == "open"
    key_id = None if is_open else await key_id_of(call.request)
    key = None if key_id is None else await store.keys.find_by_id(key_id)
    return json_response(
        {
            "tenant_id": call.tenant_id,
            "tenant": await store.tenants.name_of(call.tenant_id),
            "auth_mode": call.gateway.config.auth_mode,
            "key_id": key_id,
            "key_name": None if key is None else key.name,
            "is_operator": False,  # operators have the server's database, not a key: see docs/operations.md
            "other_runs": await store.runs.count_of_others(call.tenant_id) if is_open else None,
        }
    )


@routes.get(f"{_TWINKLE}/adapters", anybody)
async def adapters(call: Call[bytes], limit: Limit = 100, offset: Offset = 0) -> Response:
    """List the tenant's runs, latest request first, with where their adapters are, and the lengths of the queues."""
    page = await call.gateway.store.runs.list(call.tenant_id, limit, offset)
    reports = await call.gateway.fleet.of_tenant(call.tenant_id)
    live: dict[str, AdapterStatus] = {}
    for report in reports.values():
        live |= report.adapters
    queues = {name: asdict(report.queue) for name, report in reports.items()}
    return json_response(
        {
            "adapters": [_adapter(run, live) for run in page.items],
            "queues": queues,
            "cursor": {"offset": offset, "limit": limit, "total_count": page.total},
        }
    )


def _adapter(run: RunRecord, live: Mapping[str, AdapterStatus]) -> dict[str, object]:
    status = live.get(run.run_id)
    # If a live run is in no service, its base model is not served now, and its snapshot is on disk.
    gone: Residency = "disk" if run.state == "live" else run.state
    return {
        "training_run_id": run.run_id,
        "name": run.name,
        "session_id": run.session_id,
        "protocol": "twinkle" if ids.is_native_run(run.run_id) else "tinker",
        "base_model": run.base_model,
        "lora_rank": None if run.lora is None else run.lora.rank,
        "where": gone if status is None else status.where,
        "queued_ops": 0 if status is None else status.queued_ops,
        "created_at": run.created_at,
        "last_request_at": run.last_request_at,
        "note": run.note,
        "user_metadata": dict(run.user_metadata),
    }


@routes.get(f"{_TWINKLE}/sessions", anybody)
async def sessions(call: Call[bytes], limit: Few = 50, offset: Offset = 0) -> Response:
    """List the tenant's sessions, newest first. Times are seconds since the epoch.

    An active session that has sent no heartbeat for a while, and has not expired yet, is listed as ``silent``.
    """
    page = await call.gateway.store.sessions.list(call.tenant_id, limit, offset)
    found = [await _session(call.gateway, session) for session in page.items]
    return listing("sessions", found, offset, limit, page.total)


async def _session(gateway: Gateway, session: SessionRecord) -> dict[str, object]:
    samplers = await gateway.store.sampling_sessions.of_session(session.session_id)
    return {
        "session_id": session.session_id,
        "state": "silent" if gateway.silent_sessions.is_silent(session) else session.state,
        "created_at": session.created_at,
        "last_seen": gateway.last_seen(session),
        "sdk_version": session.sdk_version,
        "display_name": session.display_name,
        "project_id": session.project_id,
        "tags": list(session.tags),
        "training_run_ids": [run.run_id for run in await gateway.store.runs.of_session(session.session_id)],
        "sampler_ids": [sampler.sampling_session_id for sampler in samplers],
    }


@routes.get(f"{_TWINKLE}/checkpoints/{{run_id}}/{{kind}}/{{name}}/archive", anybody)
async def archive(call: Call[bytes], run_id: str, kind: str, name: str, form: Form = None) -> Response:
    """Send the files of a checkpoint as one tar file, without the server's own file of checksums.

    ``form``: the form that an adapter on experts has there; None: as it was saved, with all files.
    """
    check_format(form)
    record = await call.gateway.checkpoint(path_of(run_id, kind, name), call.tenant_id)
    return await tar_response(call, record, call.tenant_id, root=archive_title(record), form=form)
