"""Which weights a request of our own protocol names: an address, an adapter of its session, or none: the base model."""

from twinkle.errors import InvalidInputError, NotFoundError
from twinkle.server.gateway.gateway import Gateway, Services
from twinkle.server.gateway.sampling_targets import SAMPLED_KINDS, Target, of_base_model, of_checkpoint, of_live_run
from twinkle.server.ids import CheckpointPath, native_run_id
from twinkle.server.types import SessionRecord


async def target_of(
    gateway: Gateway,
    services: Services,
    tenant_id: str,
    session: SessionRecord | None,
    adapter_uri: str | None,
    adapter_name: str | None,
) -> Target:
    """``session``: of the request's header, None where it has none."""
    if adapter_uri:
        return await _addressed(gateway, services, tenant_id, adapter_uri)
    if not adapter_name:
        return of_base_model(gateway, services, tenant_id, services.model.name)
    if session is None:
        raise InvalidInputError("X-Twinkle-Session-Id header", None, f"the session of adapter {adapter_name!r}")
    return await _live(gateway, services, tenant_id, session, adapter_name)


async def _addressed(gateway: Gateway, services: Services, tenant_id: str, uri: str) -> Target:
    path = CheckpointPath.parse(uri, "adapter_uri")
    if path.kind not in SAMPLED_KINDS:
        raise InvalidInputError("adapter_uri", uri, f"a checkpoint of kind {' or '.join(SAMPLED_KINDS)}")
    target = await of_checkpoint(gateway, await gateway.checkpoint(path, tenant_id), tenant_id)
    if target.services is not services:
        raise InvalidInputError("adapter_uri", uri, f"a checkpoint of {services.model.name}")
    return target


async def _live(gateway: Gateway, services: Services, tenant_id: str, session: SessionRecord, name: str) -> Target:
    run = services.training.run(native_run_id(session.session_id, name))
    live = None if run is None or run.tenant_id != tenant_id else await of_live_run(gateway, run, tenant_id)
    if live is None:
        raise NotFoundError("adapter", name)
    return live
