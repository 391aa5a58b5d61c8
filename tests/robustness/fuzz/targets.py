"""Decoders of bytes that any client may send, with valid requests as seeds.

A decoder may return or raise a UserError.
"""

import base64
import io
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from PIL import Image as Pillow

from tests.robustness.fuzz.mutation import changed_bytes, changed_json
from tests.support.losses.traced import call, calls, ref, request
from tests.support.models.seeing_models import image_processor, picture, png
from tests.support.servers.running import datum, sample_body, tensor, training_body
from twinkle.errors import UserError
from twinkle.images import EncodedImage, ImageLimits, ImageProcessing, SentImage, SentImages
from twinkle.loss.graph.catalog import CATALOG
from twinkle.loss.graph.interpreter import Limits, Meter, evaluate
from twinkle.model.types import Image, VisionSpec
from twinkle.server.backends.image_reader import ImageReader
from twinkle.server.protocols.openai.requests import ChatRequest, CompletionRequest
from twinkle.server.types import Op, OpKind, Refused
from twinkle.server.verbs import codec
from twinkle.server.verbs.features import are_encoded, as_rows, checked_rows
from twinkle.server.wire import requests
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.custom_losses import decode_custom_loss
from twinkle.server.wire.fields import parse
from twinkle.server.wire.sampling import AsampleRequest, RetrieveFuturesRequest, to_sample_request
from twinkle.server.wire.training import decode_forward_backward, decompress
from twinkle.server.wire.training_json import decode_json_pass
from twinkle_client.protocol.verbs import VERBS

_IMAGE_LIMITS = ImageLimits(pixels=2**22)
MAX_MESSAGE = 4000  # characters; an error message must not repeat the body


def _saved(mode: str, kind: str) -> EncodedImage:
    written = io.BytesIO()
    Pillow.fromarray(picture(40, 50)).convert(mode).save(written, kind)
    return EncodedImage(written.getvalue(), kind.lower())


@dataclass(frozen=True)
class Target:
    seeds: list[bytes]
    change: Callable[..., bytes]
    read: Callable[[bytes], object]

    def run(self, body: bytes) -> None:
        try:
            result = self.read(body)
        except UserError as error:
            message = str(error)
        else:
            refused = isinstance(result, Op) and isinstance(result.payload, Refused)
            message = result.payload.message if refused else ""
        assert len(message) <= MAX_MESSAGE, "an error that repeats its request"


# --- images -----------------------------------------------------------------------------------------------------------

_IMAGES = [png(picture(64, 96)), *(_saved(mode, "JPEG") for mode in ("RGB", "CMYK")), _saved("P", "PNG")]
_CHUNK = {
    "type": "image",
    "data": base64.b64encode(_IMAGES[0].data).decode(),
    "format": "png",
    "expected_tokens": 6,
}
_VISION = VisionSpec(image_token=9, patch_width=1536, merge=2)


class _KnowsNothing:
    """A trainer that wants every image to be decoded."""

    def wants_pixels(self, image: Image) -> bool:
        return True

    def image_counts(self) -> tuple[int, int]:
        return 0, 0


_READER = ImageReader("tiny", _VISION, ImageProcessing(image_processor()), _KnowsNothing())


def _image(body: bytes) -> object:
    """Read a file as the format that it looks like, as far as the pixels that the model sees."""
    file = EncodedImage(body, "png" if body[:1] == b"\x89" else "jpeg")
    sent = SentImages((SentImage(1, file, None, "chunks[0]"),))
    placed = _READER.place(np.array([1, 2]), sent, "tenant", _IMAGE_LIMITS, 2**20)
    return _READER.decode(placed.images, sent, _IMAGE_LIMITS, {})


# --- training ---------------------------------------------------------------------------------------------------------


def _with_image() -> pb.Datum:
    image = pb.Chunk(image=pb.ImageChunk(data=_IMAGES[0].data, format="png", expected_tokens=6))
    return pb.Datum(model_input=[*datum().model_input, image], loss_fn_inputs={"target_tokens": tensor([1] * 9, "i8")})


