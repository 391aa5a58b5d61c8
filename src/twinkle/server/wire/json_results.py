"""Results for SDKs before protobuf: what is kept as protobuf, written as the JSON that they read.

A result may hold millions of numbers, and Python writes JSON without letting any other thread work. So it is written in
pieces of a few thousand numbers, straight from the encoded result: neither is ever in memory a second time.
"""

import json
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinkle.server.types import Encoding, Outcome
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.peeking import message_fields, varints

_STOP_REASONS = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}
_FLOAT, _INT, _OFFSET = np.dtype("<f4"), np.dtype("<i4"), np.dtype("<i8")
_NUMBERS = 4096  # of one piece: some 3 ms of work
_PIECE = 2**16  # characters; what is shorter is sent together with what follows
# A float of four bytes takes 20 characters or so, and a comma.
_JSON_BYTES_PER_BYTE = 6

Array = NDArray[Any]
_Output = pb.ForwardBackwardOutput
_Record = pb.ArrayRecord
_Tensor = pb.BatchedTensor
_Sample = pb.SampleResponse
_Sequence = pb.SampledSequence
_Top = pb.TopkLogprobs
_KEY, _VALUE = 1, 2  # of an entry in a map


def estimated_json_bytes(outcome: Outcome) -> int:
    """Return about how many bytes a result has as JSON, without writing it."""
    return len(outcome.body) * (1 if outcome.encoding is Encoding.JSON else _JSON_BYTES_PER_BYTE)


def json_pieces(outcome: Outcome, *, sample: bool) -> Iterator[bytes]:
    """Yield the result as JSON, piece by piece. Numbers that are not finite become null, as JSON has none."""
    if outcome.encoding is Encoding.JSON:
        yield outcome.body
        return
    body = memoryview(outcome.body)
    yield from _joined(_sample(body) if sample else _training(body))


def _joined(texts: Iterable[str]) -> Iterator[bytes]:
    waiting, size = [], 0
    for text in texts:
        waiting.append(text)
        size += len(text)
        if size >= _PIECE:
            yield "".join(waiting).encode()
            waiting, size = [], 0
    yield "".join(waiting).encode()


# --- passes -----------------------------------------------------------------------------------------------------------


def _training(body: memoryview) -> Iterator[str]:
    kind, metrics = "", {}
    for number, value in message_fields(body):
        if number == _Output.LOSS_FN_OUTPUT_TYPE_FIELD_NUMBER:
            kind = _text(value)
        elif number == _Output.METRICS_FIELD_NUMBER:
            entry = dict(message_fields(_view(value)))
            metrics[_text(entry[_KEY])] = (
                float(struct.unpack("<d", _view(entry[_VALUE]))[0]) if _VALUE in entry else 0.0
            )
    yield f'{{"loss_fn_output_type":{_dumps(kind)},"loss_fn_outputs":['
    comma = ""
    for number, value in message_fields(body):
        if number == _Output.LOSS_FN_OUTPUTS_FIELD_NUMBER:
            for text in _entries(_view(value)):
                yield comma + text if text.startswith("{") else text
                comma = ","
    yield f'],"metrics":{_dumps(metrics)}}}'


def _entries(record: memoryview) -> Iterator[str]:
    """Yield one object a datum, with the fields that the record has for all of them. An object begins a text."""
    count, tensors = 0, {}
    for number, value in message_fields(record):
        if number == _Record.NUM_DATUMS_FIELD_NUMBER:
            assert isinstance(value, int)
            count = value
        elif number == _Record.FIELDS_FIELD_NUMBER:
            entry = dict(message_fields(_view(value)))
            tensors[_text(entry[_KEY])] = _Rows(_view(entry[_VALUE]))
    for datum in range(count):
        opening = "{"
        for name, rows in tensors.items():
            values = rows.values(datum)
            yield f'{opening}{_dumps(name)}:{{"data":['
            yield from _numbers(values)
            yield f'],"dtype":"float32","shape":{_dumps(rows.shape(values))}}}'
            opening = ","
        yield "}" if tensors else "{}"


