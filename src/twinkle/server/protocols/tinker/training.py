"""Routes for models, their ops, and custom losses. Each op is answered at once with the request id of its future."""

from functools import partial

from fastapi import Response

from twinkle.server import ids
from twinkle.server.gateway.weight_copies import create_from_checkpoint
from twinkle.server.http.owners import anybody, by_model_id, by_new_model
from twinkle.server.http.requests import PREFIX, decoded, is_local, json_response
from twinkle.server.http.routes import Body, Call, Routes, json_body, raw_body
from twinkle.server.types import Op, OpKind
from twinkle.server.wire import fields, requests
from twinkle.server.wire.custom_losses import MAX_BODY_BYTES, CreateCustomLossRequest, CustomLossPlace
from twinkle.server.wire.errors import BodyTooLargeError
from twinkle.server.wire.image_files import ImageAllowance
from twinkle.server.wire.training import Allowance, decode_forward_backward, decompress
from twinkle.server.wire.training_json import MOST_BYTES, decode_json_pass, is_json

routes = Routes(PREFIX)


def _op(request_type: type[requests.SequencedRequest]) -> Body[Op]:
    """Declare a JSON body that becomes an op with its sequence number."""
    return Body(partial(requests.to_op, request_type), request_type)


@routes.post("/forward_backward", by_model_id, raw_body("application/x-protobuf", limit=None), soon=True)
async def forward_backward(call: Call[bytes]) -> Response:
    return await _pass(call, OpKind.FORWARD_BACKWARD)


@routes.post("/forward", by_model_id, raw_body(limit=None), soon=True)
async def forward(call: Call[bytes]) -> Response:
    """Submit a forward pass, for older SDKs. Newer SDKs send forward_backward with the field ``forward_only``."""
    return await _pass(call, OpKind.FORWARD)


async def _pass(call: Call[bytes], kind: OpKind) -> Response:
    limits = call.gateway.config.limits
    encoding = call.request.headers.get("content-encoding")

    def decode(raw: bytes) -> Op:
        body = decompress(raw, encoding, limits.max_request_bytes)
        as_json = kind is OpKind.FORWARD or is_json(body)
        if as_json and len(body) > MOST_BYTES:
            raise BodyTooLargeError(MOST_BYTES)
        left = Allowance(
            limits.max_tokens_per_request,
            limits.max_targets_per_request,
            limits.max_targets_per_token,
            images=ImageAllowance(limits.max_images_per_request, limits.max_image_bytes),
        )
        op = decode_json_pass(body, kind, left) if as_json else decode_forward_backward(body, left)
        _ = op.digest, op.price  # cached properties: computed here, because a large body would block the event loop
        return op

    return await _submit(call, await decoded(call.request, call.raw, decode))


@routes.post("/optim_step", by_model_id, _op(requests.OptimStepRequest), soon=True)
@routes.post("/save_weights", by_model_id, _op(requests.SaveWeightsRequest), soon=True)
@routes.post("/save_weights_for_sampler", by_model_id, _op(requests.SaveWeightsForSamplerRequest), soon=True)
@routes.post("/save_weights_external", by_model_id, _op(requests.SaveWeightsExternalRequest), soon=True)
async def submit_op(call: Call[Op]) -> Response:
    """Submit an op that needs no further checks."""
    return await _submit(call, call.body)


@routes.post("/load_weights", by_model_id, raw_body(requests.LoadWeightsRequest), soon=True)
async def load_weights(call: Call[bytes]) -> Response:
    """Submit the load of a checkpoint into a model, or into a new model if the body names a session instead."""
    if not requests.names_session(call.raw):
        return await _submit(call, requests.to_op(requests.LoadWeightsRequest, call.raw))
    wanted = fields.parse(requests.CreateFromRequest, call.raw)
    request_id = await create_from_checkpoint(call.gateway, call.tenant_id, wanted, call.raw)
    return json_response({"request_id": request_id, "model_id": ids.run_id(wanted.session_id, wanted.model_seq_id)})


async def _submit(call: Call[bytes] | Call[Op], op: Op) -> Response:
    request_id = await call.gateway.submit(op, call.tenant_id)
    return json_response({"request_id": request_id, "model_id": op.adapter_id})


# --- models -----------------------------------------------------------------------------------------------------------


@routes.post("/create_model", by_new_model, json_body(requests.CreateModelRequest), soon=True)
async def create_model(call: Call[requests.CreateModelRequest]) -> Response:
    run_id, request_id = await call.gateway.create_model(call.tenant_id, call.body, call.raw)
    return json_response({"request_id": request_id, "model_id": run_id})


@routes.post("/unload_model", by_model_id, json_body(requests.UnloadModelRequest), soon=True)
async def unload_model(call: Call[requests.UnloadModelRequest]) -> Response:
    """Begin to evict a model's adapter, before its session ends."""
    model_id = call.body.model_id
    request_id = await call.gateway.unloading.ask(model_id, call.tenant_id)
    return json_response({"request_id": request_id, "model_id": model_id})


@routes.post("/get_info", by_model_id, json_body(requests.GetInfoRequest), soon=True)
async def get_info(call: Call[requests.GetInfoRequest]) -> Response:
    run = await call.gateway.run_record(call.body.model_id, call.tenant_id)
    model = call.gateway.serving(run.model_name).model
    data = {"arch": model.architecture, "model_name": run.base_model}
    tokenizer_id = model.tokenizer_dir if is_local(call.request) else model.tokenizer_id
    return json_response(
        {
            "type": "get_info",
            "model_id": run.run_id,
            "model_data": data if tokenizer_id is None else {**data, "tokenizer_id": tokenizer_id},
            "is_lora": run.lora is not None,
            "lora_rank": None if run.lora is None else run.lora.rank,
            "model_name": run.base_model,
            "optimizer_config": {"type": "adamw"},
        }
    )


@routes.post("/weights_info", anybody, json_body(requests.WeightsInfoRequest))
async def weights_info(call: Call[requests.WeightsInfoRequest]) -> Response:
    run = await call.gateway.run_of_checkpoint(call.body.tinker_path, call.tenant_id, "tinker_path")
    lora = run.lora
    return json_response(
        {
            "base_model": run.base_model,
            "is_lora": lora is not None,
            "lora_rank": None if lora is None else lora.rank,
            "train_unembed": None if lora is None else lora.train_unembed,
            "train_mlp": None if lora is None else lora.train_mlp,
            "train_attn": None if lora is None else lora.train_attn,
            "optimizer_config": {"type": "adamw"},
        }
    )


# --- custom losses ----------------------------------------------------------------------------------------------------


@routes.post("/create_custom_loss", anybody, raw_body(CreateCustomLossRequest, MAX_BODY_BYTES))
async def create_custom_loss(call: Call[bytes]) -> Response:
    place = fields.parse(CustomLossPlace, call.raw)
    session = await call.gateway.active_session(place.session_id, call.tenant_id)
    request_id = await call.gateway.custom_losses.create(session, place.custom_loss_seq_id, call.raw)
    return json_response({"request_id": request_id})
