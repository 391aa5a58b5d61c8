"""A model that begins as a checkpoint, in one request: load_weights that names a session."""

from twinkle.errors import InvalidInputError
from twinkle.server import ids
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.ids import CheckpointPath
from twinkle.server.services.checkpoints.access import loadable_checkpoint
from twinkle.server.types import CreateFromCheckpoint, Op, OpKind, RunRecord
from twinkle.server.wire.checkpoint_requests import CreateFromRequest


async def create_model_from(gateway: Gateway, tenant_id: str, wanted: CreateFromRequest, body: bytes) -> str:
    """The id of the request. Asked again, the model that there is, also when its source is gone by now."""
    wanted.check()
    await gateway.active_session(wanted.session_id, tenant_id)
    run = await gateway.store.runs.get(ids.run_id(wanted.session_id, wanted.model_seq_id))
    if run is None:
        run = await _new_run(gateway, tenant_id, wanted)
    payload = CreateFromCheckpoint(run.spec, wanted.path, wanted.optimizer)
    return await gateway.create_run(run, Op(run.run_id, 0, OpKind.CREATE_FROM, payload, body))


async def _new_run(gateway: Gateway, tenant_id: str, wanted: CreateFromRequest) -> RunRecord:
    path = CheckpointPath.parse(wanted.path)
    checkpoint = await loadable_checkpoint(gateway.store, path, tenant_id)
    if wanted.optimizer and checkpoint.kind != "weights":
        raise InvalidInputError("optimizer", True, f"false: {path} holds no optimizer state")
    source = await gateway.store.runs.get(path.run_id)
    assert source is not None, "a checkpoint has a run"
    base_model = wanted.base_model or source.base_model
    if gateway.model(base_model).model.name != source.model_name:
        raise InvalidInputError("base_model", base_model, f"a name of {source.base_model!r}, which {path} belongs to")
    run_id = ids.run_id(wanted.session_id, wanted.model_seq_id)
    metadata = wanted.user_metadata or {}
    return gateway.new_run(run_id, tenant_id, wanted.session_id, wanted.model_seq_id, base_model, source.spec, metadata)
