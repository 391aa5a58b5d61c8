"""Results for SDKs before protobuf: what is kept as protobuf, written as the JSON that they read."""

import json
import math
from typing import Any

import numpy as np

from twinkle.server.types import Encoding, Outcome
from twinkle.server.wire import tinker_pb2 as pb

_STOP_REASONS = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}
_FLOAT, _INT = np.dtype("<f4"), np.dtype("<i4")


def as_json(outcome: Outcome, *, sample: bool) -> Outcome:
    if outcome.encoding is Encoding.JSON:
        return outcome
    if sample:
        content = _sample(pb.SampleResponse.FromString(outcome.body))
    else:
        content = _training(pb.ForwardBackwardOutput.FromString(outcome.body))
    return Outcome(Encoding.JSON, json.dumps(content, allow_nan=False, separators=(",", ":")).encode())


def _training(output: pb.ForwardBackwardOutput) -> dict[str, Any]:
    entries = [entry for record in output.loss_fn_outputs for entry in _entries(record)]
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": entries,
        "metrics": dict(output.metrics),
    }


def _entries(record: pb.ArrayRecord) -> list[dict[str, Any]]:
    """One a datum, with the fields that the record has for all of them."""
    entries: list[dict[str, Any]] = [{} for _ in range(record.num_datums)]
    for name, tensor in record.fields.items():
        offsets = np.frombuffer(tensor.offsets, "<i8")
        for entry, start, stop in zip(entries, offsets[:-1], offsets[1:], strict=True):
            values = np.frombuffer(tensor.data[start:stop], _FLOAT)
            shape = [-1, *tensor.trailing_shape]
            array = values.reshape(shape)
            entry[name] = {"data": values.tolist(), "dtype": "float32", "shape": list(array.shape)}
    return entries


def _sample(response: pb.SampleResponse) -> dict[str, Any]:
    content: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": _STOP_REASONS[each.stop_reason],
                "tokens": np.frombuffer(each.tokens, _INT).tolist(),
                "logprobs": np.frombuffer(each.logprobs, _FLOAT).tolist(),
            }
            for each in response.sequences
        ],
        "prompt_logprobs": None,
        "topk_prompt_logprobs": None,
    }
    if response.prompt_logprobs:
        values = np.frombuffer(response.prompt_logprobs, _FLOAT).tolist()
        content["prompt_logprobs"] = [value if math.isfinite(value) else None for value in values]
    if response.topk_prompt_logprobs.length:
        content["topk_prompt_logprobs"] = _tops(response.topk_prompt_logprobs)
    return content


def _tops(top: pb.TopkLogprobs) -> list[list[tuple[int, float]] | None]:
    """Of the first position nothing is known."""
    ids = np.frombuffer(top.token_ids, _INT).reshape(top.length, top.k).tolist()
    values = np.frombuffer(top.logprobs, _FLOAT).reshape(top.length, top.k).tolist()
    return [None, *([*zip(row, lps, strict=True)] for row, lps in zip(ids[1:], values[1:], strict=True))]
