"""forward_backward on the wire: a protobuf request becomes an :class:`Op`, and a result becomes protobuf."""

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from twinkle.errors import InvalidInputError, LimitExceededError, UnknownNameError, UserError
from twinkle.images import SentImages, SentPatches
from twinkle.model.csr import Csr, dense
from twinkle.model.types import Datum, FloatArray, IntArray, TrainResult
from twinkle.server.types import UNNUMBERED, CustomLossUse, Encoding, Op, OpKind, Outcome, Refused, TrainPass
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.errors import BodyTooLargeError, MalformedRequestError
from twinkle.server.wire.image_files import ImageAllowance
from twinkle.server.wire.model_input import read_protobuf
from twinkle.server.wire.peeking import scan
from twinkle.server.wire.reference_passes import REF_LOGPS, named_pass
from twinkle.server.wire.tensors import decode_tensor

TARGETS = "target_tokens"
_TARGETS_FIELD = f".loss_fn_inputs[{TARGETS!r}]"
WEIGHTS = "weights"
CUSTOM = "custom"  # a loss that the tenant created; the tenant chose the names of its inputs
LOSS_ID = "loss_id"
# The inputs of the server's own losses besides targets and weights; all are float32.
EXTRAS = ("advantages", "clip_high_threshold", "clip_low_threshold", "logprobs", "sequence_ratio_mask")
# Images as some clients send them: as patches, beside tokens that have the image token at their places.
PATCHES, GRIDS = "pixel_values", "image_grid_thw"
_KNOWN = (TARGETS, WEIGHTS, *EXTRAS, REF_LOGPS, PATCHES, GRIDS)

MAX_DATUMS = 4096  # the SDK sends 1024 at most, unless client/config says otherwise
MAX_TOKENS = 2**22  # of a request, where the caller gives no other limit
MAX_TARGETS = 2**24  # of a request; the configuration can only set a lower limit
_MAX_WIDTH = 2**31 - 1  # targets of one token: no limit here, the model's vocabulary is the limit
_MAX_CUSTOM_CELLS = 2**22  # rows × columns of a sparse input of a custom loss: the most that such a loss may hold
# The most chunks, tensors and spans of a request, on average over the most datums that it may have.
_PARTS_PER_DATUM = 64
_SMALL_BODY = 65_536  # bytes; a smaller body cannot hold enough parts to do harm
_MAX_NAME = 256
AnyArray = NDArray[Any]

_DATA_FIELD = pb.ForwardBackwardRequest.DATA_FIELD_NUMBER


# --- requests ---------------------------------------------------------------------------------------------------------


def decompress(body: bytes, content_encoding: str | None, limit: int) -> bytes:
    """Undo the Content-Encoding of a body: zstd, gzip or identity.

    BodyTooLargeError if the result has more than ``limit`` bytes; no more than one byte beyond that is unpacked.
    MalformedRequestError for other encodings, damaged data, and a zstd frame beyond the limit without a declared size.
    """
    encoding = (content_encoding or "identity").strip().lower()
    if encoding == "zstd":
        return _unpack_zstd(body, limit)
    if encoding == "gzip":
        return _unpack_gzip(body, limit)
    if encoding != "identity":
        raise MalformedRequestError(f"Content-Encoding: got {encoding[:40]!r}, allowed: zstd, gzip, identity")
    if len(body) > limit:
        raise BodyTooLargeError(limit)
    return body


@dataclass
class Allowance:
    """What a request may still have while its datums are read one after another.

    Each datum is subtracted from ``tokens`` and from ``targets``, those of all tokens together. ``width``, the most
    targets of one token, and ``datums``, the most datums of the request, do not change. ``images``: the images
    that the request may still have.
    """

    tokens: int = MAX_TOKENS
    targets: int = MAX_TARGETS
    width: int = _MAX_WIDTH
    datums: int = MAX_DATUMS
    images: ImageAllowance = field(default_factory=ImageAllowance)


def decode_forward_backward(body: bytes, left: Allowance | None = None) -> Op:
    """Return the op in a protobuf body.

    ``left``: the limits of the request; None: the largest that this module allows. :class:`MalformedRequestError` if
    the body, its model id or its sequence number cannot be read, or if a large body has more parts than a request may
    have. With any other mistake the op's payload is :class:`Refused`: the op fails, but its sequence number is used up.
    """
    left = left or Allowance()
    if len(body) > _SMALL_BODY:
        _check_parts(body, left.datums * _PARTS_PER_DATUM)
    try:
        request = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise MalformedRequestError("body: not a ForwardBackwardRequest in protobuf's wire format") from error
    if not 1 <= len(request.model_id) <= _MAX_NAME:
        raise MalformedRequestError(
            f"model_id: got {len(request.model_id)} characters, allowed: the id that create_model returned"
        )
    if request.seq_id < UNNUMBERED:
        raise MalformedRequestError(f"seq_id: got {request.seq_id}, allowed: 1 and up, or 0 or none")
    payload: TrainPass | Refused
    try:
        payload = _train_pass(request, left)
    except UserError as error:
        payload = Refused.because(error)
    kind = OpKind.FORWARD if request.forward_only else OpKind.FORWARD_BACKWARD
    return Op(request.model_id, request.seq_id, kind, payload, body)


