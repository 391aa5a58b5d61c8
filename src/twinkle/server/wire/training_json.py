"""forward_backward and forward in JSON, as older SDKs send them, which do not use protobuf."""

import math
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from twinkle.errors import InvalidInputError, UserError
from twinkle.images import SentImages
from twinkle.model.types import Datum
from twinkle.server.types import UNNUMBERED, Op, OpKind, Refused, TrainPass
from twinkle.server.wire.fields import Id, Request, Sequenced, parse
from twinkle.server.wire.model_input import ModelInput, read_json
from twinkle.server.wire.reference_passes import named_pass
from twinkle.server.wire.training import (
    CUSTOM,
    GRIDS,
    MAX_DATUMS,
    PATCHES,
    TARGETS,
    Allowance,
    AnyArray,
    check_input_name,
    check_width,
    datum_of,
    take_patches,
)

# The JSON parser blocks all other threads: this many bytes take half a second. SDKs send 5 MB at a time.
MOST_BYTES = 16 * 2**20
_INTEGERS = (TARGETS, GRIDS)  # inputs that are int64 if they have no dtype; all others are float32


class _Tensor(Request):
    data: Annotated[list[float | int], Field(fail_fast=True)]
    dtype: Literal["int64", "float32"] = "float32"
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=4)] | None = None


def _as_tensor(value: object) -> object:
    """Return a bare list of numbers as the data of a tensor."""
    return {"data": value} if isinstance(value, list) else value


class _Datum(Request):
    model_input: ModelInput
    loss_fn_inputs: dict[str, Annotated[_Tensor, BeforeValidator(_as_tensor)]]


class _Pass(Request):
    data: Annotated[list[_Datum], Field(fail_fast=True, max_length=MAX_DATUMS)]
    loss_fn: Id
    loss_fn_config: dict[Id, float] | None = None


class _ForwardBackward(Sequenced):
    forward_backward_input: _Pass


class _Forward(Sequenced):
    forward_input: _Pass


def is_json(body: bytes) -> bool:
    """Return whether a body is JSON: no protobuf message here begins with a brace, which would be a group."""
    return body.startswith(b"{")


def decode_json_pass(body: bytes, kind: OpKind, left: Allowance | None = None) -> Op:
    """Return the op in a JSON body, with errors as in :func:`~twinkle.server.wire.training.decode_forward_backward`."""
    place, left = parse(Sequenced, body), left or Allowance()
    payload: TrainPass | Refused
    try:
        if kind is OpKind.FORWARD:
            asked = parse(_Forward, body).forward_input
        else:
            asked = parse(_ForwardBackward, body).forward_backward_input
        if asked.loss_fn == CUSTOM:
            raise InvalidInputError("loss_fn", CUSTOM, "one of the server's losses: custom losses need protobuf")
        sequences = [_datum(datum, f"data[{index}]", left) for index, datum in enumerate(asked.data)]
        trains = kind is OpKind.FORWARD_BACKWARD
        payload = named_pass(sequences, asked.loss_fn, asked.loss_fn_config or {}, trains=trains)
    except UserError as error:
        payload = Refused.because(error)
    return Op(place.model_id, place.seq_id or UNNUMBERED, kind, payload, body)


def _datum(datum: _Datum, where: str, left: Allowance) -> tuple[Datum, SentImages]:
    for name in datum.loss_fn_inputs:
        check_input_name(name, where)
    arrays: dict[str, Any] = {}
    for name, tensor in datum.loss_fn_inputs.items():
        field = f"{where}.loss_fn_inputs[{name!r}]"
        if name not in (PATCHES, GRIDS):
            check_width(tensor.shape or (), field, left)
        arrays[name] = _array(name, tensor, field)
    tokens, images = read_json(datum.model_input, f"{where}.model_input.chunks", left.images)
    patches = take_patches(arrays, where, images, left.images)
    return datum_of(tokens, arrays, where, left), patches or images


def _array(name: str, tensor: _Tensor, field: str) -> AnyArray:
    dtype = "int64" if name in _INTEGERS and "dtype" not in tensor.model_fields_set else tensor.dtype
    shape = [len(tensor.data)] if tensor.shape is None else tensor.shape
    if math.prod(shape) != len(tensor.data):
        raise InvalidInputError(f"{field}.shape", shape, f"sizes whose product is {len(tensor.data)}")
    if dtype == "int64" and any(isinstance(value, float) for value in tensor.data):
        raise InvalidInputError(f"{field}.data", "numbers that are not whole", "integers, as dtype is int64")
    try:
        return np.array(tensor.data, dtype).reshape(shape)
    except ValueError:  # an empty tensor may declare sizes that numpy refuses, such as (0, 10**30)
        raise InvalidInputError(f"{field}.shape", shape, "sizes that memory can hold") from None
    except OverflowError:
        raise InvalidInputError(f"{field}.data", "numbers beyond 64 bits", f"numbers that {dtype} can hold") from None
