"""Images and captured passes: the same as plain passes, with fused layers and with the model's own.

On CUDA the graphs are captured. Without it, one test runs the captured work pass by pass in Triton's interpreter, if
Triton is installed and TRITON_INTERPRET=1.
"""

import dataclasses
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.models.reference import with_random_weights
from tests.support.models.sampling import assert_same_samples, prompt, request, run, toy_tokenizer
from tests.support.models.seeing_models import IMAGE, WIDE, processing_of, seeing_datum, seeing_model, wide_seeing_model
from twinkle.model import LoraSpec, Trainer, adopt_model
from twinkle.sampler import TorchSampler
from twinkle.sampler.torch_sampler.decode_graphs import DecodeGraphs
from twinkle.sampler.torch_sampler.model_pass import ModelPass
from twinkle.sampler.torch_sampler.prompts.graphs import PromptGraphs

pytestmark = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1, no CUDA"
)

BOUND = 0.05  # as in test_decode_graphs.py


@needs_interpreter
@pytest.mark.parametrize("fused", [True, False], ids=["fused layers", "the model's own layers"])
def test_the_captured_work_gives_the_same_samples(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text behind an image is a piece of its own; it runs in the captured prompt pass, at its shifted position."""

    @torch.no_grad()
    def uncaptured(self: DecodeGraphs | PromptGraphs, size: object, lora: bool, *_pool: object) -> SimpleNamespace:
        self._pass(size, lora)
        return SimpleNamespace(replay=lambda: self._pass(size, lora), pool=lambda: None)

    for graphs in (DecodeGraphs, PromptGraphs):
        monkeypatch.setattr(graphs, "_capture", uncaptured)
    model = wide_seeing_model("qwen3_vl")
    trainer = Trainer(adopt_model(model), model_id="tiny", processing=processing_of(model), max_tokens_per_batch=16)
    seen, plain = (TorchSampler(trainer, toy_tokenizer(), max_sequences=2) for _ in range(2))
    datum = seeing_datum(model, [(96, 96)], 1, text=7)  # nine tokens in three positions, then seven of text
    asked = [
        dataclasses.replace(request("image", None, datum.tokens, max_tokens=4, seed=1), images=datum.images),
        request("text", None, prompt(5) % IMAGE, max_tokens=4, seed=2),
    ]
    expected = run(plain, asked)
    engine, cache = trainer.engine, seen._cache
    seen._graphs = DecodeGraphs(engine, cache, 2, 64, seen._versions, fuse=fused)
    assert seen._graphs.fused is fused
    seen._prompts = PromptGraphs(engine, cache, 16, seen._versions)
    seen._pass = ModelPass(engine, cache, seen._graphs, seen._prompts)
    spans = []
    planned = seen._prompts.plan
    monkeypatch.setattr(seen._prompts, "plan", lambda given, *rest: spans.extend(given) or planned(given, *rest))
    for name, result in run(seen, asked).items():
        assert_same_samples(result, expected[name])
    assert {span.shift for span in spans} == {0, -6}


@needs_cuda
@pytest.mark.parametrize("fused", [True, False], ids=["fused layers", "the model's own layers"])
@pytest.mark.parametrize("family", WIDE)
def test_captured_passes_give_what_plain_ones_give(family: str, fused: bool) -> None:
    """Prompts with images run plainly; text beside them, text behind them and all decoding is captured."""
    model = (wide_seeing_model if fused else seeing_model)(family).to("cuda", torch.bfloat16)
    trainer = Trainer(adopt_model(model), model_id="tiny", processing=processing_of(model), max_tokens_per_batch=64)
    trainer.create_adapter("a", LoraSpec(8, seed=1))
    trainer.restore("a", with_random_weights(trainer, "a", 1, size=0.02))
    captured, plain = (TorchSampler(trainer, toy_tokenizer(), max_sequences=24) for _ in range(2))
    for sampler in (captured, plain):
        sampler.publish("a", "a")
    assert captured._graphs is not None
    assert captured._graphs.fused is fused
    assert captured._prompts is not None
    plain._graphs = plain._prompts = None
    plain._pass = ModelPass(trainer.engine, plain._cache, None)
    data = [seeing_datum(model, [(100, 70)] * (number % 3), number, text=5 + 20 * (number % 4)) for number in range(12)]
    asked = [
        dataclasses.replace(
            request(f"r{number}", ("a", None)[number % 2], datum.tokens, 2, max_tokens=30, seed=number),
            images=datum.images,
            prompt_logprobs=True,
        )
        for number, datum in enumerate(data)
    ]
    asked.append(request("text", "a", prompt(40) % IMAGE, max_tokens=30, temperature=0.0))
    asked.append(
        dataclasses.replace(
            request("penalties", "a", data[1].tokens, max_tokens=20, seed=3, repetition_penalty=1.2),
            images=data[1].images,
        )
    )
    ours, theirs = run(captured, asked), run(plain, asked)
    compared = drawn = 0
    for name, result in ours.items():
        if result.prompt_logprobs is not None:
            np.testing.assert_allclose(result.prompt_logprobs[1:], theirs[name].prompt_logprobs[1:], atol=BOUND)
        for left, right in zip(result.sequences, theirs[name].sequences, strict=True):
            unequal = np.flatnonzero(left.tokens != right.tokens)
            same = int(unequal[0]) if len(unequal) else len(left.tokens)
            compared, drawn = compared + same, drawn + len(left.tokens)
            np.testing.assert_allclose(left.logprobs[:same], right.logprobs[:same], atol=BOUND)
    assert compared >= 0.2 * drawn  # behind the first token for which two likelihoods are too close, all may differ
