"""The client's Trainer: what it sends, and how it reports results and failures. Its numbers: tests/cookbook/swap."""

import numpy as np
import pytest

from tests.clients.twinkle.stub_server import SESSION, Status, StubServer
from twinkle_client import (
    AdamParams,
    Datum,
    InvalidRequestError,
    LoraSpec,
    ServerError,
    Trainer,
    TrainFailure,
    TrainItem,
    TrainResult,
)

OUTPUT = {
    "loss_fn_outputs": [{"logprobs": {"data": [-1.0, -2.0], "dtype": "float32", "shape": [2]}}],
    "metrics": {"loss:sum": 3.0},
}
ITEM = TrainItem("a", [Datum(np.array([1, 2]), [2, 3], weights=[0.0, 1.0])])


@pytest.fixture
def server(stub) -> StubServer:
    """A stub whose futures have the name of their route, and the results in ``server.results``."""
    stub.results = {
        "create_model": {"model_id": "s:train:0"},
        "forward": OUTPUT,
        "forward_backward": OUTPUT,
        "optim_step": {"metrics": {"unclipped_grad_l2:mean": 0.5}},
        "save_weights": {"path": "tinker://r/weights/n"},
        "unload_model": {},
    }
    for route in stub.results:
        stub.answer(f"/{route}", {"request_id": route})
    stub.answer("/retrieve_future", lambda body: stub.results[body["request_id"]])
    return stub


@pytest.fixture
def trainer(server, client) -> Trainer:
    made = Trainer.from_pretrained("pypi://m", device="cpu", client=client)
    made.create_adapter("a", LoraSpec(rank=4, seed=1))
    return made


def test_adapters(server, trainer):
    trainer.create_adapter("b", LoraSpec(rank=8, train_mlp=False))
    first, second = server.bodies("/create_model")
    switches = {"train_attn": True, "train_mlp": True, "train_unembed": False}
    assert first == {
        "session_id": SESSION,
        "model_seq_id": 0,
        "base_model": "m",
        "lora_config": {"rank": 4, "seed": 1, **switches},
    }
    assert second["model_seq_id"] == 1
    assert second["lora_config"] == {"rank": 8, **switches, "train_mlp": False}
    for spec in (LoraSpec(4, alpha=8.0), LoraSpec(4, target_modules="all-linear")):
        with pytest.raises(InvalidRequestError, match="add_adapter_to_model"):
            trainer.create_adapter("c", spec)
    with pytest.raises(InvalidRequestError, match="adapter_id"):
        trainer.create_adapter("a", LoraSpec(4))
    trainer.remove_adapter("b")
    assert trainer.adapter_ids() == ["a"]


def test_passes_and_steps_are_numbered(server, trainer):
    server.fail("/retrieve_future", Status(408), Status(408))  # not yet
    (result,) = trainer.forward_backward([ITEM])
    assert isinstance(result, TrainResult)
    assert result.metrics == {"loss:sum": 3.0}
    assert result.logprobs[0].tolist() == [-1.0, -2.0]
    trainer.forward([TrainItem("a", ITEM.data, "ppo", {"clip": 1})])
    assert trainer.optim_step("a", AdamParams(learning_rate=1e-3)) == {"unclipped_grad_l2:mean": 0.5}
    first, second = server.bodies("/forward_backward")[0], server.bodies("/forward")[0]
    assert [first["seq_id"], second["seq_id"], server.bodies("/optim_step")[0]["seq_id"]] == [1, 2, 3]
    assert server.asked("/retrieve_future")[0].headers["accept"] == "application/json"
    (datum,) = first["forward_backward_input"]["data"]
    assert datum["model_input"]["chunks"][0]["tokens"] == [1, 2]
    assert datum["loss_fn_inputs"]["target_tokens"] == {"data": [2, 3], "dtype": "int64", "shape": [2]}
    assert datum["loss_fn_inputs"]["weights"]["dtype"] == "float32"
    assert second["forward_input"]["loss_fn_config"] == {"clip": 1.0}


def test_not_yet_is_no_failure_but_a_proxys_408_is(server, trainer, monkeypatch):
    waits = []
    monkeypatch.setattr("twinkle_client.client.session.time.sleep", waits.append)
    server.fail("/retrieve_future", *[Status(408, {"type": "try_again", "queue_state": "active"})] * 3)
    assert isinstance(trainer.forward([ITEM])[0], TrainResult)
    assert waits == []
    server.fail("/retrieve_future", *[Status(408)] * 3)
    assert isinstance(trainer.forward([ITEM])[0], TrainResult)
    assert len(waits) == 3
    assert waits[0] < waits[2]
    server.fail("/retrieve_future", *[Status(408)] * 1000)
    (failure,) = trainer.forward([ITEM])
    assert isinstance(failure, TrainFailure)
    assert failure.error.status == 408
    assert len(server.asked("/retrieve_future")) < 100


def test_a_long_poll_is_no_failure(server, trainer, monkeypatch):
    monkeypatch.setattr("twinkle_client.client.session._SHORTEST_POLL", 0.0)
    monkeypatch.setattr("twinkle_client.client.session.time.sleep", lambda seconds: pytest.fail("waited"))
    server.fail("/retrieve_future", *[Status(408)] * 3)
    assert isinstance(trainer.forward([ITEM])[0], TrainResult)


def test_failures_are_of_their_item(server, trainer):
    server.results["forward_backward"] = {"error": "no such token", "category": "user"}
    (failure,) = trainer.forward_backward([ITEM])
    assert isinstance(failure, TrainFailure)
    assert isinstance(failure.error, InvalidRequestError)
    server.results["optim_step"] = {"error": "broken", "category": "server"}
    with pytest.raises(ServerError, match="broken"):
        trainer.optim_step("a", AdamParams())
    server.fail("/optim_step", Status(413, {"detail": "too large"}))
    with pytest.raises(InvalidRequestError):
        trainer.optim_step("a", AdamParams())
    server.results["optim_step"] = {"metrics": {}}
    trainer.optim_step("a", AdamParams())
    assert [body["seq_id"] for body in server.bodies("/optim_step")] == [2, 3, 3]  # a refusal uses no number


def test_what_a_server_does_not_take(trainer, tmp_path):
    for wrong in ({"temperature": 0.5}, {"statistics": True}, {"base_model": True}, {"objective": print}):
        with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
            trainer.forward([TrainItem("a", ITEM.data, **wrong)])
    with pytest.raises(InvalidRequestError, match="unknown adapter 'z'"):
        trainer.forward([TrainItem("z", [])])
    with pytest.raises(InvalidRequestError, match="overwrite=True"):
        trainer.save("a", tmp_path)
    with pytest.raises(InvalidRequestError, match="optimizer"):
        trainer.save("a", tmp_path / "n", optimizer=False)
