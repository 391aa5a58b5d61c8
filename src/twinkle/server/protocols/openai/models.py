"""The meaning of ``model``: a base model, the current weights of a training run, or a checkpoint.

An unknown name is an error; there is no fallback to another model.
"""

from contextlib import suppress

from twinkle.errors import InvalidInputError, NotFoundError, UserError
from twinkle.server.gateway.fleet import Services
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.gateway.sampling_targets import SAMPLED_KINDS, Target, of_base_model, of_checkpoint, of_live_run
from twinkle.server.ids import CheckpointPath
from twinkle.server.services.checkpoints.access import expired, readable_checkpoint
from twinkle.server.types import CheckpointRecord, RunRecord
from twinkle.server.wire.fields import short

_LISTED = 1000  # the most runs, and the most checkpoints, that are listed
_OWNER = "twinkle"  # the owner that base models are listed with


class ModelNotFoundError(UserError):
    """There is no model of this name to sample from, or it is another tenant's run or private checkpoint."""


async def resolve(gateway: Gateway, name: str, tenant_id: str) -> Target:
    """Return the weights to sample from under this name; ModelNotFoundError if there are none."""
    found = await _find(gateway, name, tenant_id)
    if isinstance(found, CheckpointRecord):
        return await of_checkpoint(gateway, found, tenant_id)
    if isinstance(found, RunRecord):
        return await _of_run(gateway, found, tenant_id)
    return of_base_model(gateway, found, tenant_id, name)


async def _find(gateway: Gateway, name: str, tenant_id: str) -> Services | CheckpointRecord | RunRecord:
    """Return the base model of this name, or the checkpoint or run that the tenant may read."""
    for services in gateway.services.values():
        if name in (services.model.name, *services.model.aliases):  # without the suffixes that Gateway.model allows
            return services
    with suppress(InvalidInputError, NotFoundError):
        path = CheckpointPath.parse(name)
        if path.kind in SAMPLED_KINDS:
            return await readable_checkpoint(gateway.store, path, tenant_id)
    with suppress(NotFoundError):
        return await gateway.run_record(name, tenant_id)
    served = ", ".join(gateway.config.listed_names)
    raise ModelNotFoundError(
        f"unknown model {short(name)}; served: {served}; GET /v1/models also lists your runs and checkpoints"
    )


async def _of_run(gateway: Gateway, run: RunRecord, tenant_id: str) -> Target:
    """Return the current weights of a live run; for one that has ended, its newest checkpoint that can be sampled."""
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


# --- listings ---------------------------------------------------------------------------------------------------------


async def listed(gateway: Gateway, tenant_id: str) -> list[dict[str, object]]:
    """Return base models for sampling, then the tenant's own runs, then its checkpoints of kind sampler_weights.

    Runs come with the latest request first, without failed ones; checkpoints with the newest first, without expired
    ones. Of each at most the first 1000 are listed.
    """
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
    """Return the description of one model, listed or not, without loading or publishing any weights."""
    found = await _find(gateway, name, tenant_id)
    if not isinstance(found, CheckpointRecord | RunRecord):
        return _body(name, gateway.started_at, _OWNER)
    # The owner of a public checkpoint is not shown to other tenants.
    return _body(name, found.created_at, tenant_id if found.tenant_id == tenant_id else _OWNER)


def _body(name: str, created: float, owner: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": owner}
