"""Training as SDKs before protobuf do it: JSON requests and results with the same numbers."""

import copy
import json
from typing import Any

import numpy as np
import pytest

from twinkle.server.types import OpKind, Refused, TrainPass
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.errors import MalformedRequestError
from twinkle.server.wire.training import Allowance, decode_forward_backward
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
        (("model_input", "chunks", 0, "type"), "image", "chunks[0].data"),
        (("model_input", "chunks", 0, "type"), "dmel", "chunks[0].type"),
        (("model_input", "chunks", 0), {"type": "encoded_text"}, "chunks[0].tokens"),
        (("model_input", "chunks", 0, "tokens"), [1.5], "chunks[0].tokens"),
        (("model_input", "chunks", 0, "tokens"), [-1], "chunks[0].tokens"),
        (("loss_fn_inputs", "target_tokens", "data"), [2, 3, 4.5], "target_tokens'].data: got 'numbers that are"),
        (("loss_fn_inputs", "target_tokens", "data"), [2, 3, 1e30], "allowed: integers, as dtype is int64"),
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


@pytest.mark.parametrize("body", [b"{", b"{}", b'{"seq_id": 1}', b'{"model_id": "m", "seq_id": 0}'])
def test_what_has_no_place_in_a_sequence(body):
    with pytest.raises(MalformedRequestError):
        decode_json_pass(body, OpKind.FORWARD_BACKWARD)


def test_too_many_tokens_are_refused():
    op = decode_json_pass(json.dumps(request("m", 1)).encode(), OpKind.FORWARD_BACKWARD, Allowance(tokens=2))
    assert isinstance(op.payload, Refused)


def test_training_and_sampling_in_json(tenant):
    """Compared with an adapter of the same seed that uses protobuf."""
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
        (output,) = content["loss_fn_outputs"]
        assert set(record.fields) == {"logprobs"}
        expected = np.frombuffer(record.fields["logprobs"].data, "<f4").tolist()
        assert output["logprobs"] == {"data": expected, "dtype": "float32", "shape": [3]}
        assert output["elementwise_loss"]["shape"] == [3]
        assert output["elementwise_loss"]["data"] == pytest.approx([-expected[0], -expected[1] / 2, 0.0])
        assert sum(output["elementwise_loss"]["data"]) == pytest.approx(content["metrics"]["loss:sum"])
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
    from tests.support.servers.running import Tenant

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


# --- a reference model ------------------------------------------------------------------------------------------------


def answer(tokens: list[int], weights: list[float], **inputs: Any) -> dict[str, Any]:
    given = {"target_tokens": tokens[1:], "weights": weights, **inputs}
    return {"model_input": {"chunks": [{"tokens": tokens[:-1]}]}, "loss_fn_inputs": given}


def rows_of(content: dict[str, Any]) -> list[list[float]]:
    return [each["logprobs"]["data"] for each in content["loss_fn_outputs"]]


PAIR = [answer([1, 2, 3, 4], [0.0, 1.0, 1.0]), answer([1, 2, 9], [0.0, 1.0])]


def test_a_forward_without_the_adapter(tenant):
    """However far the adapter was trained. Without one the mock gives two tokens equal probability."""
    model = tenant.model()
    config = {"disable_lora": 1.0}
    expected = [pytest.approx([-np.log(2)] * length) for length in (3, 2)]
    for seq in (1, 3):
        tenant.submit("forward_backward", request(model, seq, data=PAIR))
        tenant.optim_step(model, seq + 1)
    adapted = fetch(tenant, tenant.submit("forward", request(model, 5, "forward_input", data=PAIR)))
    asked = request(model, 6, "forward_input", data=PAIR, loss_fn_config=config)
    plain = fetch(tenant, tenant.submit("forward", asked))
    off = request(model, 7, "forward_input", data=PAIR, loss_fn_config={"disable_lora": 0.0})
    assert rows_of(plain) == expected
    assert rows_of(adapted) != expected
    assert rows_of(fetch(tenant, tenant.submit("forward", off))) == rows_of(adapted)