def _protobuf() -> list[bytes]:
    csr = pb.SparseCsr(
        values=np.array([7, 8], np.int64).tobytes(),
        crow_indices=np.array([0, 1, 1, 2], np.int64).tobytes(),
        col_indices=np.array([1, 3], np.int64).tobytes(),
    )
    sparse = pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_INT64, shape=[3, 4])
    policy = {"logprobs": tensor([0.0] * 3), "advantages": tensor([1.0] * 3), "weights": tensor([1.0] * 3)}
    loss_id = {"loss_id": pb.LossConfigValue(text="s:loss:0")}
    return [
        training_body("s:train:0", 1, [datum(**policy)], loss="ppo", loss_fn_config={"beta": 1.0}),
        training_body("s:train:0", 2, [datum(target_tokens=sparse), datum()], forward_only=True),
        training_body("s:train:0", 2, [_with_image()]),
        training_body("s:train:0", 3, [datum(q=tensor([[1.0]] * 3))], loss="custom", loss_fn_config_v2=loss_id),
    ]


def _json_pass(**fields: Any) -> dict[str, Any]:
    inputs = {"target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}, "weights": [1.0, 0.0, 0.5]}
    chunks = [{"type": "encoded_text", "tokens": [1, 2, 3]}, _CHUNK]
    data = [{"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}]
    return {"data": data, "loss_fn": "cross_entropy", "loss_fn_config": {"beta": 1.0}, **fields}


def _packed(body: bytes) -> object:
    for encoding in ("zstd", "gzip", "identity", None):
        try:
            decompress(body, encoding, 2**20)
        except UserError:
            continue
    return None


# --- custom losses ----------------------------------------------------------------------------------------------------


def _policy(logprobs, q, advantages):
    ratio = (logprobs - q).exp()
    loss = -(ratio * advantages).clamp(-2.0, 2.0).sum() / logprobs.shape[0] + logprobs[1:].std()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/n:sum": q.numel()}


def _wide(logprobs, teacher):
    student = logprobs.log_softmax(dim=-1)
    kept = (teacher * student).sum(-1)[teacher.max(dim=-1).values > 0.1]
    return -kept.sum() + logprobs.transpose(0, 1).reshape(-1).sort()[0][0], {}


def _every_operation(at_once: int = 8) -> list[bytes]:
    """Return graphs with each operation of the catalog on plausible arguments, as pieces for other graphs."""
    targets, bodies = list(CATALOG), []
    for first in range(0, len(targets), at_once):
        chosen = targets[first : first + at_once]
        nodes = [call(f"n{n}", target, ref("logprobs"), ref("w")) for n, target in enumerate(chosen)]
        body = calls(*nodes, call("all", "torch.stack", [ref(f"n{n}") for n in range(len(nodes))]), loss="all", w=1)
        bodies.append(json.dumps(body).encode())
    return bodies


_INPUTS = {
    0: np.array(0.3, np.float32),
    1: np.array([0.5, -1.0, 2.0, 0.25, 3.0], np.float32),
    2: np.linspace(0, 1, 15, dtype=np.float32).reshape(5, 3),
}
_LIMITS = Limits(tensor=2**20, datum=2**24, work=2**26, seconds=5.0)


def _custom_loss(body: bytes) -> object:
    graph = decode_custom_loss(body)
    inputs = {each.name: -np.abs(_INPUTS[each.rank]) - 0.1 for each in graph.inputs}
    return evaluate(graph, inputs, "data[0]", Meter(_LIMITS))


# --- the others -------------------------------------------------------------------------------------------------------

_SEQUENCED = (
    requests.OptimStepRequest,
    requests.SaveWeightsRequest,
    requests.SaveWeightsForSamplerRequest,
    requests.LoadWeightsRequest,
)


def _sequenced(body: bytes) -> object:
    for kind in _SEQUENCED:
        try:
            requests.to_op(kind, body)
        except UserError:
            continue
    return None


def _sample(body: bytes) -> object:
    return to_sample_request(parse(AsampleRequest, body), None)


def _native(body: bytes) -> object:
    """Read the body as run_verb does, for every verb."""
    fields, _ = codec.read_fields(body, most=codec.ROWS_BYTES)
    for verb in VERBS:
        if VERBS[verb].takes_rows and "inputs" in fields:
            rows = as_rows(fields["inputs"])
            known = {**fields, "inputs": checked_rows(rows, 2**20)} if are_encoded(rows) else {**fields, "inputs": ()}
        else:
            known = {key: value for key, value in fields.items() if key != "inputs"}
        codec.SentVerb(verb, known, None, b"", b"").op("s-a", 1)
    return None


def _lora_config(body: bytes) -> object:
    return codec.lora_config(codec.read_fields(body, most=codec.ROWS_BYTES)[0])


def _openai(body: bytes) -> object:
    for kind in (ChatRequest, CompletionRequest):
        try:
            parse(kind, body)
        except UserError:
            continue
    return None


def _dumped(*documents: Mapping[str, Any]) -> list[bytes]:
    return [json.dumps(document).encode() for document in documents]


_ADAM = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 1.0}
_SAMPLE = sample_body("s:sample:0", 3)
_TARGETS = {
    "data": [1, -1],
    "dtype": "int64",
    "shape": [2, 2],
    "sparse_crow_indices": [0, 1, 2],
    "sparse_col_indices": [0, 1],
}
_MESSAGES = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

TARGETS: Mapping[str, Target] = {
    "protobuf training": Target(_protobuf(), changed_bytes, decode_forward_backward),
    "image files": Target([image.data for image in _IMAGES], changed_bytes, _image),
    "compressed bodies": Target(
        [zstandard.compress(_protobuf()[0]), zlib.compress(_protobuf()[0], wbits=31)], changed_bytes, _packed
    ),
    "json training": Target(
        _dumped({"model_id": "s:train:0", "seq_id": 1, "forward_backward_input": _json_pass()}),
        changed_json,
        lambda body: decode_json_pass(body, OpKind.FORWARD_BACKWARD),
    ),
    "custom losses": Target(
        [
            *_dumped(
                request(_policy, {"logprobs": 1, "q": 1, "advantages": 1}),
                request(_wide, {"logprobs": 2, "teacher": 2}),
            ),
            *_every_operation(),
        ],
        changed_json,
        _custom_loss,
    ),
    "sequenced calls": Target(
        _dumped(
            {"model_id": "s:train:0", "seq_id": 2, "adam_params": _ADAM, "type": "optim_step"},
            {"model_id": "s:train:0", "seq_id": 3, "path": "ck", "ttl_seconds": 60, "user_metadata": {"a": "b"}},
            {"model_id": "s:train:0", "seq_id": 4, "path": "tinker://s:train:0/weights/ck", "optimizer": True},
            {"model_id": "s:train:0", "seq_id": 5, "sampling_session_seq_id": 0},
        ),
        changed_json,
        _sequenced,
    ),
    "samples": Target(
        _dumped(
            {**_SAMPLE, "prompt_logprobs": True, "topk_prompt_logprobs": 2, "num_samples": 2, "prompt_alt_tokens_k": 1},
            {**_SAMPLE, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}, _CHUNK]}},
            {**_SAMPLE, "prompt_logprobs": True, "target_prompt_logprobs": _TARGETS, "prompt_logprobs_last_n": 2},
        ),
        changed_json,
        _sample,
    ),
    "acknowledgements": Target(
        _dumped({"target": {"type": "sampling_session", "sampling_session_id": "s"}, "retrieved_request_ids": ["s:1"]}),
        changed_json,
        lambda body: parse(RetrieveFuturesRequest, body),
    ),
    "native verbs": Target(
        _dumped(
            {"adapter_name": "a", "inputs": [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}], "temperature": 1.0},
            {"adapter_name": "a", "optimizer_cls": "AdamW", "lr": 1e-4, "betas": [0.9, 0.99]},
            {"adapter_name": "a", "scheduler_cls": "CosineWarmupScheduler", "num_training_steps": 10},
            {"adapter_name": "a", "name": "ck", "save_optimizer": True, "seq_id": 4},
        ),
        changed_json,
        _native,
    ),
    "lora configs": Target(
        _dumped(
            {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0, "bias": "none"}
        ),
        changed_json,
        _lora_config,
    ),
    "openai": Target(
        _dumped(
            {
                "model": "mock",
                "messages": _MESSAGES,
                "tools": [_TOOL],
                "temperature": 0.5,
                "logprobs": True,
                "stop": ["x"],
            },
            {"model": "mock", "prompt": ["a", "b"], "n": 2, "max_tokens": 5, "stream": True, "logprobs": 3},
        ),
        changed_json,
        _openai,
    ),
}
