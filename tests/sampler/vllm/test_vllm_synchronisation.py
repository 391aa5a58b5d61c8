"""sync_weights to vLLM: after each one the sampler computes what the model computes, or it refuses to sample.

Samples come from vLLM, scores of prompts from the copy of the model beside it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

import twinkle
from tests.sampler.vllm.vllm_model import BOUND, ENGINE_ARGS, write_model
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SampleResponse, SamplingParams
from twinkle.errors import InvalidInputError, TwinkleServerError, UnsupportedError, UserError
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.sampler import vLLMSampler

pytestmark = pytest.mark.vllm

A = "a"
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
ROW = {"input_ids": (tokens := list(range(40, 60))), "labels": [*tokens[1:], -100]}
# Long enough for vLLM to find its first blocks in the prefix cache.
PROMPT = {"input_ids": np.random.default_rng(0).integers(0, 256, 200).tolist()}
STEPS = 10
BUCKET_MB = 0.02  # 20 kB of a model of 0.5 MB: many buckets, and tensors in several pieces

Model = MultiLoraTransformersModel | TransformersModel


@pytest.fixture(scope="module")
def own(model_dir: Path) -> Iterator[vLLMSampler]:
    sampler = vLLMSampler(str(model_dir), ENGINE_ARGS | {"max_logprobs": 4}, dtype="fp32")
    yield sampler
    sampler.shutdown()


def lora(model_dir: Path, **options: Any) -> MultiLoraTransformersModel:
    model = MultiLoraTransformersModel(model_id=str(model_dir), mixed_precision="fp32", device="cpu", **options)
    model.add_adapter_to_model(A, peft.LoraConfig(**LORA), seed=1)
    model.set_optimizer("AdamW", lr=0.02, adapter_name=A)
    return model


def peft_lora(model_dir: Path) -> TransformersModel:
    torch.manual_seed(0)
    model = TransformersModel(model_id=str(model_dir), mixed_precision="no")
    model.add_adapter_to_model(A, peft.LoraConfig(**LORA))
    model.set_optimizer("AdamW", lr=0.02, adapter_name=A)
    return model


def full(model_dir: Path) -> TransformersModel:
    model = TransformersModel(model_id=str(model_dir), mixed_precision="no")
    model.set_optimizer("AdamW", lr=0.01)
    return model


def adapter(model: Model) -> dict[str, str]:
    """Return the adapter's name as the argument that verbs of a multi-LoRA model require."""
    return {"adapter_name": A} if isinstance(model, MultiLoraTransformersModel) else {}


def train(model: Model) -> None:
    model.forward_backward(inputs=[ROW], **adapter(model))
    model.clip_grad_and_step(**adapter(model))


def sample(sampler: vLLMSampler, **named: Any) -> SampleResponse:
    (response,) = sampler.sample([PROMPT], SamplingParams(max_tokens=6, seed=3, logprobs=1), **named)
    return response


def numbers(response: SampleResponse) -> list[tuple[int, float]]:
    return [pair for [pair] in response.sequences[0].logprobs]


def errors(model: Model, sampler: vLLMSampler) -> tuple[float, float]:
    """Return the largest differences to the model's log-probabilities: of sampled tokens, and of the prompt's."""
    (sequence,) = sample(sampler).sequences
    whole = [*PROMPT["input_ids"], *sequence.tokens]
    row = {"input_ids": whole, "labels": [*whole[1:], -100]}
    logps = model.forward_only(inputs=[row], **adapter(model))["logps"][0].numpy()
    sampled = np.array([pair[1] for [pair] in sequence.logprobs])
    (scored,) = sampler.sample([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=1))
    prompt = np.array(scored.prompt_logprobs[1:])
    end = len(PROMPT["input_ids"]) - 1
    return np.abs(sampled - logps[end:-1]).max(), np.abs(prompt - logps[:end]).max()


