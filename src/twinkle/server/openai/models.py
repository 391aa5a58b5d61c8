"""What ``model`` may be: a base model, a training run as it is now, or a checkpoint. Never anything in their stead."""

import time
from dataclasses import dataclass

from twinkle.errors import InvalidInputError, NotFoundError, UnknownNameError
from twinkle.server.checkpoints import expired, readable_checkpoint, version_of
from twinkle.server.gateway import Gateway, Services
from twinkle.server.ids import CheckpointPath
from twinkle.server.openai.errors import ModelNotFoundError, unknown_model
from twinkle.server.types import CheckpointRecord, RunRecord, SamplingSessionRecord

_LISTED = 1000  # runs, and as many checkpoints, the newest first
_KINDS = ("weights", "sampler_weights")
_OWNER = "twinkle"  # of base models


@dataclass(frozen=True)
class Target:
    """What serves a model, and which weights are meant. ``session`` lasts for one request and is on no record."""

    services: Services
    session: SamplingSessionRecord

    @property
    def weights(self) -> str:
        return self.session.version_id or self.session.model_name


async def resolve(gateway: Gateway, name: str, tenant_id: str) -> Target:
    if "://" in name:
        checkpoint = await _checkpoint(gateway, name, tenant_id)
        if checkpoint is not None:
            return await _of_checkpoint(gateway, checkpoint, tenant_id)
    services = _base_model(gateway, name)
    if services is not None:
        return _target(gateway, services, tenant_id, name, None, None)
    run = await _run(gateway, name, tenant_id)
    if run is None:
        raise unknown_model(name)
    return await _of_run(gateway, run, tenant_id)


async def _of_run(gateway: Gateway, run: RunRecord, tenant_id: str) -> Target:
    """A live one as it is now; one that left the device as its newest checkpoint has it."""
    services = gateway.serving(run.model_name)
    live = await services.training.live_version(run.run_id)
    if live is not None:
        if services.sampling is not None:
            for version_id in live.outdated:
                services.sampling.give_up_version(version_id)
        return _target(gateway, services, tenant_id, run.run_id, live.version_id, None)
    checkpoints = await gateway.store.checkpoints.of_run(run.run_id)
    kept = [each for each in checkpoints if each.kind in _KINDS and not expired(each)]
    if not kept:
        raise ModelNotFoundError(
            f"training run {run.run_id} is not live any more and has no checkpoint left to sample from or to resume"
            f" with create_training_client_from_state ({run.note or 'it ended without one'})"
        )
    return await _of_checkpoint(gateway, kept[0], tenant_id)


async def _of_checkpoint(gateway: Gateway, checkpoint: CheckpointRecord, tenant_id: str) -> Target:
    run = await gateway.store.runs.get(checkpoint.run_id)
    assert run is not None, "a checkpoint has a run"
    services = gateway.serving(run.model_name)
    path = str(CheckpointPath(checkpoint.run_id, checkpoint.kind, checkpoint.name))
    return _target(gateway, services, tenant_id, path, version_of(checkpoint), checkpoint.directory)


def _target(
    gateway: Gateway, services: Services, tenant_id: str, name: str, version_id: str | None, directory: str | None
) -> Target:
    session = SamplingSessionRecord(
        sampling_session_id=name,
        session_id="",
        number=0,
        tenant_id=tenant_id,
        base_model=services.model.name,
        model_name=services.model.name,
        model_path=name,
        version_id=version_id,
        directory=directory,
        created_at=time.time(),
    )
    gateway.sampler_of(session)  # refuses what is served for training only
    return Target(services, session)


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
        return await readable_checkpoint(gateway.store, path, tenant_id) if path.kind in _KINDS else None
    except (InvalidInputError, NotFoundError):
        return None


# --- listings ---------------------------------------------------------------------------------------------------------


async def listed(gateway: Gateway, tenant_id: str) -> list[dict[str, object]]:
    """Base models, then the tenant's own runs and checkpoints for sampling, the newest first."""
    bases = [
        _body(name, gateway.started_at, _OWNER)
        for name, model in gateway.listed_models().items()
        if model.sampler is not None
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
