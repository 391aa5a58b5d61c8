"""forward_only without an adapter uses the base model; adapters can be removed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.servers.native_running import NativeTenant
from tests.support.servers.running import MODEL, Server, key_for, mock_config

ROWS = [{"input_ids": [1, 2, 3, 4], "labels": [2, 3, 4, -100]}, {"input_ids": [7, 8], "labels": [8, -100]}]


@pytest.fixture
def native(server: Server, request: pytest.FixtureRequest) -> NativeTenant:
    return NativeTenant(server.url, key_for(request.node.nodeid), MODEL)


@pytest.mark.parametrize("named", [{}, {"adapter_name": ""}, {"adapter_name": None}, {"disable_lora": False}])
def test_the_base_model_answers_where_no_adapter_is_named(native, named):
    native.add_adapter("a", seed=1)
    reference = native.verb("forward_only", adapter_name="a", inputs=ROWS, disable_lora=True)
    alone = native.verb("forward_only", inputs=ROWS, **named)
    assert [len(row) for row in alone["logps"]] == [4, 2]
    np.testing.assert_allclose(alone["logps"][0], reference["logps"][0])
    assert alone["logps"] != native.verb("forward_only", adapter_name="a", inputs=ROWS)["logps"]
    assert alone.keys() == reference.keys()


def test_it_needs_no_adapter_at_all_and_takes_no_number(native):
    first = native.post("forward_only", inputs=ROWS[0], temperature=2.0)
    assert first.status_code == 200
    assert "x-twinkle-seq-id" not in first.headers
    assert native.verb("forward_only", inputs=ROWS[0], temperature=2.0) == first.json()["result"]
    native.add_adapter("a", seed=1)
    answer = native.post("forward_only", adapter_name="a", inputs=ROWS[0], seq_id=1)
    assert answer.headers["x-twinkle-seq-id"] == "1"


def test_padding_and_packing_are_as_for_adapters(native):
    native.add_adapter("a", seed=1)
    padded = {"input_ids": [1, 2, 0], "labels": [2, -100, -100], "attention_mask": [1, 1, 0]}
    packed = {"input_ids": [1, 2, 3, 4], "labels": [2, -100, 4, -100], "position_ids": [0, 1, 0, 1]}
    for row in (padded, packed):
        expected = native.verb("forward_only", adapter_name="a", inputs=[row], disable_lora=True)
        assert native.verb("forward_only", inputs=[row]) == expected


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"inputs": []}, "inputs"),
        ({}, "inputs"),
        ({"inputs": ROWS, "nonsense": 1}, "nonsense"),
        ({"inputs": ROWS, "temperature": 0}, "temperature"),
        ({"inputs": ROWS, "return_logits": True}, "logits"),
        ({"inputs": [{"input_ids": [10**6], "labels": [1]}]}, "token ids"),
        ({"inputs": ROWS, "adapter_name": 5}, "adapter_name"),
    ],
)
def test_mistakes(native, body, said):
    assert said in native.refusal("forward_only", **body)
    native.verb("forward_only", inputs=ROWS)


@pytest.mark.parametrize("verb", ["forward", "forward_backward", "step", "get_state_dict"])
def test_other_verbs_need_an_adapter(native, verb):
    assert "adapter_name" in native.refusal(verb, inputs=ROWS)


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with limits."""
    limits = {"max_training_tokens_per_minute": 40, "max_tokens_per_request": 20, "max_adapters_per_tenant": 1}
    server = Server(tmp_path_factory.mktemp("tight"), mock_config(limits=limits)).start()
    yield server
    server.close()


def test_limits_are_those_of_ops(tight):
    native = NativeTenant(tight.url, "tml-limited", MODEL)
    assert "at most 20" in native.refusal("forward_only", inputs=ROWS * 4)
    answers = [native.post("forward_only", inputs=ROWS * 3) for _ in range(8)]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused
    assert all(answer.status_code == 429 and "training tokens" in answer.text for answer in refused)


def test_many_at_once(native):
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: native.verb("forward_only", inputs=ROWS), range(24)))
    assert all(result == results[0] for result in results)


# --- removing ---------------------------------------------------------------------------------------------------------


def test_a_removed_adapter_makes_room_and_is_kept_as_a_checkpoint(tight):
    native = NativeTenant(tight.url, "tml-remove", MODEL)
    run = native.add_adapter("a", seed=1)
    native.verb("set_optimizer", adapter_name="a", optimizer_cls="AdamW", lr=0.05)
    native.verb("forward_backward", adapter_name="a", inputs=ROWS)
    native.verb("clip_grad_and_step", adapter_name="a")
    weights = native.verb("get_state_dict", adapter_name="a")
    assert native.verb("remove_adapter", adapter_name="a") == {"status": "ok"}
    # a client that missed the answer repeats the request
    assert native.verb("remove_adapter", adapter_name="a") == {"status": "ok"}
    assert "removed" in native.refusal("step", 404, adapter_name="a")
    config = {"r": 4, "target_modules": "all-linear"}
    again = native.refusal("add_adapter_to_model", adapter_name="a", config=config)
    assert "not used before" in again
    assert "removed" in again
    native.add_adapter("b", seed=2)
    (kept,) = native.http.get(f"/api/v1/twinkle/training_runs/{run}/checkpoints").json()["checkpoints"]
    native.verb("load", adapter_name="b", name=kept["twinkle_path"])
    assert native.verb("get_state_dict", adapter_name="b") == weights


def test_only_ones_own_adapters_are_removed(native, server):
    native.add_adapter("a", seed=1)
    other = NativeTenant(server.url, key_for("stranger of test_native_base_model"), MODEL)
    assert other.refusal("remove_adapter", 404, adapter_name="a") == other.refusal(
        "remove_adapter", 404, adapter_name="a"
    )
    other.http.headers["X-Twinkle-Session-Id"] = native.session_id
    foreign = other.refusal("remove_adapter", 404, adapter_name="a")
    other.http.headers["X-Twinkle-Session-Id"] = "session_" + "0" * 32
    assert other.refusal("remove_adapter", 404, adapter_name="a").replace("0" * 32, "") == foreign.replace(
        native.session_id.removeprefix("session_"), ""
    )
    native.verb("get_state_dict", adapter_name="a")
    assert "adapter_name" in native.refusal("remove_adapter")
    assert "unknown" in native.refusal("remove_adapter", 404, adapter_name="nobody")