class _Rows:
    """A tensor with a part for every datum, as it lies in the encoded result."""

    def __init__(self, body: memoryview) -> None:
        fields = dict(message_fields(body))
        nothing = memoryview(b"")
        self._data = _view(fields.get(_Tensor.DATA_FIELD_NUMBER, nothing))
        self._offsets = np.frombuffer(_view(fields.get(_Tensor.OFFSETS_FIELD_NUMBER, nothing)), _OFFSET)
        self._trailing = varints(_view(fields.get(_Tensor.TRAILING_SHAPE_FIELD_NUMBER, nothing)))

    def values(self, datum: int) -> Array:
        start, stop = self._offsets[datum], self._offsets[datum + 1]
        return np.frombuffer(self._data[start:stop], _FLOAT)

    def shape(self, values: Array) -> list[int]:
        return list(values.reshape([-1, *self._trailing]).shape)


# --- samples ----------------------------------------------------------------------------------------------------------


def _sample(body: memoryview) -> Iterator[str]:
    fields = dict(message_fields(body))
    yield '{"type":"sample","sequences":['
    comma = ""
    for number, value in message_fields(body):
        if number == _Sample.SEQUENCES_FIELD_NUMBER:
            yield comma
            yield from _sequence(dict(message_fields(_view(value))))
            comma = ","
    yield '],"prompt_logprobs":'
    logprobs = _array(fields, _Sample.PROMPT_LOGPROBS_FIELD_NUMBER, _FLOAT)
    yield from _list(logprobs) if len(logprobs) else ("null",)
    yield ',"topk_prompt_logprobs":'
    top = fields.get(_Sample.TOPK_PROMPT_LOGPROBS_FIELD_NUMBER)
    yield from ("null",) if top is None else _tops(dict(message_fields(_view(top))))
    yield "}"


def _sequence(fields: dict[int, int | memoryview]) -> Iterator[str]:
    reason = fields.get(_Sequence.STOP_REASON_FIELD_NUMBER, 0)
    assert isinstance(reason, int)
    yield f'{{"stop_reason":{_dumps(_STOP_REASONS[reason])},"tokens":'  # type: ignore[index]
    yield from _list(_array(fields, _Sequence.TOKENS_FIELD_NUMBER, _INT))
    yield ',"logprobs":'
    yield from _list(_array(fields, _Sequence.LOGPROBS_FIELD_NUMBER, _FLOAT))
    yield "}"


def _tops(fields: dict[int, int | memoryview]) -> Iterator[str]:
    """Yield a list of (token, log-probability) for each position; of the first position nothing is known."""
    length, k = fields.get(_Top.LENGTH_FIELD_NUMBER, 0), fields.get(_Top.K_FIELD_NUMBER, 0)
    assert isinstance(length, int)
    assert isinstance(k, int)
    if not length:
        yield "null"
        return
    ids = _array(fields, _Top.TOKEN_IDS_FIELD_NUMBER, _INT).reshape(length, k)
    values = _array(fields, _Top.LOGPROBS_FIELD_NUMBER, _FLOAT).reshape(length, k)
    yield "[null"
    for position in range(1, length):
        yield ",["
        for start in range(0, k, _NUMBERS):
            part = slice(start, start + _NUMBERS)
            pairs = zip(ids[position, part].tolist(), _finite(values[position, part]), strict=True)
            yield ("," if start else "") + _dumps([*pairs])[1:-1]
        yield "]"
    yield "]"


# --- arrays -----------------------------------------------------------------------------------------------------------


def _list(values: Array) -> Iterator[str]:
    yield "["
    yield from _numbers(values)
    yield "]"


def _numbers(values: Array) -> Iterator[str]:
    """Yield numbers with commas between them, some thousand at a time."""
    for start in range(0, len(values), _NUMBERS):
        part = values[start : start + _NUMBERS]
        yield ("," if start else "") + _dumps(_finite(part))[1:-1]


def _finite(values: Array) -> list[float | None]:
    numbers: list[float | None] = values.tolist()
    if np.isfinite(values).all():
        return numbers
    return [number if finite else None for number, finite in zip(numbers, np.isfinite(values), strict=True)]


def _array(fields: dict[int, int | memoryview], number: int, dtype: np.dtype[Any]) -> Array:
    return np.frombuffer(_view(fields.get(number, memoryview(b""))), dtype)


def _view(value: int | memoryview) -> memoryview:
    assert isinstance(value, memoryview), "the field is written as bytes"
    return value


def _text(value: int | memoryview) -> str:
    return str(_view(value), "utf-8")


def _dumps(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
