"""Training runs and checkpoints: listings, and deleting."""

from typing import Annotated, Literal

from fastapi import Query, Response

from twinkle.server.gateway.gateway import Gateway
from twinkle.server.http.owners import anybody
from twinkle.server.http.requests import PREFIX, iso_time, json_response, listing
from twinkle.server.http.routes import Call, Routes
from twinkle.server.ids import CheckpointPath
from twinkle.server.services.checkpoints.access import kind_of_checkpoint
from twinkle.server.types import CheckpointRecord, RunRecord

routes = Routes(PREFIX)

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, lt=2**63)]
# Tenants here share nothing but public checkpoints, which are not listed: both are the tenant's own.
Scope = Literal["owned", "accessible"]


@routes.get("/training_runs", anybody)
async def training_runs(
    call: Call[bytes],
    limit: Limit = 20,
    offset: Offset = 0,
    project_id: str | None = None,
    access_scope: Scope = "owned",
) -> Response:
    page = await call.gateway.store.runs.list(call.tenant_id, limit, offset, project_id)
    found = [await _training_run(call.gateway, run) for run in page.items]
    return listing("training_runs", found, offset, limit, page.total)


@routes.get("/training_runs/{run_id}", anybody)
async def training_run(call: Call[bytes], run_id: str, access_scope: Scope = "owned") -> Response:
    return json_response(await _training_run(call.gateway, await call.gateway.run(run_id, call.tenant_id)))


@routes.get("/training_runs/{run_id}/checkpoints", anybody)
async def checkpoints_of_run(call: Call[bytes], run_id: str) -> Response:
    await call.gateway.run(run_id, call.tenant_id)
    records = await call.gateway.store.checkpoints.of_run(run_id)
    return json_response({"checkpoints": [_checkpoint(record) for record in records]})


@routes.get("/checkpoints", anybody)
async def checkpoints(call: Call[bytes], limit: Limit = 100, offset: Offset = 0) -> Response:
    page = await call.gateway.store.checkpoints.list(call.tenant_id, limit, offset)
    return listing("checkpoints", [_checkpoint(record) for record in page.items], offset, limit, page.total)


@routes.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}", anybody)
async def delete_checkpoint(call: Call[bytes], run_id: str, kind: str, name: str) -> Response:
    path = path_of(run_id, kind, name)
    await call.gateway.checkpoint_actions.delete(path, call.tenant_id)
    return json_response({})


def path_of(run_id: str, kind: str, name: str) -> CheckpointPath:
    return CheckpointPath.of([run_id, kind, name], f"{run_id}/{kind}/{name}", "checkpoint")


async def _training_run(gateway: Gateway, run: RunRecord) -> dict[str, object]:
    last = await gateway.store.checkpoints.latest(run.run_id)
    return {
        "training_run_id": run.run_id,
        "base_model": run.base_model,
        "model_owner": run.tenant_id,
        "is_lora": True,
        "lora_rank": run.spec.rank,
        "corrupted": run.state == "failed",
        "last_request_time": iso_time(run.last_request_at),
        "last_checkpoint": _checkpoint(last["weights"]) if "weights" in last else None,
        "last_sampler_checkpoint": _checkpoint(last["sampler_weights"]) if "sampler_weights" in last else None,
        "user_metadata": dict(run.user_metadata),
    }


def _checkpoint(record: CheckpointRecord) -> dict[str, object]:
    path = CheckpointPath(record.run_id, record.kind, record.name)
    return {
        "checkpoint_id": path.checkpoint_id,
        "checkpoint_type": kind_of_checkpoint(record.kind),
        "time": iso_time(record.created_at),
        "tinker_path": str(path),
        "size_bytes": record.size_bytes,
        "public": record.public,
        "user_metadata": dict(record.user_metadata),
        "expires_at": None if record.expires_at is None else iso_time(record.expires_at),
    }
