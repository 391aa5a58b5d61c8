"""Results of passes and samples, which are stored as protobuf, as JSON for SDKs that do not read protobuf.

A result may hold millions of numbers, and Python's JSON encoder blocks all other threads while it runs. Therefore the
JSON is written in pieces of a few thousand numbers, directly from the bytes of the stored result: there is never a
second copy of the result or the whole JSON in memory.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinkle.server.types import Outcome
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.peeking import message_fields, varints

_STOP_REASONS = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}
_FLOAT, _DOUBLE, _INT, _OFFSET = (np.dtype(name) for name in ("<f4", "<f8", "<i4", "<i8"))
_NUMBERS = 4096  # that are written at once: some 3 ms of work
_PIECE = 2**16  # characters; shorter texts are joined to one piece
# JSON has about 20 characters and a comma for a float that has four bytes in protobuf.
_JSON_BYTES_PER_BYTE = 6

Array = NDArray[Any]
_Output = pb.ForwardBackwardOutput
_Record = pb.ArrayRecord
_Tensor = pb.BatchedTensor
_Sample = pb.SampleResponse
_Sequence = pb.SampledSequence
_Top = pb.TopkLogprobs
_KEY, _VALUE = 1, 2  # field numbers of an entry in a protobuf map


def estimated_json_bytes(outcome: Outcome) -> int:
    """Return about how many bytes a protobuf result has as JSON, without writing the JSON."""
    return len(outcome.body) * _JSON_BYTES_PER_BYTE


def json_pieces(outcome: Outcome, *, sample: bool) -> Iterator[bytes]:
    """Yield a protobuf result as JSON, piece by piece. NaN and infinity, which JSON does not have, become null.

    ``sample``: the result is that of a sample, not of a pass. Of a sample, target_prompt_logprobs, prompt_alt_tokens,
    prompt_cache_hit_tokens and topk_sampled_logprobs are left out.
    """
    body = memoryview(outcome.body)
    return _joined(_sample(body) if sample else _training(body))


def _joined(texts: Iterable[str]) -> Iterator[bytes]:
    """Join short texts to pieces of at least ``_PIECE`` characters; the last one may be shorter."""
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
    entries = _messages(body, _Output.METRICS_FIELD_NUMBER)
    # Protobuf does not write a value of 0, so its array is empty; the sum of an empty array is 0.
    metrics = {entry.text(_KEY): float(entry.array(_VALUE, _DOUBLE).sum()) for entry in entries}
    kind = _Message(body).text(_Output.LOSS_FN_OUTPUT_TYPE_FIELD_NUMBER)
    yield f'{{"loss_fn_output_type":{_dumps(kind)},"loss_fn_outputs":['
    comma = ""
    for record in _messages(body, _Output.LOSS_FN_OUTPUTS_FIELD_NUMBER):
        for text in _entries(record):
            yield comma + text if text.startswith("{") else text
            comma = ","
    yield f'],"metrics":{_dumps(metrics)}}}'


def _entries(record: "_Message") -> Iterator[str]:
    """Yield the JSON objects of a record's datums, one for each, in several texts; each object begins a new text."""
    entries = _messages(record.body, _Record.FIELDS_FIELD_NUMBER)
    tensors = {entry.text(_KEY): _Rows(_Message(entry.view(_VALUE))) for entry in entries}
    for datum in range(record.integer(_Record.NUM_DATUMS_FIELD_NUMBER)):
        opening = "{"
        for name, rows in tensors.items():
            values = rows.values(datum)
            yield f'{opening}{_dumps(name)}:{{"data":['
            yield from _numbers(values)
            yield f'],"dtype":"float32","shape":{_dumps(rows.shape(values))}}}'
            opening = ","
        yield "}" if tensors else "{}"


class _Rows:
    """A view of a tensor in the encoded result, which has some rows for every datum."""

    def __init__(self, tensor: "_Message") -> None:
        self._data = tensor.view(_Tensor.DATA_FIELD_NUMBER)
        self._offsets = tensor.array(_Tensor.OFFSETS_FIELD_NUMBER, _OFFSET)
        self._trailing = varints(tensor.view(_Tensor.TRAILING_SHAPE_FIELD_NUMBER))

    def values(self, datum: int) -> Array:
        start, stop = self._offsets[datum], self._offsets[datum + 1]
        return np.frombuffer(self._data[start:stop], _FLOAT)

    def shape(self, values: Array) -> list[int]:
        return list(values.reshape([-1, *self._trailing]).shape)


