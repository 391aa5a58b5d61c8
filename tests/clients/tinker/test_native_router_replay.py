"""Routes to experts over the native protocol: a sample's experts are used again in training, also after a crash."""

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import peft
import pytest

from tests.support.models.reference import assert_numbers_close, assert_tensors_close
from tests.support.servers.running import BACKEND, Server, torch_config
from twinkle.model import MultiLoraTransformersModel as LocalModel
from twinkle_client import InvalidRequestError, LoraConfig, TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

MODEL = "random://qwen3-moe-tiny"
SEED = 7


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    running = Server(tmp_path, torch_config(MODEL)).start()
    yield running
    running.close()


def unpacked(routes: dict[str, Any]) -> np.ndarray:
    assert routes["dtype"] == "uint8"
    return np.frombuffer(base64.b64decode(routes["data"]), np.uint8).reshape(routes["shape"])


def train(model: Any, features: list[dict[str, Any]], **who: str) -> list[float]:
    losses = []
    for _ in range(2):
        outputs = model.forward_backward(inputs=features, router_replay_action="replay_forward", **who)
        losses.append(float(outputs["loss"]))
        model.clip_grad_and_step(**who)
    return losses


@pytest.mark.skipif(BACKEND != "megatron", reason="what Megatron's models refuse")
def test_models_of_megatron_refuse_routes(server: Server) -> None:
    with TwinkleClient(server.url, "a-token", seed=SEED) as client:
        model = MultiLoraTransformersModel(MODEL, client=client)
        model.add_adapter_to_model("a", LoraConfig(r=4), seed=SEED)
        row = {"input_ids": [3, 4, 5], "labels": [3, 4, 5]}
        with pytest.raises(InvalidRequestError, match=r"records_routes: .* runs with Megatron"):
            model.forward_only(inputs=[row], router_replay_action="record")
        routes = [[[0, 1]] * 2] * 3
        with pytest.raises(InvalidRequestError, match=r"routed_experts of sequence 0: .* runs with Megatron"):
            model.forward_only(inputs=[{**row, "routed_experts": routes}], router_replay_action="replay_forward")
        assert np.isfinite(model.forward_only(inputs=[row])["logps"]).all()


@pytest.mark.skipif(BACKEND == "megatron", reason="Megatron's models refuse routes")
@pytest.mark.slow
def test_samples_are_replayed_in_training_and_after_a_crash(server: Server) -> None:
    with TwinkleClient(server.url, "a-token", seed=SEED) as client:
        model = MultiLoraTransformersModel(MODEL, client=client)
        model.add_adapter_to_model("a", LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"), seed=SEED)
        model.set_optimizer("AdamW", lr=1e-2)
        prompt = {"input_ids": list(range(3, 12))}
        (answer,) = Sampler(MODEL, client=client).sample(
            [prompt], {"max_tokens": 5, "seed": 3, "num_samples": 2, "routed_experts": True}, adapter_name="a"
        )
        (plain,) = Sampler(MODEL, client=client).sample([prompt], {"max_tokens": 5, "seed": 3}, adapter_name="a")
        assert plain.sequences[0].routed_experts is None
        assert plain.sequences[0].tokens == answer.sequences[0].tokens
        features = [sequence.new_input_feature for sequence in answer.sequences]
        for feature, sequence in zip(features, answer.sequences, strict=True):
            assert feature["routed_experts"] == sequence.routed_experts
            recorded = model.forward_only(inputs=[feature], router_replay_action="record")["routed_experts"]
            routes = unpacked(feature["routed_experts"])  # the last token never went through the sampler's model
            assert len(routes) == len(feature["input_ids"]) - 1
            np.testing.assert_array_equal(unpacked(recorded[0])[:-1], routes)

        local = LocalModel(model_id=MODEL, mixed_precision="fp32")
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        local.add_adapter_to_model("a", config, seed=SEED)
        local.set_optimizer("AdamW", lr=1e-2, adapter_name="a")
        # Other routes than the routers would choose, as lists.
        other = [{**each, "routed_experts": ((unpacked(each["routed_experts"]) + 1) % 8).tolist()} for each in features]
        arrays = [{**each, "routed_experts": np.array(each["routed_experts"])} for each in other]
        losses = train(model, other)
        assert_numbers_close(losses, train(local, arrays, adapter_name="a"))
        weights = model.get_state_dict()
        here = {name: tensor.numpy() for name, tensor in local.get_state_dict(adapter_name="a").items()}
        assert_tensors_close({name: np.array(each, np.float32) for name, each in weights.items()}, here)

        server.kill()
        server.start()
        assert model.get_state_dict() == weights

        for wrong, message in (
            ({"dtype": "uint8", "shape": [2, 2, 2], "data": "AAAA"}, r"routed_experts.shape"),
            ({"dtype": "float32", "shape": [1, 2, 2], "data": "AAAA"}, r"routed_experts: got"),
            ([[[0, 99]] * 2] * 3, r"routed_experts of sequence 0: got 99"),
            ([[[0, 1]]] * 3, r"routed_experts of sequence 0: got .*shape \(3, 1, 2\)"),
            ([[[0, 1]] * 2] * 99, r"routed_experts: got '99 tokens'"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                model.forward_only(
                    inputs=[{**features[0], "routed_experts": wrong}], router_replay_action="replay_forward"
                )
        with pytest.raises(InvalidRequestError, match="router_replay_action"):
            model.forward_only(inputs=features, router_replay_action="again")
        with pytest.raises(InvalidRequestError, match=r"inputs\.routed_experts.*REPLAY_FORWARD"):
            model.forward_only(inputs=[prompt], router_replay_action="replay_forward")
