"""Models, the ops on them, and losses that tenants define. Each op is answered at once with the id of a future."""

import secrets
from dataclasses import replace

from fastapi import APIRouter, Request, Response

from twinkle.errors import InvalidInputError
from twinkle.server import ids
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.http.requests import (
    JSON_BYTES,
    PREFIX,
    SMALL_BODY,
    body_of,
    gateway_of,
    is_loopback,
    json_response,
    parsed,
    tenant_of,
)
from twinkle.server.ids import CheckpointPath
from twinkle.server.services.checkpoints.access import loadable_checkpoint
from twinkle.server.types import CreateFromCheckpoint, Op, OpKind, RunRecord
from twinkle.server.wire import fields
from twinkle.server.wire.checkpoint_requests import CreateFromRequest, SaveWeightsExternalRequest, names_session
from twinkle.server.wire.custom_losses import MAX_BODY_BYTES, Place
from twinkle.server.wire.errors import BodyTooLargeError
from twinkle.server.wire.requests import (
    CreateModelRequest,
    GetInfoRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    SequencedRequest,
    UnloadModelRequest,
    WeightsInfoRequest,
    to_op,
)
from twinkle.server.wire.training import decode_forward_backward, decompress
from twinkle.server.wire.training_json import MOST_BYTES, decode_json_pass, is_json

router = APIRouter(prefix=PREFIX)


@router.post("/create_model")
async def create_model(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    body = await body_of(request, JSON_BYTES)
    wanted = fields.parse(CreateModelRequest, body)
    spec = wanted.spec()
    if spec.seed is None:  # drawn here and written down: a replay must come to the same adapter
        spec = replace(spec, seed=secrets.randbits(63))
    run_id, request_id = await gateway_of(request).create_model(
        tenant_id, wanted.session_id, wanted.model_seq_id, wanted.base_model, spec, wanted.user_metadata or {}, body
    )
    return json_response({"request_id": request_id, "model_id": run_id})


@router.post("/get_info")
async def get_info(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    gateway = gateway_of(request)
    run = await gateway.run((await parsed(GetInfoRequest, request)).model_id, tenant_id)
    model = gateway.serving(run.model_name).model
    data = {"arch": model.architecture, "model_name": run.base_model}
    tokenizer_id = model.tokenizer_dir if is_loopback(request) else model.tokenizer_id
    return json_response(
        {
            "type": "get_info",
            "model_id": run.run_id,
            "model_data": data if tokenizer_id is None else {**data, "tokenizer_id": tokenizer_id},
            "is_lora": True,
            "lora_rank": run.spec.rank,
            "model_name": run.base_model,
            "optimizer_config": {"type": "adamw"},
        }
    )


@router.post("/forward_backward")
async def forward_backward(request: Request) -> Response:
    return await _pass(request, OpKind.FORWARD_BACKWARD)


@router.post("/forward")
async def forward(request: Request) -> Response:
    """Of SDKs before protobuf, in which a field of forward_backward says the same."""
    return await _pass(request, OpKind.FORWARD)


async def _pass(request: Request, kind: OpKind) -> Response:
    tenant_id = await tenant_of(request)
    gateway = gateway_of(request)
    limits = gateway.config.limits
    raw = await body_of(request)
    encoding = request.headers.get("content-encoding")

    def decode() -> Op:
        body = decompress(raw, encoding, limits.max_request_bytes)
        if kind is OpKind.FORWARD or is_json(body):
            if len(body) > MOST_BYTES:
                raise BodyTooLargeError(MOST_BYTES)
            op = decode_json_pass(
                body,
                kind,
                max_tokens=limits.max_tokens_per_request,
                max_width=limits.max_targets_per_token,
                max_targets=limits.max_targets_per_request,
            )
        else:
            op = decode_forward_backward(
                body,
                max_tokens=limits.max_tokens_per_request,
                max_width=limits.max_targets_per_token,
                max_targets=limits.max_targets_per_request,
            )
        _ = op.digest, op.price  # computed and kept: neither is for the event loop if the body is large
        return op

    small = len(raw) < SMALL_BODY and encoding is None
    op = decode() if small else await gateway.reading.in_thread(tenant_id, decode)
    return await _submit(request, op, tenant_id)


@router.post("/optim_step")
async def optim_step(request: Request) -> Response:
    return await _sequenced(request, OptimStepRequest)


@router.post("/save_weights")
async def save_weights(request: Request) -> Response:
    return await _sequenced(request, SaveWeightsRequest)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request) -> Response:
    return await _sequenced(request, SaveWeightsForSamplerRequest)


@router.post("/save_weights_external")
async def save_weights_external(request: Request) -> Response:
    return await _sequenced(request, SaveWeightsExternalRequest)


@router.post("/load_weights")
async def load_weights(request: Request) -> Response:
    """Into a model, or, where a session is named instead of one, into a new model of that session."""
    tenant_id = await tenant_of(request)
    body = await body_of(request, JSON_BYTES)
    if not names_session(body):
        return await _submit(request, to_op(LoadWeightsRequest, body), tenant_id)
    wanted = fields.parse(CreateFromRequest, body)
    request_id = await create_model_from(gateway_of(request), tenant_id, wanted, body)
    return json_response({"request_id": request_id, "model_id": ids.run_id(wanted.session_id, wanted.model_seq_id)})


@router.post("/weights_info")
async def weights_info(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    gateway = gateway_of(request)
    path = CheckpointPath.parse((await parsed(WeightsInfoRequest, request)).tinker_path, "tinker_path")
    await gateway.checkpoint(path, tenant_id)
    run = await gateway.store.runs.get(path.run_id)
    assert run is not None, "a checkpoint has a run"
    return json_response(
        {
            "base_model": run.base_model,
            "is_lora": True,
            "lora_rank": run.spec.rank,
            "train_unembed": run.spec.train_unembed,
            "train_mlp": run.spec.train_mlp,
            "train_attn": run.spec.train_attn,
            "optimizer_config": {"type": "adamw"},
        }
    )


async def _sequenced(request: Request, request_type: type[SequencedRequest]) -> Response:
    tenant_id = await tenant_of(request)
    return await _submit(request, to_op(request_type, await body_of(request, JSON_BYTES)), tenant_id)


async def _submit(request: Request, op: Op, tenant_id: str) -> Response:
    request_id = await gateway_of(request).submit(op, tenant_id)
    return json_response({"request_id": request_id, "model_id": op.adapter_id})


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


@router.post("/unload_model")
async def unload_model(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    model_id = (await parsed(UnloadModelRequest, request)).model_id
    request_id = await gateway_of(request).unloading.ask(model_id, tenant_id)
    return json_response({"request_id": request_id, "model_id": model_id})


@router.post("/create_custom_loss")
async def create_custom_loss(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    body = await body_of(request, MAX_BODY_BYTES)
    place = fields.parse(Place, body)
    gateway = gateway_of(request)
    session = await gateway.active_session(place.session_id, tenant_id)
    return json_response({"request_id": await gateway.custom_losses.create(session, place.custom_loss_seq_id, body)})