# --- samples ----------------------------------------------------------------------------------------------------------


def _sample(body: memoryview) -> Iterator[str]:
    result = _Message(body)
    yield '{"type":"sample","sequences":['
    comma = ""
    for sequence in _messages(body, _Sample.SEQUENCES_FIELD_NUMBER):
        reason = _STOP_REASONS[sequence.integer(_Sequence.STOP_REASON_FIELD_NUMBER)]  # type: ignore[index]
        yield f'{comma}{{"stop_reason":{_dumps(reason)},"tokens":'
        yield from _list(sequence.array(_Sequence.TOKENS_FIELD_NUMBER, _INT))
        yield ',"logprobs":'
        yield from _list(sequence.array(_Sequence.LOGPROBS_FIELD_NUMBER, _FLOAT))
        yield "}"
        comma = ","
    yield '],"prompt_logprobs":'
    logprobs = result.array(_Sample.PROMPT_LOGPROBS_FIELD_NUMBER, _FLOAT)
    yield from _list(logprobs) if len(logprobs) else ("null",)
    yield ',"topk_prompt_logprobs":'
    yield from _tops(_Message(result.view(_Sample.TOPK_PROMPT_LOGPROBS_FIELD_NUMBER)))
    yield "}"


def _tops(table: "_Message") -> Iterator[str]:
    """Yield the JSON of a top-k table: null if it is empty, else a list with an entry for each position.

    An entry is a list of [token, log-probability]; null for the first position, which has no prediction.
    """
    length, k = table.integer(_Top.LENGTH_FIELD_NUMBER), table.integer(_Top.K_FIELD_NUMBER)
    if not length:
        yield "null"
        return
    ids = table.array(_Top.TOKEN_IDS_FIELD_NUMBER, _INT).reshape(length, k)
    values = table.array(_Top.LOGPROBS_FIELD_NUMBER, _FLOAT).reshape(length, k)
    yield "[null"
    for position in range(1, length):
        yield ",["
        for start in range(0, k, _NUMBERS):
            part = slice(start, start + _NUMBERS)
            pairs = zip(ids[position, part].tolist(), _finite(values[position, part]), strict=True)
            yield ("," if start else "") + _dumps([*pairs])[1:-1]
        yield "]"
    yield "]"


# --- messages and arrays ----------------------------------------------------------------------------------------------


class _Message:
    """A view of a message in the encoded result, which this server wrote. Missing fields are empty, or 0."""

    def __init__(self, body: memoryview) -> None:
        self.body = body
        self._fields = dict(message_fields(body))

    def integer(self, number: int) -> int:
        value = self._fields.get(number, 0)
        assert isinstance(value, int), "the field is written as an integer"
        return value

    def view(self, number: int) -> memoryview:
        value = self._fields.get(number, memoryview(b""))
        assert isinstance(value, memoryview), "the field is written as bytes"
        return value

    def text(self, number: int) -> str:
        return str(self.view(number), "utf-8")

    def array(self, number: int, dtype: np.dtype[Any]) -> Array:
        return np.frombuffer(self.view(number), dtype)


def _messages(body: memoryview, number: int) -> Iterator[_Message]:
    """Yield the messages of a repeated field."""
    for each, value in message_fields(body):
        if each == number:
            assert isinstance(value, memoryview), "the field is written as bytes"
            yield _Message(value)


def _list(values: Array) -> Iterator[str]:
    yield "["
    yield from _numbers(values)
    yield "]"


def _numbers(values: Array) -> Iterator[str]:
    """Yield numbers with commas between them, a few thousand in each text."""
    for start in range(0, len(values), _NUMBERS):
        part = values[start : start + _NUMBERS]
        yield ("," if start else "") + _dumps(_finite(part))[1:-1]


def _finite(values: Array) -> list[float | None]:
    numbers: list[float | None] = values.tolist()
    if np.isfinite(values).all():
        return numbers
    return [number if finite else None for number, finite in zip(numbers, np.isfinite(values), strict=True)]


def _dumps(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
