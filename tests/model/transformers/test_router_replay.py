"""Routes to experts in the library's models: recorded by one pass, replayed by another."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig

from tests.support.models.reference import assert_numbers_close, assert_tensors_close
from tests.support.models.sampling import toy_tokenizer
from tests.support.models.tiny_models import tiny_model
from twinkle.errors import InvalidInputError, UnsupportedError, UserError
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.model.library.router_replay import RouterReplayAction
from twinkle.model.library.sequences import SequenceBatch
from twinkle.model.transformers.causal_forward import Asked

RECORD, REPLAY = RouterReplayAction.RECORD, RouterReplayAction.REPLAY_FORWARD
LENGTHS = (9, 5, 7)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    made = {}
    for family in ("qwen3_moe", "deepseek_v3", "llama"):  # DeepSeek runs padded, through its own forward
        made[family] = tmp_path_factory.mktemp(family)
        tiny_model(family).save_pretrained(made[family])
        toy_tokenizer().save_pretrained(made[family])
    return made


def model_of(folder: Path, **options: Any) -> TransformersModel:
    return TransformersModel(model_id=folder, mixed_precision="fp32", enable_router_replay=True, **options)


@cache
def rows() -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    return [
        {"input_ids": random.integers(3, 60, length), "labels": random.integers(3, 60, length)} for length in LENGTHS
    ]


def with_routes(recorded: torch.Tensor, shift: int = 0, cut: int = 0) -> list[dict[str, Any]]:
    """Return the rows with recorded routes, or with other ones; ``cut``: without those of the last tokens."""
    return [
        {**row, "routed_experts": ((recorded[index, : length - cut] + shift) % (4 if shift else 8)).numpy()}
        for index, (row, length) in enumerate(zip(rows(), LENGTHS, strict=True))
    ]


def gradients(model: TransformersModel) -> dict[str, np.ndarray]:
    found = {name: each.grad.numpy().copy() for name, each in model.model.named_parameters() if each.grad is not None}
    model.model.zero_grad()
    return found


def loss(model: TransformersModel | MultiLoraTransformersModel, inputs: Sequence[object], **options: Any) -> float:
    return float(model.forward_backward(inputs=inputs, **options)["loss"])


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_all_ways_to_compute_a_pass_replay_the_same(folders: Mapping[str, Path], family: str) -> None:
    model, recomputing = model_of(folders[family]), model_of(folders[family], gradient_checkpointing=True)
    lora = MultiLoraTransformersModel(model_id=folders[family], mixed_precision="fp32", enable_router_replay=True)
    lora.add_adapter_to_model("a", LoraConfig(r=4, target_modules="all-linear"), seed=1)  # without effect: B is zero
    recorded = model.forward_only(inputs=rows(), router_replay_action=RECORD)["routed_experts"]
    assert recorded.shape == (3, 9, 2, 2)
    assert recorded.dtype == torch.int16
    again = lora.forward_only(inputs=rows(), adapter_name="a", router_replay_action="RECORD")["routed_experts"]
    assert torch.equal(recorded, again)

    own, own_gradients = loss(model, rows()), gradients(model)
    for cut in (0, 1):  # a sampler has no routes of the last token
        assert_numbers_close(loss(model, with_routes(recorded, cut=cut), router_replay_action=REPLAY), own)
        assert_tensors_close(gradients(model), own_gradients)

    # Rows of the outputs as they are, with their padding, which workers on Ray fill with −200.
    as_they_are = [{**row, "routed_experts": recorded[index].clone()} for index, row in enumerate(rows())]
    for row, length in zip(as_they_are, LENGTHS, strict=True):
        row["routed_experts"][length:] = -200
    assert_numbers_close(loss(model, as_they_are, router_replay_action=REPLAY), own)
    gradients(model)

    other = with_routes(recorded, shift=1)
    expected, expected_gradients = loss(model, other, router_replay_action=REPLAY), gradients(model)
    assert abs(expected - own) > 0.1
    for each, options in ((model, {"micro_batch_size": 1}), (recomputing, {}), (recomputing, {"micro_batch_size": 2})):
        assert_numbers_close(loss(each, other, router_replay_action="replay_forward", **options), expected)
        assert_tensors_close(gradients(each), expected_gradients)
    assert_numbers_close(loss(lora, other, adapter_name="a", router_replay_action=REPLAY), expected)
    model.set_processor("InputProcessor", padding_free=True)
    assert_numbers_close(loss(model, other, router_replay_action=REPLAY), expected)


def test_without_an_action_the_field_is_not_read(folders: Mapping[str, Path]) -> None:
    model = model_of(folders["qwen3_moe"])
    wrong = [
        {**row, "routed_experts": np.zeros((length, 2, 2), int)} for row, length in zip(rows(), LENGTHS, strict=True)
    ]
    outputs = model.forward_backward(inputs=wrong)
    assert_numbers_close(float(outputs["loss"]), loss(model, rows()))
    assert "routed_experts" not in outputs


def test_a_backward_pass_after_others_recomputes_with_its_own_routes(folders: Mapping[str, Path]) -> None:
    """Between forward and backward, another pass may have other routes or none."""
    plain, recomputing = model_of(folders["qwen3_moe"]), model_of(folders["qwen3_moe"], gradient_checkpointing=True)
    lora = MultiLoraTransformersModel(model_id=folders["qwen3_moe"], mixed_precision="fp32")
    lora.add_adapter_to_model("a", LoraConfig(r=4, target_modules="all-linear"), seed=1)
    other = with_routes(plain.forward_only(inputs=rows(), router_replay_action=RECORD)["routed_experts"], shift=1)
    results = []
    for model in (plain, recomputing):
        model.forward(inputs=other, router_replay_action=REPLAY)
        model.calculate_loss()
        with torch.no_grad():  # another pass of the same model, which keeps the routes of nobody
            model._passes._forward(SequenceBatch(({"input_ids": torch.arange(3)},)), Asked())
        model.backward()
        results.append(gradients(model))
    assert_tensors_close(*results)
    one = loss(lora, other, adapter_name="a", router_replay_action=REPLAY)
    lora.zero_grad(adapter_name="a")
    lora.forward(inputs=other, adapter_name="a", router_replay_action=REPLAY)
    assert_numbers_close(lora.calculate_loss(adapter_name="a"), one)
    lora.backward(adapter_name="a")
    after = lora.trainer.gradients("a")
    lora.zero_grad(adapter_name="a")
    loss(lora, other, adapter_name="a", router_replay_action=REPLAY)
    assert_tensors_close(after, lora.trainer.gradients("a"))


def test_refusals(folders: Mapping[str, Path]) -> None:
    model = model_of(folders["qwen3_moe"])
    lora = MultiLoraTransformersModel(model_id=folders["qwen3_moe"], mixed_precision="fp32")
    lora.add_adapter_to_model("a", LoraConfig(r=4, target_modules="all-linear"), seed=1)
    for each, who in ((model, {}), (lora, {"adapter_name": "a"})):
        with pytest.raises(InvalidInputError, match=r"inputs\.routed_experts.*REPLAY_FORWARD"):
            each.forward_backward(inputs=rows(), router_replay_action=REPLAY, **who)
        with pytest.raises(InvalidInputError, match=r"router_replay_action: got 'again'.*RECORD"):
            each.forward_backward(inputs=rows(), router_replay_action="again", **who)
        with pytest.raises(UnsupportedError, match="REPLAY_BACKWARD is not a pass of its own"):
            each.forward_only(inputs=rows(), router_replay_action=RouterReplayAction.REPLAY_BACKWARD, **who)
        for routes, message in (
            (np.full((5, 2, 2), 4), r"routed_experts of sequence 0: got 4.*\[0, 4\)"),
            (np.ones((5, 1, 2), int), r"routed_experts of sequence 0: got 'shape \(5, 1, 2\)'.*\(T, 2, 2\)"),
        ):
            with pytest.raises(InvalidInputError, match=message):
                each.forward_backward(
                    inputs=[{**rows()[1], "routed_experts": routes}], router_replay_action=REPLAY, **who
                )
    with pytest.raises(UnsupportedError, match="enable_router_replay: llama has no routers"):
        model_of(folders["llama"])
    with pytest.raises(UnsupportedError, match=r"enable_router_replay: .* has no routers"):
        MultiLoraTransformersModel(model_id=folders["llama"], mixed_precision="fp32", enable_router_replay=True)
    plain = TransformersModel(model_id=folders["qwen3_moe"], mixed_precision="fp32")
    with pytest.raises(UserError, match="construct the model with enable_router_replay=True"):
        plain.forward_only(inputs=rows(), router_replay_action=RECORD)