def _train_pass(request: pb.ForwardBackwardRequest, left: Allowance) -> TrainPass:
    if len(request.data) > left.datums:
        raise InvalidInputError("data", f"{len(request.data)} datums", f"at most {left.datums} in one request")
    for name in (request.loss_fn, *request.loss_fn_config, *request.loss_fn_config_v2):
        if len(name) > _MAX_NAME:  # errors quote names
            raise InvalidInputError("loss_fn and loss_fn_config", name, f"names of at most {_MAX_NAME} characters")
    if request.loss_fn == CUSTOM:
        return _custom_pass(request, _loss_id(request), left)
    config = _loss_config(request)
    sequences = [_datum(datum, f"data[{index}]", left) for index, datum in enumerate(request.data)]
    return named_pass(sequences, request.loss_fn, config, trains=not request.forward_only)


def _custom_pass(request: pb.ForwardBackwardRequest, loss_id: str, left: Allowance) -> TrainPass:
    data, inputs, images = [], [], []
    for index, datum in enumerate(request.data):
        where = f"data[{index}]"
        arrays = _arrays(datum, where, left, custom=True)
        inputs.append(dict(arrays))
        targets = {TARGETS: arrays[TARGETS]} if TARGETS in arrays else {}
        tokens, sent = read_protobuf(datum.model_input, f"{where}.model_input", left.images)
        images.append(sent)
        data.append(datum_of(tokens, targets, where, left))
    custom = CustomLossUse(loss_id, tuple(inputs))
    return TrainPass(tuple(data), request.loss_fn, {}, custom, images=tuple(images) if any(images) else ())


def _loss_id(request: pb.ForwardBackwardRequest) -> str:
    config = {key: value.text for key, value in request.loss_fn_config_v2.items()}
    if set(config) != {LOSS_ID} or not 1 <= len(config[LOSS_ID]) <= _MAX_NAME:
        raise InvalidInputError("loss_fn_config", config, f"{LOSS_ID}, as create_custom_loss returned it, alone")
    return config[LOSS_ID]


def _datum(datum: pb.Datum, where: str, left: Allowance) -> tuple[Datum, SentImages]:
    for name in datum.loss_fn_inputs:
        check_input_name(name, where)
    tokens, images = read_protobuf(datum.model_input, f"{where}.model_input", left.images)
    arrays = _arrays(datum, where, left, custom=False)
    patches = take_patches(arrays, where, images, left.images)
    return datum_of(tokens, arrays, where, left), patches or images


def _arrays(datum: pb.Datum, where: str, left: Allowance, *, custom: bool) -> dict[str, AnyArray | Csr]:
    """Return the loss's inputs by name. ``custom``: for a custom loss, whose own inputs may have any width."""
    arrays = {}
    for name, tensor in datum.loss_fn_inputs.items():
        field = f"{where}.loss_fn_inputs[{name[:_MAX_NAME]!r}]"
        if not custom and name in (PATCHES, GRIDS):
            pass  # numbers of images and not of tokens
        elif not custom or name == TARGETS:
            check_width(tuple(tensor.shape), field, left)
        elif tensor.HasField("sparse_csr") and math.prod(tensor.shape) > _MAX_CUSTOM_CELLS:
            allowed = f"sparse tensors of at most {_MAX_CUSTOM_CELLS} cells"
            raise InvalidInputError(f"{field}.shape", tuple(tensor.shape), allowed)
        arrays[name] = decode_tensor(tensor, field)
    return arrays


def check_width(shape: Sequence[int], field: str, left: Allowance) -> None:
    """Raise LimitExceededError if the declared shape has too many numbers a token, before the tensor is decoded."""
    if len(shape) == 2 and shape[1] > left.width:
        allowed = f"at most {left.width} numbers a token"
        raise LimitExceededError(f"{field}.shape", tuple(shape), allowed, "max_targets_per_token")


def check_input_name(name: str, where: str) -> None:
    if name not in _KNOWN:
        raise UnknownNameError(f"key in {where}.loss_fn_inputs", name[:_MAX_NAME], _KNOWN)