KINDS: dict[str, tuple[Callable[[Path], Model], bool]] = {
    "adapter": (lora, False),
    "merged": (lora, True),
    "PEFT adapter": (peft_lora, False),
    "PEFT merged": (peft_lora, True),
    "full": (full, True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler_computes_what_the_model_computes(kind: str, own: vLLMSampler, model_dir: Path) -> None:
    make, merge = KINDS[kind]
    model = make(model_dir)
    manager = CheckpointEngineManager(model, own, bucket_size_mb=BUCKET_MB)
    seen = set()
    for step in range(STEPS):
        if step:
            train(model)
        name = manager.sync_weights(merge_and_sync=merge)
        response = sample(own)
        assert response.weights_version == name
        assert max(errors(model, own)) < BOUND
        seen.add(tuple(numbers(response)))
        assert own.engine.version_ids() == ([name] if "adapter" in kind else [])
    assert len(seen) == STEPS, "each synchronisation changes the samples"
    if "adapter" in kind:
        assert sample(own, use_base_model=True).weights_version != name
    if "merged" in kind:
        with pytest.raises(UserError, match="a second adapter cannot be added"):
            sample(own, adapter_name=A)


def test_an_adapter_is_forgotten_with_its_base(own: vLLMSampler, model_dir: Path) -> None:
    tuned, whole = lora(model_dir), full(model_dir)
    CheckpointEngineManager(tuned, own).sync_weights(merge_and_sync=False)
    own.receive_weights("handed over", tuned.get_state_dict(adapter_name=A), tuned.get_peft_config_dict(adapter_name=A))
    train(whole)
    name = CheckpointEngineManager(whole, own).sync_weights()
    assert sample(own).weights_version == name
    assert max(errors(whole, own)) < BOUND
    with pytest.raises(UserError, match="handed over"):
        sample(own, adapter_name="handed over")


class Breaks:
    """A model that fails when it has sent ``number`` buckets."""

    def __init__(self, model: Model, number: int) -> None:
        self.ranks = model.ranks
        self._model = model
        self._left = number

    def offer_weights(self, **named: Any) -> Any:
        return self._model.offer_weights(**named)

    def send_weights(self, *args: Any, **named: Any) -> Any:
        if not self._left:
            raise ConnectionError("the network is gone")
        self._left -= 1
        return self._model.send_weights(*args, **named)


def test_after_a_failure_it_refuses_or_goes_on_with_the_old_weights(own: vLLMSampler, model_dir: Path) -> None:
    model = full(model_dir)
    CheckpointEngineManager(model, own).sync_weights()
    before = numbers(sample(own))
    with pytest.raises(ConnectionError):
        CheckpointEngineManager(Breaks(model, 0), own).sync_weights()
    assert numbers(sample(own)) == before
    wide = lora(model_dir, max_r=64)
    wide.add_adapter_to_model("wide", peft.LoraConfig(r=64, target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match="rank: the adapter has 64"):
        CheckpointEngineManager(wide, own).sync_weights(merge_and_sync=False, adapter_name="wide")
    assert numbers(sample(own)) == before
    train(model)
    for number in (1, 5):
        with pytest.raises(ConnectionError):
            CheckpointEngineManager(Breaks(model, number), own, bucket_size_mb=BUCKET_MB).sync_weights()
        for refused in (lambda: sample(own), lambda: sample(own, use_base_model=True)):
            with pytest.raises(UserError, match=r"sync_weights failed \(ConnectionError: the network is gone\)"):
                refused()
    with pytest.raises(UserError, match="no complete weights"):
        own.receive_weights(A, wide.get_state_dict(adapter_name=A), wide.get_peft_config_dict(adapter_name=A))
    CheckpointEngineManager(model, own).sync_weights()
    assert max(errors(model, own)) < BOUND


def test_a_worker_of_vllms_that_fails(own: vLLMSampler, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = full(model_dir)
    workers = own.engine._engine.call_workers
    calls: list[str] = []

    def broken(method: str, *args: object) -> None:
        calls.append(method)
        workers(method, *(["/nowhere"] if len(calls) == 4 else args))

    with monkeypatch.context() as patch:
        patch.setattr(own.engine._engine, "call_workers", broken)
        with pytest.raises(TwinkleServerError, match="vLLM failed"):
            CheckpointEngineManager(model, own, bucket_size_mb=BUCKET_MB).sync_weights()
    with pytest.raises(UserError, match="no complete weights"):
        sample(own)
    CheckpointEngineManager(model, own, bucket_size_mb=BUCKET_MB).sync_weights()
    assert max(errors(model, own)) < BOUND
    assert [path.name for path in own.engine._files.root.iterdir()] == []


def test_weights_of_another_model(own: vLLMSampler, tmp_path: Path) -> None:
    other = TransformersModel(model_id=str(write_model(tmp_path / "other", tied=False)), mixed_precision="no")
    before = numbers(sample(own))
    with pytest.raises(InvalidInputError, match=r"the sampler's model; only one of the two has lm_head\.weight"):
        CheckpointEngineManager(other, own).sync_weights()
    assert numbers(sample(own)) == before


def test_caches_and_sleep(own: vLLMSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(twinkle.get_logger(), "warning", lines.append)
    before = numbers(sample(own))
    own.reset_mm_cache()
    own.reset_encoder_cache()
    assert cached(own) > 0
    own.reset_prefix_cache()
    assert cached(own) == 0
    own.sleep()
    own.wake_up()
    assert [line.partition(" does nothing")[0] for line in lines] == ["vLLMSampler.sleep", "vLLMSampler.wake_up"]
    assert "enable_sleep_mode" in lines[0]
    for wrong in (lambda: own.sleep(3), lambda: own.wake_up(["scheduling"])):
        with pytest.raises(InvalidInputError):
            wrong()
    assert numbers(sample(own)) == before


def cached(own: vLLMSampler) -> int:
    """Return how many tokens of the prompt are found in vLLM's cache."""
    from tests.sampler.vllm.vllm_model import request, run

    one = request("r", None, np.array(PROMPT["input_ids"]), max_tokens=1)
    return run(own.engine, [one])["r"].cached_prompt_tokens
