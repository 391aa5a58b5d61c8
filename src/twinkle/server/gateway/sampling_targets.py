"""The weights that a request samples from: the base model's, a live adapter's current ones, or a checkpoint's.

A target lasts for one request. ``create_sampling_session`` stores one in the database for a client's later requests.
"""

import time
from dataclasses import dataclass, replace
from functools import partial

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.server import ids
from twinkle.server.backends.text_codec import TextCodec
from twinkle.server.gateway.fleet import Services
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.ids import CheckpointPath
from twinkle.server.services.checkpoints.access import loadable_checkpoint, version_of
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.types import CheckpointKind, CheckpointRecord, RunRecord, SamplingSessionRecord
from twinkle.server.wire.sampling import CreateSamplingSessionRequest

# The kinds of checkpoints that can be sampled from.
SAMPLED_KINDS: tuple[CheckpointKind, ...] = ("weights", "sampler_weights")


@dataclass(frozen=True)
class Target:
    """The weights to sample from, with the services of their model.

    ``session`` is made for one request only, and is not in the database.
    """

    services: Services
    session: SamplingSessionRecord
    sampling: SamplerService

    @property
    def weights(self) -> str:
        return self.session.version_id or self.session.model_name

    @property
    def codec(self) -> TextCodec:
        """Return the model's codec between text and tokens; UnsupportedError if the model has no tokenizer."""
        model = self.services.model
        if model.text is None:
            raise UnsupportedError(f"{model.name} has no tokenizer, and without one there is no text")
        return model.text


def of_base_model(gateway: Gateway, services: Services, tenant_id: str, name: str) -> Target:
    """Return a base model as a target. ``name``: what the request calls it."""
    return _target(gateway, services, tenant_id, name, services.model.name)


async def of_live_run(gateway: Gateway, run: RunRecord, tenant_id: str) -> Target | None:
    """Return the current weights of a run's adapter as a target; None if the adapter is no longer live."""
    services = gateway.serving(run.model_name)
    live = await services.training.adapters.live_version(run.run_id)
    if live is None:
        return None
    services.release_versions(live.outdated)
    return _target(gateway, services, tenant_id, run.run_id, run.base_model, live.version_id)


async def of_checkpoint(gateway: Gateway, checkpoint: CheckpointRecord, tenant_id: str) -> Target:
    """Return the weights of a checkpoint as a target."""
    run = await gateway.run_of(checkpoint)
    services = gateway.serving(run.model_name)
    path = str(CheckpointPath(checkpoint.run_id, checkpoint.kind, checkpoint.name))
    version_id = version_of(checkpoint)
    return _target(gateway, services, tenant_id, path, run.base_model, version_id, checkpoint.directory)


def _target(
    gateway: Gateway,
    services: Services,
    tenant_id: str,
    name: str,
    base_model: str,
    version_id: str | None = None,
    directory: str | None = None,
) -> Target:
    session = SamplingSessionRecord(
        sampling_session_id=name,
        session_id="",
        number=0,
        tenant_id=tenant_id,
        base_model=base_model,
        model_name=services.model.name,
        model_path=name,
        version_id=version_id,
        directory=directory,
        created_at=time.time(),
    )
    return Target(services, session, gateway.sampler_of(session))  # raises if the model is served for training only


async def create_sampling_session(
    gateway: Gateway, tenant_id: str, wanted: CreateSamplingSessionRequest
) -> SamplingSessionRecord:
    """Create a sampling session in the database, or return the one that an earlier identical request created."""
    session_id, number = wanted.session_id, wanted.sampling_session_seq_id
    await gateway.active_session(session_id, tenant_id)
    own_bytes = 0
    if wanted.model_path is not None:
        path = CheckpointPath.parse(wanted.model_path, "model_path")
        checkpoint = await loadable_checkpoint(gateway.store, path, tenant_id, "model_path")
        target = await of_checkpoint(gateway, checkpoint, tenant_id)
        own_bytes = checkpoint.size_bytes if checkpoint.tenant_id == tenant_id else 0
    elif wanted.base_model is not None:
        services = gateway.model(wanted.base_model)
        target = _target(gateway, services, tenant_id, wanted.base_model, wanted.base_model)
    else:
        raise InvalidInputError("base_model", None, "base_model or model_path")
    record = replace(
        target.session,
        sampling_session_id=ids.sampling_session_id(session_id, number),
        session_id=session_id,
        number=number,
        model_path=wanted.model_path,
        replica=gateway.replica,
        size_bytes=own_bytes,
    )
    most = gateway.tenants.limits(tenant_id).max_sampling_session_rows_per_tenant
    create = partial(gateway.store.sampling_sessions.create, record, most_rows=most)
    made = await gateway.with_row_room(tenant_id, create)
    if (made.version_id, made.model_name) != (record.version_id, record.model_name):
        raise InvalidInputError("sampling_session_seq_id", number, "a number not used before in this session")
    return made