def take_patches(
    arrays: dict[str, AnyArray | Csr], where: str, images: SentImages, left: ImageAllowance
) -> SentImages | None:
    """Remove images that were sent as patches from the loss's inputs, and return them; None if there are none.

    ``images``: those of the sequence's chunks, of which there may then be none. Each image is subtracted from what is
    ``left``.
    """
    patches, grids = arrays.pop(PATCHES, None), arrays.pop(GRIDS, None)
    if patches is None and grids is None:
        return None
    inputs = f"{where}.loss_fn_inputs"
    if patches is None or grids is None:
        given, missing = (GRIDS, PATCHES) if patches is None else (PATCHES, GRIDS)
        raise InvalidInputError(f"{inputs}[{missing!r}]", None, f"an array, because {given} is there")
    if images:
        raise InvalidInputError(f"{inputs}[{PATCHES!r}]", "patches", "none beside chunks of type image")
    if isinstance(patches, Csr) or patches.ndim != 2 or patches.dtype.kind != "f":
        raise InvalidInputError(f"{inputs}[{PATCHES!r}]", _described(patches), "float32 (patches, numbers of a patch)")
    if not np.isfinite(patches).all():
        raise InvalidInputError(f"{inputs}[{PATCHES!r}]", "NaN or infinity", "finite numbers")
    if isinstance(grids, Csr) or grids.ndim != 2 or grids.shape[1] != 3 or grids.dtype.kind != "i":
        raise InvalidInputError(f"{inputs}[{GRIDS!r}]", _described(grids), "int64 (images, 3)")
    left.images -= len(grids)
    if left.images < 0:
        raise _beyond_limit(f"{inputs}[{GRIDS!r}]", "images", len(grids), left.images, "max_images_per_request")
    fields = f"{inputs}[{PATCHES!r}]", f"{inputs}[{GRIDS!r}]"
    return SentImages(patches=SentPatches(patches.astype(np.float32, copy=False), grids.astype(np.int64), fields))


def _described(array: AnyArray | Csr) -> str:
    return f"{'sparse ' if isinstance(array, Csr) else ''}{array.dtype} {tuple(array.shape)}"


def datum_of(tokens: IntArray, arrays: dict[str, AnyArray | Csr], where: str, left: Allowance) -> Datum:
    """Return a datum with tokens (T,) and the loss's inputs by name, and subtract its size from the allowance."""
    left.tokens -= len(tokens)
    if left.tokens < 0:
        raise _beyond_limit(f"{where}.model_input", "tokens", len(tokens), left.tokens, "max_tokens_per_request")
    if TARGETS not in arrays:
        raise InvalidInputError(where + _TARGETS_FIELD, None, "int64 (N,) or (N, K): every loss needs it")
    targets = arrays.pop(TARGETS)
    if targets.dtype.kind != "i":
        raise InvalidInputError(f"{where}{_TARGETS_FIELD}.dtype", str(targets.dtype), "token ids: int64 or int32")
    left.targets -= targets.size
    if left.targets < 0:
        field = where + _TARGETS_FIELD
        raise _beyond_limit(field, "targets", targets.size, left.targets, "max_targets_per_request")
    floats = {name: _as(array, np.float32) for name, array in arrays.items()}
    return Datum(tokens, _as(targets, np.int64), floats.pop(WEIGHTS, None), floats)


def _beyond_limit(field: str, what: str, count: int, left: int, key: str) -> LimitExceededError:
    """Return the error for a datum that exceeds a request's limit.

    ``left``: what is left of the limit after ``count`` was subtracted, which is a negative number.
    """
    return LimitExceededError(field, f"{count} {what}", f"{left + count}: what is left of the request's limit", key)


def _as(array: AnyArray | Csr, dtype: type[np.generic]) -> Any:
    return array.astype(dtype) if isinstance(array, Csr) else array.astype(dtype, copy=False)


def _loss_config(request: pb.ForwardBackwardRequest) -> dict[str, float]:
    """Return the loss's configuration, from the newer of two maps if it is given.

    Clients also send its numbers in the older map, which cannot hold text.
    """
    if not request.loss_fn_config_v2:
        return dict(request.loss_fn_config)
    config = {}
    for key, value in request.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise InvalidInputError(
                f"loss_fn_config[{key!r}]", value.text, f"a number: loss {request.loss_fn!r} takes no text"
            )
        config[key] = value.number
    return config


# --- errors -----------------------------------------------------------------------------------------------------------

_DATUM_FIELD = re.compile(r"(data\[\d+\])\.(\w+)")


def as_sent(error: Exception) -> Exception:
    """Return an error of the trainer with the names that fields of a pass have on the wire; other errors unchanged."""
    if not isinstance(error, InvalidInputError):
        return error
    field = error.field
    if (of_datum := _DATUM_FIELD.match(field)) is not None:
        where, name = of_datum.groups()
        if name == "images":
            return error  # images[n]: the n-th image of the datum, in whatever form it was sent
        inputs = {"tokens": "model_input", "targets": f"loss_fn_inputs[{TARGETS!r}]", "extras": "loss_fn_inputs"}
        field = f"{where}.{inputs.get(name, f'loss_fn_inputs[{name!r}]')}{field[of_datum.end() :]}"
    elif field == "loss" or field.startswith("loss_config"):
        field = f"loss_fn{field.removeprefix('loss')}"
    return error.renamed(field)