def test_dpo_as_older_scripts_ask_for_it(tenant):
    """The DPO loss: forward without the adapter, its log-probabilities as ref_logps, and importance_sampling."""
    model = tenant.model()
    asked = request(model, 1, "forward_input", data=PAIR, loss_fn_config={"disable_lora": 1.0})
    reference = rows_of(fetch(tenant, tenant.submit("forward", asked)))
    pairs = copy.deepcopy(PAIR)
    for each, row in zip(pairs, reference, strict=True):
        each["loss_fn_inputs"]["ref_logps"] = row
    config = {"dpo_beta": 0.5, "dpo_sft_weight": 0.25}
    metrics = []
    for seq in (2, 4, 6, 8):
        dpo = request(model, seq, data=pairs, loss_fn="importance_sampling", loss_fn_config=config)
        content = fetch(tenant, tenant.submit("forward_backward", dpo))
        policy = rows_of(content)
        sums = [
            sum(lp * w for lp, w in zip(row, d["loss_fn_inputs"]["weights"], strict=True))
            for row, d in zip(policy, PAIR, strict=True)
        ]
        refs = [
            sum(lp * w for lp, w in zip(row, d["loss_fn_inputs"]["weights"], strict=True))
            for row, d in zip(reference, PAIR, strict=True)
        ]
        margin = 0.5 * ((sums[0] - refs[0]) - (sums[1] - refs[1]))
        expected = np.log1p(np.exp(-margin)) - 0.25 * sums[0] / 2
        assert content["metrics"]["loss:sum"] == pytest.approx(expected, abs=1e-5)
        assert content["metrics"]["loss:mean"] == content["metrics"]["loss:sum"]
        assert content["metrics"]["rewards/margins:mean"] == pytest.approx(margin, abs=1e-5)
        metrics.append(content["metrics"])
        tenant.json(tenant.optim_step(model, seq + 1))
    margins = [each["rewards/margins:mean"] for each in metrics]
    assert margins == sorted(margins)
    assert [each["rewards/accuracies:mean"] for each in metrics] == [float(margin > 0) for margin in margins]
    evaluated = request(model, 10, "forward_input", data=pairs, loss_fn="importance_sampling", loss_fn_config=config)
    content = fetch(tenant, tenant.submit("forward", evaluated))
    assert content["metrics"]["rewards/margins:mean"] > margins[-1]


def test_both_forms_know_a_reference():
    """An SDK that sends protobuf may run the same scripts."""
    chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.array([1, 2, 3], "<i4").tobytes()))
    inputs = {
        "target_tokens": pb.Tensor(dense=np.array([2, 3, 4], "<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[3]),
        "ref_logps": pb.Tensor(dense=np.array([-1, -2, -3], "<f4").tobytes(), dtype=pb.DTYPE_FLOAT32, shape=[3]),
    }
    datum = pb.Datum(model_input=[chunk], loss_fn_inputs=inputs)
    packed = pb.ForwardBackwardRequest(
        model_id="m", seq_id=1, loss_fn="importance_sampling", data=[datum, datum], loss_fn_config={"dpo_beta": 0.25}
    )
    op = decode_forward_backward(packed.SerializeToString())
    assert isinstance(op.payload, TrainPass), op.payload
    assert op.payload.preference is not None
    assert (op.payload.preference.beta, op.payload.preference.sft_weight) == (0.25, 0.0)
    assert [row.tolist() for row in op.payload.preference.ref_logps] == [[-1, -2, -3]] * 2
    assert not op.payload.without_adapter
    forward = pb.ForwardBackwardRequest(
        model_id="m",
        seq_id=1,
        loss_fn="importance_sampling",
        data=[datum] * 2,
        forward_only=True,
        loss_fn_config={"disable_lora": 1.0},
    )
    op = decode_forward_backward(forward.SerializeToString())
    assert isinstance(op.payload, TrainPass), op.payload
    assert op.payload.without_adapter


def test_weights_that_the_loss_does_not_read_are_no_danger(tenant):
    """The loss of each target is −logprob · weight, which may overflow."""
    model = tenant.model()
    far = {"weights": [3e38, 1.0, 0.0], "logprobs": [-1.0] * 3, "advantages": [1.0] * 3}
    data = [answer([1, 2, 3, 4], **far), answer([1, 2, 3, 4], **{**far, "weights": [-3e38, 1.0, 0.0]})]
    for seq in (1, 2):  # the more the model is trained, the less likely are the tokens that it is trained away from
        content = fetch(
            tenant, tenant.submit("forward_backward", request(model, seq, data=data, loss_fn="importance_sampling"))
        )
        assert len(content["loss_fn_outputs"]) == 2
