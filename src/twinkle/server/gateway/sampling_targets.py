"""Which weights a request samples from: the base model's, a live adapter's as they are now, or a checkpoint's."""

import time
from dataclasses import dataclass

from twinkle.errors import UnsupportedError
from twinkle.server.backends.text_codec import TextCodec
from twinkle.server.gateway.gateway import Gateway, Services
from twinkle.server.ids import CheckpointPath
from twinkle.server.services.checkpoints.access import version_of
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.types import CheckpointKind, CheckpointRecord, RunRecord, SamplingSessionRecord

# Of checkpoints that can be sampled from.
SAMPLED_KINDS: tuple[CheckpointKind, ...] = ("weights", "sampler_weights")


@dataclass(frozen=True)
class Target:
    """What serves a model, and which weights are meant. ``session`` lasts for one request and is on no record."""

    services: Services
    session: SamplingSessionRecord
    sampling: SamplerService

    @property
    def weights(self) -> str:
        return self.session.version_id or self.session.model_name

    @property
    def codec(self) -> TextCodec:
        """Return what turns text into the model's tokens and back; UnsupportedError if there is nothing."""
        model = self.services.model
        if model.text is None:
            raise UnsupportedError(f"{model.name} has no tokenizer, and without one there is no text")
        return model.text


def of_base_model(gateway: Gateway, services: Services, tenant_id: str, name: str) -> Target:
    return _target(gateway, services, tenant_id, name, None, None)


async def of_live_run(gateway: Gateway, run: RunRecord, tenant_id: str) -> Target | None:
    """As it is now; None if it is not on the device any more."""
    services = gateway.serving(run.model_name)
    live = await services.training.adapters.live_version(run.run_id)
    if live is None:
        return None
    if services.sampling is not None:
        for version_id in live.outdated:
            services.sampling.release_version(version_id)
    return _target(gateway, services, tenant_id, run.run_id, live.version_id, None)


async def of_checkpoint(gateway: Gateway, checkpoint: CheckpointRecord, tenant_id: str) -> Target:
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
    return Target(services, session, gateway.sampler_of(session))  # refuses what is served for training only