# --- checks before parsing --------------------------------------------------------------------------------------------


def _check_parts(body: bytes, limit: int) -> None:
    """Raise MalformedRequestError for a body with very many small messages.

    An empty message has two bytes in the body, but takes some sixty bytes of memory once it is parsed.
    """
    parts = 0
    for number, _, start, stop in scan(body, 0, len(body)):
        parts += 1
        if number == _DATA_FIELD:
            parts += sum(1 for _ in islice(scan(body, start, stop), limit))
        if parts > limit:
            raise MalformedRequestError(f"body: more than {limit} datums, chunks, tensors and spans")


def _unpack_zstd(body: bytes, limit: int) -> bytes:
    try:
        if zstandard.frame_content_size(body) > limit:  # -1 if the frame does not contain its size
            raise BodyTooLargeError(limit)
        unpacked = zstandard.ZstdDecompressor().decompress(body, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedRequestError(f"body: not one zstd frame of at most {limit} bytes ({error})") from error
    return unpacked


def _unpack_gzip(body: bytes, limit: int) -> bytes:
    decompressor = zlib.decompressobj(wbits=31)
    try:
        unpacked = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise MalformedRequestError(f"body: not gzip ({error})") from error
    if len(unpacked) > limit:
        raise BodyTooLargeError(limit)
    if not decompressor.eof or decompressor.unused_data:
        raise MalformedRequestError("body: not one whole gzip member")
    return unpacked


# --- results ----------------------------------------------------------------------------------------------------------


def encode_training_result(result: TrainResult, data: Sequence[Datum] = ()) -> Outcome:
    """Return the result of a pass as protobuf.

    All tensors of a record share their trailing shape, so there is one record for each group of consecutive datums with
    the same K. ``data``: the datums of the request, given if the result is to hold ``elementwise_loss``, too.
    """
    _check_metrics(result.metrics)
    columns = {"logprobs": result.logprobs}
    if data:
        columns["elementwise_loss"] = [*map(_elementwise_loss, result.logprobs, data)]
    records = []
    for shape, run in groupby(range(len(result.logprobs)), key=lambda number: result.logprobs[number].shape[1:]):
        numbers = list(run)
        records.append(_record({name: [arrays[n] for n in numbers] for name, arrays in columns.items()}, shape))
    output = pb.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=records, metrics=dict(result.metrics)
    )
    return Outcome(Encoding.PROTOBUF, output.SerializeToString())


def _elementwise_loss(logprobs: FloatArray, datum: Datum) -> FloatArray:
    """Return −logprob · weight of each target, whatever the loss was; without weights, −logprob.

    The products are clipped to finite numbers, because JSON has no infinity.
    """
    if datum.weights is None:
        return -logprobs
    with np.errstate(over="ignore"):
        product = -logprobs * dense(datum.weights).reshape(logprobs.shape)
    largest = np.finfo(np.float32).max
    return np.clip(product, -largest, largest)


def _record(columns: Mapping[str, list[FloatArray]], trailing_shape: tuple[int, ...]) -> pb.ArrayRecord:
    fields = {name: _batched(arrays, trailing_shape) for name, arrays in columns.items()}
    return pb.ArrayRecord(type_tag="ArrayRecord", fields=fields, num_datums=len(columns["logprobs"]))


def _batched(given: list[FloatArray], trailing_shape: tuple[int, ...]) -> pb.BatchedTensor:
    arrays = [np.ascontiguousarray(array, "<f4") for array in given]
    offsets = np.zeros(len(arrays) + 1, "<i8")
    np.cumsum([array.nbytes for array in arrays], out=offsets[1:])
    return pb.BatchedTensor(
        data=b"".join(array.tobytes() for array in arrays),
        offsets=offsets.tobytes(),
        dtype=pb.DTYPE_FLOAT32,
        trailing_shape=trailing_shape,
    )


def _check_metrics(metrics: dict[str, float]) -> None:
    """Raise ValueError for metrics that the SDK cannot read.

    The SDK needs ``loss:sum``, and reduces metrics over chunks in the way that the word after the only colon names.
    """
    if "loss:sum" not in metrics:
        raise ValueError(f"a training result without loss:sum: {sorted(metrics)}")
    for name, value in metrics.items():
        if name.count(":") != 1 or not math.isfinite(value):
            raise ValueError(f"metric {name!r} is {value}: a finite number called name:reduction is allowed")
