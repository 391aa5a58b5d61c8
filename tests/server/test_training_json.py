"""Training as SDKs before protobuf ask for it: JSON in, JSON out, and the same numbers."""

import copy
import json
from typing import Any

import numpy as np
import pytest

from twinkle.server.types import OpKind, Refused, TrainPass
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.errors import MalformedRequestError
from twinkle.server.wire.training import decode_forward_backward
from twinkle.server.wire.training_json import decode_json_pass

JSON_ONLY = {"Accept": "application/json"}
DATUM = {
    "model_input": {"chunks": [{"tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
        "weights": {"data": [1.0, 0.5, 0], "dtype": "float32", "shape": [3]},
    },
}


def request(model_id: str, seq: int, key: str = "forward_backward_input", **change: Any) -> dict[str, Any]:
    asked = {"data": [DATUM], "loss_fn": "cross_entropy", "loss_fn_config": None, **change}
    return {"model_id": model_id, "seq_id": seq, key: asked}


def protobuf(model_id: str, seq: int, forward_only: bool = False) -> bytes:
    chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.array([1, 2, 3], "<i4").tobytes()))
    inputs = {
        "target_tokens": pb.Tensor(dense=np.array([2, 3, 4], "<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[3]),
        "weights": pb.Tensor(dense=np.array([1, 0.5, 0], "<f4").tobytes(), dtype=pb.DTYPE_FLOAT32, shape=[3]),
    }
    return pb.ForwardBackwardRequest(
        model_id=model_id,
        seq_id=seq,
        loss_fn="cross_entropy",
        data=[pb.Datum(model_input=[chunk], loss_fn_inputs=inputs)],
        forward_only=forward_only,
    ).SerializeToString()


def test_both_say_the_same():
    plain = decode_json_pass(json.dumps(request("m", 3)).encode(), OpKind.FORWARD_BACKWARD)
    packed = decode_forward_backward(protobuf("m", 3))
    assert (plain.adapter_id, plain.seq, plain.kind) == (packed.adapter_id, packed.seq, packed.kind)
    assert isinstance(plain.payload, TrainPass)
    assert isinstance(packed.payload, TrainPass)
    for ours, theirs in zip(plain.payload.data, packed.payload.data, strict=True):
        for name in ("tokens", "targets", "weights"):
            np.testing.assert_array_equal(vars(ours)[name], vars(theirs)[name])
            assert vars(ours)[name].dtype == vars(theirs)[name].dtype


def test_bare_lists_are_tensors():
    bare = copy.deepcopy(DATUM)
    bare["loss_fn_inputs"] = {"target_tokens": [2, 3, 4], "weights": [1, 0.5, 0]}
    op = decode_json_pass(json.dumps(request("m", 1, data=[bare])).encode(), OpKind.FORWARD_BACKWARD)
    assert isinstance(op.payload, TrainPass), op.payload
    assert op.payload.data[0].targets.dtype == np.int64


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("model_input", "chunks", 0, "type"), "image", "chunks[0].type"),
        (("model_input", "chunks", 0, "tokens"), [1.5], "chunks[0].tokens"),
        (("model_input", "chunks", 0, "tokens"), [-1], "chunks[0].tokens"),
        (("loss_fn_inputs", "target_tokens", "data"), [2, 3, 4.5], "target_tokens"),
        (("loss_fn_inputs", "target_tokens", "shape"), [2, 2], "shape"),
        (("loss_fn_inputs", "target_tokens", "dtype"), "float32", "token ids"),
        (("loss_fn_inputs", "weights", "dtype"), "bfloat16", "dtype"),
        (("loss_fn_inputs", "nonsense"), {"data": [1.0]}, "nonsense"),
        (("loss_fn_inputs",), {}, "target_tokens"),
    ],
)
def test_a_mistake_uses_up_its_number(path, value, said):
    wrong: Any = copy.deepcopy(DATUM)
    place = wrong
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    op = decode_json_pass(json.dumps(request("m", 5, data=[wrong])).encode(), OpKind.FORWARD_BACKWARD)
    assert op.seq == 5
    assert isinstance(op.payload, Refused)
    assert said in op.payload.message


