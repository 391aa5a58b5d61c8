"""Clients that are not the SDK: other Accept headers, no sequence numbers, checkpoint ids without a kind."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.servers.running import Server, Tenant, datum, sample_body, tensor, training_body
from twinkle.server.wire import tinker_pb2 as pb

PROTOBUF = "application/x-protobuf"


# --- the form of results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("*/*", "application/json"),  # curl
        ("application/json, text/plain, */*", "application/json"),  # axios
        ("application/json;q=0.9, */*;q=0.1", "application/json"),
        ("", "application/json"),
        ("application/json", "application/json"),  # SDK 0.16
        (f"{PROTOBUF};q=0, */*", "application/json"),
        (f"{PROTOBUF};q=0.5, application/json", "application/json"),
        (f"{PROTOBUF}, application/json", PROTOBUF),  # SDK 0.20 to 0.24
        ("Application/X-Protobuf; charset=utf-8", PROTOBUF),
        (PROTOBUF, PROTOBUF),  # SDK 0.26 and later
    ],
)
def test_results_are_json_unless_protobuf_is_named(tenant: Tenant, accept: str, expected: str) -> None:
    request_id = tenant.forward_backward(tenant.model(), 1)
    loss = tenant.loss(request_id)
    answer = tenant.post("retrieve_future", {"request_id": request_id}, Accept=accept)
    assert answer.headers["content-type"] == expected
    if expected == PROTOBUF:
        assert pb.ForwardBackwardOutput.FromString(answer.content).metrics["loss:sum"] == loss
    else:
        assert answer.json()["metrics"]["loss:sum"] == pytest.approx(loss)


# --- requests without a sequence number -------------------------------------------------------------------------------


def step(model: str, **fields: Any) -> dict[str, Any]:
    return {"model_id": model, "adam_params": {"learning_rate": 0.1}, **fields}


def pass_in_json(model: str, **fields: Any) -> dict[str, Any]:
    chunks = [{"type": "encoded_text", "tokens": [1, 2, 3]}]
    inputs = {"target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}}
    data = [{"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}]
    return {"model_id": model, "forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}, **fields}


def test_ops_without_numbers_run_in_the_order_of_their_arrival(tenant: Tenant) -> None:
    model, twin = tenant.model(), tenant.model()
    rows = training_body(model, 1)
    numbered = [
        tenant.submit("forward_backward", training_body(twin, 1)),
        tenant.submit("optim_step", step(twin, seq_id=2)),
        tenant.submit("forward_backward", pass_in_json(twin, seq_id=3)),
        tenant.submit("optim_step", step(twin, seq_id=4)),
        tenant.submit("forward_backward", pass_in_json(twin, seq_id=5)),
    ]
    request = pb.ForwardBackwardRequest.FromString(rows)
    request.ClearField("seq_id")  # 0: not set
    plain = [
        tenant.submit("forward_backward", request.SerializeToString()),
        tenant.submit("optim_step", step(model)),
        tenant.submit("forward_backward", pass_in_json(model, seq_id=None)),
        tenant.submit("optim_step", step(model)),
        tenant.submit("forward_backward", pass_in_json(model)),
    ]
    assert [request_id.rpartition(":")[2] for request_id in plain] == ["1", "2", "3", "4", "5"]
    for number in (0, 2, 4):
        assert tenant.loss(plain[number]) == tenant.loss(numbered[number])
    assert tenant.json(tenant.submit("save_weights", {"model_id": model, "path": "plain"}))["path"]
    sampler = tenant.json(tenant.submit("save_weights_for_sampler", {"model_id": model, "sampling_session_seq_id": 9}))
    body = sample_body(sampler["sampling_session_id"])
    del body["seq_id"]
    one, two = tenant.submit("asample", body), tenant.submit("asample", body)
    assert one != two
    assert tenant.tokens(one) == tenant.tokens(two) == tenant.tokens(tenant.sample(sampler["sampling_session_id"], 0))


def test_ops_without_numbers_that_arrive_together(tenant: Tenant) -> None:
    """Each gets a number of its own, and none is lost."""
    model = tenant.model()
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: tenant.submit("forward_backward", pass_in_json(model)), range(24)))
    assert sorted(int(request_id.rpartition(":")[2]) for request_id in made) == list(range(1, 25))
    assert len({tenant.loss(request_id) for request_id in made}) == 1


def test_a_wrong_op_without_a_number_fails_alone(tenant: Tenant) -> None:
    model = tenant.model()
    assert "learning_rate" in tenant.error(tenant.submit("optim_step", step(model, adam_params={"learning_rate": "x"})))
    tenant.submit("forward_backward", pass_in_json(model))
    assert tenant.json(tenant.submit("optim_step", step(model)))


@pytest.mark.parametrize("first", ["numbered", "plain"])
def test_one_model_has_numbers_in_all_requests_or_in_none(tenant: Tenant, first: str) -> None:
    """Otherwise the server could give an op the number that the other client uses next."""
    model = tenant.model()
    if first == "numbered":
        tenant.loss(tenant.submit("forward_backward", pass_in_json(model, seq_id=1)))
        refused = tenant.error(tenant.submit("optim_step", step(model)))
        assert "seq_id: got none" in refused
        assert "the last is 1" in refused
        assert tenant.json(tenant.submit("optim_step", step(model, seq_id=2)))
    else:
        tenant.loss(tenant.submit("forward_backward", pass_in_json(model)))
        assert "seq_id: got 2" in tenant.error(tenant.submit("optim_step", step(model, seq_id=2)))
        assert tenant.json(tenant.submit("optim_step", step(model)))


def test_ops_without_numbers_survive_a_crash_in_order(own_server: Callable[..., Server]) -> None:
    """Ops that were accepted before the kill run after it, in the same order; then the next number follows."""
    server = own_server(**{"pass": 0.3})
    tenant = Tenant(server.url, "tml-plain")
    model, twin = tenant.model(), tenant.model()
    for number in range(3):
        tenant.forward_backward(twin, 2 * number + 1)
        last = tenant.optim_step(twin, 2 * number + 2)
    tenant.json(last)
    for number in range(3):
        request = pb.ForwardBackwardRequest.FromString(training_body(model, 2 * number + 1))
        request.ClearField("seq_id")
        tenant.submit("forward_backward", request.SerializeToString())
        tenant.submit("optim_step", step(model))
    server.kill()
    server.start()
    assert "the last is 6" not in tenant.error(tenant.submit("optim_step", step(model, seq_id=7)))
    following = tenant.submit("forward_backward", pass_in_json(model))
    assert following == f"{model}:7"
    assert tenant.loss(following) == tenant.loss(tenant.submit("forward_backward", pass_in_json(twin, seq_id=7)))


# --- names of checkpoints and runs ------------------------------------------------------------------------------------


def test_a_checkpoint_id_without_its_kind(tenant: Tenant) -> None:
    model = tenant.model()
    tenant.json(tenant.save(model, 1, "ck"))
    at = f"training_runs/{model}/checkpoints/ck"
    answers = [
        tenant.http.delete(at),
        tenant.http.put(f"{at}/ttl", json={"ttl_seconds": 3600}),
        tenant.post(f"{at}/publish", {}),
        tenant.http.delete(f"{at}/publish"),
        tenant.get(f"{at}/archive"),
        tenant.get(f"{at}/external_weights_urls"),
    ]
    assert [answer.status_code for answer in answers] == [400] * 6
    assert all("weights" in answer.json()["detail"] for answer in answers)
    assert answers[0].json()["detail"].startswith("checkpoint_id: got 'ck'")


@pytest.mark.parametrize("run", ["nobody", "0034d8c9-0a88-52a9-b2b7-bce7cb1e6fef", "s-1:train:0", "a.b_c"])
def test_the_path_of_an_unknown_run_is_not_malformed(tenant: Tenant, run: str) -> None:
    path = f"tinker://{run}/weights/0001"
    for answer in (
        tenant.post("weights_info", {"tinker_path": path}),
        tenant.post("copy_weights", {"source_path": path, "destination_project_id": "p"}),
        tenant.http.delete(f"training_runs/{run}/checkpoints/weights/0001"),
    ):
        assert answer.status_code == 404, answer.text
        assert path in answer.json()["detail"]


@pytest.mark.parametrize("path", ["tinker://", "tinker://a/b", "tinker://a/kind/c", "tinker://../weights/x", "a/b/c"])
def test_malformed_paths(tenant: Tenant, path: str) -> None:
    assert tenant.post("weights_info", {"tinker_path": path}).status_code == 400


def test_a_short_time_to_live(tenant: Tenant) -> None:
    """The hosted service documents an hour as the least; here a second is enough."""
    model = tenant.model()
    tenant.json(tenant.save(model, 1, "ck", ttl_seconds=60))
    answer = tenant.http.put(f"training_runs/{model}/checkpoints/weights/ck/ttl", json={"ttl_seconds": 0})
    assert answer.status_code == 400


# --- others -----------------------------------------------------------------------------------------------------------


def test_metadata_of_a_session_that_is_not_text_can_be_read(tenant: Tenant) -> None:
    """The SDK lets its caller send any JSON, and reads only text."""
    metadata = {"run": "a", "lr": 0.1, "tags": ["x"], "nothing": None}
    session = tenant.post("create_session", {"user_metadata": metadata}).json()["session_id"]
    read = tenant.get(f"sessions/{session}").json()["user_metadata"]
    assert read == {"run": "a", "lr": "0.1", "tags": '["x"]', "nothing": "null"}
    assert json.loads(read["tags"]) == ["x"]


@pytest.mark.parametrize(("host", "status"), [("0.0.0.0", 200), ("[::]", 200), ("evil.example", 400)])
def test_the_address_of_all_interfaces_as_base_url(server: Server, tenant: Tenant, host: str, status: int) -> None:
    headers = {"Host": f"{host}:{server.port}"}
    answer = httpx.get(f"{server.url}/api/v1/sessions", headers={**headers, "X-API-Key": tenant.key}, trust_env=False)
    assert answer.status_code == status


# --- errors name fields as the client sent them -----------------------------------------------------------------------

WRONG_DATA = {
    "target": ({"target_tokens": tensor([1, 2, 10**6], "i8")}, "data[0].loss_fn_inputs['target_tokens']: got 1000000"),
    "shape": ({"target_tokens": tensor([1, 2], "i8")}, "data[0].loss_fn_inputs['target_tokens']: got 'shape (2,)'"),
    "NaN": ({"weights": tensor([1, float("nan"), 1])}, "data[0].loss_fn_inputs['weights']: got nan"),
    "width": ({"weights": tensor([1, 1])}, "data[0].loss_fn_inputs['weights']: got 'shape (2,)'"),
}


@pytest.mark.parametrize(("inputs", "message"), WRONG_DATA.values(), ids=WRONG_DATA)
def test_errors_of_the_trainer(tenant: Tenant, inputs: dict[str, pb.Tensor], message: str) -> None:
    rows = [datum([5, 6, 7, 8], **inputs)]
    assert tenant.error(tenant.forward_backward(tenant.model(), 1, rows)).startswith(message)


def test_errors_about_tokens_and_options(tenant: Tenant) -> None:
    model = tenant.model()
    error = tenant.error(tenant.forward_backward(model, 1, [datum([5, 10**6, 7])]))
    assert error.startswith("data[0].model_input: got 1000000, allowed: token ids in [0, ")
    error = tenant.error(tenant.forward_backward(model, 2, loss="ppo"))
    assert error.startswith("data[0].loss_fn_inputs['")
    sampler = tenant.json(tenant.publish(model, 3))["sampling_session_id"]
    params = {"max_tokens": 4, "stop": [10**6]}
    error = tenant.error(tenant.submit("asample", sample_body(sampler, sampling_params=params)))
    assert error.startswith("sampling_params.stop: got 1000000")


def test_a_number_that_is_no_number(tenant: Tenant) -> None:
    """JSON has no NaN: the SDK sends it as null."""
    model = tenant.model()
    error = tenant.error(tenant.submit("optim_step", step(model, seq_id=1, adam_params={"learning_rate": None})))
    assert error.startswith("adam_params.learning_rate: got null, allowed: a finite number")
    assert "NaN" in error
    body = pass_in_json(model, seq_id=2)
    inputs = body["forward_backward_input"]["data"][0]["loss_fn_inputs"]
    inputs["weights"] = {"data": [1.0, None, 1.0], "dtype": "float32", "shape": [3]}
    error = tenant.error(tenant.submit("forward_backward", body))
    assert "data[0].loss_fn_inputs.weights.data[1]: got null" in error
