"""Results as JSON in pieces: the same JSON as written at once, and no piece takes long."""

import json

import numpy as np
import pytest

from twinkle.server.types import Encoding, Outcome
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.json_results import estimated_json_bytes, json_pieces

RNG = np.random.default_rng(0)


def record(parts: dict[str, list[np.ndarray]], trailing: tuple[int, ...] = ()) -> pb.ArrayRecord:
    made = pb.ArrayRecord(num_datums=len(next(iter(parts.values()))))
    for name, arrays in parts.items():
        flat = [np.ascontiguousarray(array, "<f4") for array in arrays]
        made.fields[name].data = b"".join(array.tobytes() for array in flat)
        made.fields[name].offsets = np.cumsum([0, *(array.nbytes for array in flat)]).astype("<i8").tobytes()
        made.fields[name].trailing_shape.extend(trailing)
    return made


def test_a_training_result() -> None:
    rows = [RNG.normal(size=length).astype(np.float32) for length in (0, 3, 20_000)]
    wide = [RNG.normal(size=(length, 2)).astype(np.float32) for length in (1, 0, 5)]
    output = pb.ForwardBackwardOutput(loss_fn_output_type="a", metrics={"loss:sum": 1.5, "nothing": 0.0})
    output.loss_fn_outputs.extend([record({"logprobs": rows}), record({"x": wide, "y": wide}, (2,))])
    outcome = Outcome(Encoding.PROTOBUF, output.SerializeToString())
    pieces = list(json_pieces(outcome, sample=False))
    assert max(map(len, pieces)) < 400_000
    assert len(pieces) > 3
    content = json.loads(b"".join(pieces))
    expected = [{"logprobs": _tensor(row)} for row in rows] + [{"x": _tensor(row), "y": _tensor(row)} for row in wide]
    assert content == {
        "loss_fn_output_type": "a",
        "loss_fn_outputs": expected,
        "metrics": {"loss:sum": 1.5, "nothing": 0.0},
    }
    assert len(b"".join(pieces)) < estimated_json_bytes(outcome)


def _tensor(values: np.ndarray) -> dict[str, object]:
    return {"data": values.ravel().tolist(), "dtype": "float32", "shape": list(values.shape)}


@pytest.mark.parametrize("k", [0, 1, 3, 5000])
def test_a_sample(k: int) -> None:
    tokens, logprobs = np.arange(9000, dtype="<i4"), RNG.normal(size=9000).astype("<f4")
    sequence = pb.SampledSequence(
        stop_reason=pb.STOP_REASON_LENGTH, tokens=tokens.tobytes(), logprobs=logprobs.tobytes()
    )
    response = pb.SampleResponse(sequences=[sequence] * 2)
    prompt, ids = np.array([np.nan, -1.5], "<f4"), np.arange(2 * k, dtype="<i4").reshape(2, k)
    if k:
        response.prompt_logprobs = prompt.tobytes()
        values = (ids / 2).astype("<f4")
        top = pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=values.tobytes(), k=k, length=2)
        response.topk_prompt_logprobs.CopyFrom(top)
    outcome = Outcome(Encoding.PROTOBUF, response.SerializeToString())
    content = json.loads(b"".join(json_pieces(outcome, sample=True)), parse_constant=pytest.fail)
    one = {"stop_reason": "length", "tokens": tokens.tolist(), "logprobs": logprobs.tolist()}
    assert content["sequences"] == [one, one]
    assert content["prompt_logprobs"] == ([None, -1.5] if k else None)
    pairs = [[int(token), float(token) / 2] for token in ids[1]]
    assert content["topk_prompt_logprobs"] == ([None, pairs] if k else None)