@pytest.mark.parametrize("body", [b"{", b"{}", b'{"model_id": "m"}', b'{"model_id": "m", "seq_id": 0}'])
def test_what_has_no_place_in_a_sequence(body):
    with pytest.raises(MalformedRequestError):
        decode_json_pass(body, OpKind.FORWARD_BACKWARD)


def test_too_many_tokens_are_refused():
    op = decode_json_pass(json.dumps(request("m", 1)).encode(), OpKind.FORWARD_BACKWARD, max_tokens=2)
    assert isinstance(op.payload, Refused)


def test_training_and_sampling_in_json(tenant):
    """Beside an adapter of the same seed that speaks protobuf."""
    session = tenant.session()
    old, new = tenant.model(session, 0, seed=4), tenant.model(session, 1, seed=4)
    forward = tenant.submit("forward", request(old, 1, "forward_input"))
    tenant.submit("forward_backward", protobuf(new, 1, forward_only=True))
    for seq in (2, 4):
        trained = tenant.submit("forward_backward", request(old, seq))
        packed = tenant.submit("forward_backward", protobuf(new, seq))
        for model in (old, new):
            tenant.result(tenant.optim_step(model, seq + 1))
        content = fetch(tenant, trained)
        theirs = pb.ForwardBackwardOutput.FromString(tenant.result(packed))
        assert content["metrics"] == dict(theirs.metrics)
        (record,) = theirs.loss_fn_outputs
        expected = np.frombuffer(record.fields["logprobs"].data, "<f4").tolist()
        assert content["loss_fn_outputs"] == [{"logprobs": {"data": expected, "dtype": "float32", "shape": [3]}}]
    assert len(fetch(tenant, forward)["loss_fn_outputs"]) == 1

    published = json.loads(tenant.result(tenant.publish(old, 6)))
    sample = {
        "sampling_session_id": published["sampling_session_id"],
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "seed": 1},
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
    }
    drawn = fetch(tenant, tenant.submit("asample", sample))
    assert [len(each["tokens"]) for each in drawn["sequences"]] == [4, 4]
    assert drawn["sequences"][0]["stop_reason"] in ("length", "stop")
    assert drawn["prompt_logprobs"][0] is None
    assert len(drawn["prompt_logprobs"]) == 3
    assert drawn["topk_prompt_logprobs"][0] is None
    assert [len(row) for row in drawn["topk_prompt_logprobs"][1:]] == [2, 2]


def fetch(tenant: Any, request_id: str) -> dict[str, Any]:
    tenant.result(request_id)
    answer = tenant.post("retrieve_future", {"request_id": request_id}, **JSON_ONLY)
    assert answer.headers["content-type"] == "application/json", answer.content
    content: dict[str, Any] = answer.json()
    return content


def test_json_requests_are_replayed(own_server):
    from running import Tenant

    server = own_server(snapshot=3600.0)
    tenant = Tenant(server.url, "tml-json")
    model = tenant.model(seed=4)
    tenant.result(tenant.submit("forward_backward", request(model, 1)))
    tenant.result(tenant.optim_step(model, 2))
    before = fetch(tenant, tenant.submit("forward", request(model, 3, "forward_input")))
    server.kill()
    server.start()
    assert fetch(tenant, tenant.submit("forward", request(model, 4, "forward_input"))) == before


def test_numbers_beyond_64_bits_are_refused():
    body = copy.deepcopy(request("s:train:0", 1))
    body["forward_backward_input"]["data"][0]["loss_fn_inputs"]["target_tokens"] = [2**63] * 3
    op = decode_json_pass(json.dumps(body).encode(), OpKind.FORWARD_BACKWARD)
    assert isinstance(op.payload, Refused)
    assert "64 bits" in op.payload.message
