"""The library's vLLMSampler gives the same results as LocalSampler, with the same weights and seeds."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import peft
import pytest
import torch

from tests.sampler.vllm.vllm_model import BOUND, ENGINE_ARGS
from twinkle.data_format import SamplingParams
from twinkle.errors import UnknownNameError
from twinkle.model import MultiLoraTransformersModel
from twinkle.sampler import LocalSampler, hand_over, vLLMSampler

if TYPE_CHECKING:
    from twinkle.data_format import SampleResponse

pytestmark = pytest.mark.vllm

PROMPTS = [{"messages": [{"role": "user", "content": text}], "user_data": [("n", "1")]} for text in ("Hello", "Bye")]
PARAMS = SamplingParams(max_tokens=6, seed=3, logprobs=1, num_samples=2)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> MultiLoraTransformersModel:
    torch.manual_seed(0)
    model = MultiLoraTransformersModel(model_id=str(model_dir), mixed_precision="fp32", device="cpu")
    model.add_adapter_to_model("a", peft.LoraConfig(r=8, target_modules="all-linear"))
    model.set_optimizer("AdamW", lr=0.05, adapter_name="a")
    return model


@pytest.fixture(scope="module")
def own(model_dir: Path) -> Iterator[vLLMSampler]:
    sampler = vLLMSampler(str(model_dir), ENGINE_ARGS, dtype="fp32")
    yield sampler
    sampler.shutdown()
    sampler.shutdown()  # a second call does nothing


def move(model: MultiLoraTransformersModel) -> None:
    tokens = list(range(40, 60))
    model.forward_backward(inputs=[{"input_ids": tokens, "labels": [*tokens[1:], -100]}], adapter_name="a")
    model.clip_grad_and_step(adapter_name="a")


def assert_equal(ours: "list[SampleResponse]", theirs: "list[SampleResponse]") -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        for mine, its in zip(one.sequences, other.sequences, strict=True):
            assert (mine.tokens, mine.decoded, mine.stop_reason) == (its.tokens, its.decoded, its.stop_reason)
            values = [[pair[1] for [pair] in sequence.logprobs] for sequence in (mine, its)]
            np.testing.assert_allclose(*values, atol=BOUND)
            assert list(mine.new_input_feature["labels"]) == list(its.new_input_feature["labels"])
            assert mine.new_input_feature["user_data"] == its.new_input_feature["user_data"]


def test_same_as_the_torch_sampler(own: vLLMSampler, model: MultiLoraTransformersModel, tmp_path: Path) -> None:
    local = LocalSampler(model)
    base = own.sample(PROMPTS, PARAMS)
    assert_equal(base, local.sample(PROMPTS, PARAMS))
    for _ in range(2):  # the second set of weights replaces the first
        move(model)
        hand_over(model, own, "a")
        own.reset_prefix_cache()
        received = own.sample(PROMPTS, PARAMS, adapter_name="a")
        assert_equal(received, local.sample(PROMPTS, PARAMS, adapter_name="a"))
    path = model.save("saved", str(tmp_path), adapter_name="a")
    assert_equal(own.sample(PROMPTS, PARAMS, adapter_path=path), received)
    assert_equal(own.sample(PROMPTS, PARAMS, "a", use_base_model=True), base)
    assert len(own.engine.version_ids()) == 1


def test_parameters_as_a_mapping_and_scored_prompts(own: vLLMSampler, model: MultiLoraTransformersModel) -> None:
    params = {"max_tokens": 0, "prompt_logprobs": 2}
    ours, theirs = own.sample(PROMPTS, params)[1], LocalSampler(model).sample(PROMPTS, params)[1]
    assert ours.sequences[0].tokens == []
    np.testing.assert_allclose(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], atol=BOUND)
    with pytest.raises(UnknownNameError, match="unknown adapter 'b'"):
        own.sample(PROMPTS, PARAMS, adapter_name="b")
