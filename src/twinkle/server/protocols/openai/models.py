"""What ``model`` may be: a base model, a training run as it is now, or a checkpoint. Never anything in their stead."""

from twinkle.errors import InvalidInputError, NotFoundError, UnknownNameError
from twinkle.server.gateway.gateway import Gateway, Services
from twinkle.server.gateway.sampling_targets import SAMPLED_KINDS, Target, of_base_model, of_checkpoint, of_live_run
from twinkle.server.ids import CheckpointPath
from twinkle.server.protocols.openai.errors import ModelNotFoundError, unknown_model
from twinkle.server.services.checkpoints.access import expired, readable_checkpoint
from twinkle.server.types import CheckpointRecord, RunRecord

_LISTED = 1000  # runs, and as many checkpoints, the newest first
_OWNER = "twinkle"  # of base models


async def resolve(gateway: Gateway, name: str, tenant_id: str) -> Target:
    if "://" in name:
        checkpoint = await _checkpoint(gateway, name, tenant_id)
        if checkpoint is not None:
            return await of_checkpoint(gateway, checkpoint, tenant_id)
    services = _base_model(gateway, name)
    if services is not None:
        return of_base_model(gateway, services, tenant_id, name)
    run = await _run(gateway, name, tenant_id)
    if run is None:
        raise unknown_model(name)
    return await _of_run(gateway, run, tenant_id)


async def _of_run(gateway: Gateway, run: RunRecord, tenant_id: str) -> Target:
    """A live one as it is now; one that left the device as its newest checkpoint has it."""
    live = await of_live_run(gateway, run, tenant_id)
    if live is not None:
        return live
    checkpoints = await gateway.store.checkpoints.of_run(run.run_id)
    kept = [each for each in checkpoints if each.kind in SAMPLED_KINDS and not expired(each)]
    if not kept:
        raise ModelNotFoundError(
            f"training run {run.run_id} is not live any more and has no checkpoint left to sample from or to resume"
            f" with create_training_client_from_state ({run.note or 'it ended without one'})"
        )
    return await of_checkpoint(gateway, kept[0], tenant_id)


def _base_model(gateway: Gateway, name: str) -> Services | None:
    """By its whole name only: elsewhere what follows a colon is ignored."""
    try:
        services = gateway.model(name)
    except UnknownNameError:
        return None
    return services if name in (services.model.name, *services.model.aliases) else None


async def _run(gateway: Gateway, name: str, tenant_id: str) -> RunRecord | None:
    try:
        return await gateway.run(name, tenant_id)
    except NotFoundError:
        return None


async def _checkpoint(gateway: Gateway, name: str, tenant_id: str) -> CheckpointRecord | None:
    try:
        path = CheckpointPath.parse(name)
        return await readable_checkpoint(gateway.store, path, tenant_id) if path.kind in SAMPLED_KINDS else None
    except (InvalidInputError, NotFoundError):
        return None


# --- listings ---------------------------------------------------------------------------------------------------------


async def listed(gateway: Gateway, tenant_id: str) -> list[dict[str, object]]:
    """Base models, then the tenant's own runs and checkpoints for sampling, the newest first."""
    bases = [
        _body(name, gateway.started_at, _OWNER)
        for name, model in (await gateway.listed_models()).items()
        if model.sampleable
    ]
    runs = await gateway.store.runs.list(tenant_id, _LISTED)
    checkpoints = await gateway.store.checkpoints.list(tenant_id, _LISTED)
    return [
        *bases,
        *(_body(run.run_id, run.created_at, tenant_id) for run in runs.items if run.state != "failed"),
        *(
            _body(str(CheckpointPath(each.run_id, each.kind, each.name)), each.created_at, tenant_id)
            for each in checkpoints.items
            if each.kind == "sampler_weights" and not expired(each)
        ),
    ]


async def described(gateway: Gateway, name: str, tenant_id: str) -> dict[str, object]:
    """One model, listed or not; nothing is loaded or published for it."""
    if _base_model(gateway, name) is not None:
        return _body(name, gateway.started_at, _OWNER)
    checkpoint = await _checkpoint(gateway, name, tenant_id) if "://" in name else None
    if checkpoint is not None:
        # Whose a public one is, is nobody's business.
        return _body(name, checkpoint.created_at, tenant_id if checkpoint.tenant_id == tenant_id else _OWNER)
    run = await _run(gateway, name, tenant_id)
    if run is None:
        raise unknown_model(name)
    return _body(name, run.created_at, tenant_id)


def _body(name: str, created: float, owner: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": owner}
