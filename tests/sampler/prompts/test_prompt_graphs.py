"""Captured prompt passes, compared with plain passes of the same model.

On CUDA the graphs are captured. Without it, two tests run the captured work pass by pass in Triton's interpreter, if
Triton is installed and TRITON_INTERPRET=1.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tests.support.models.reference import wide_llama
from tests.support.models.sampling import prompt, request, run, toy_sampler, toy_tokenizer, toy_trainer
from tests.support.models.tiny_models import tiny_model, tiny_trainer
from twinkle.model import LoraSpec, Trainer
from twinkle.sampler import SampleFailure, SampleRequest, TorchSampler
from twinkle.sampler.torch_sampler.model_pass import ModelPass
from twinkle.sampler.torch_sampler.prompts import graphs, tables

pytestmark = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1, no CUDA"
)

# Two bf16 computations of a log-probability in these models may differ by this much.
BOUND = 0.05
SPECS = {
    "a": LoraSpec(rank=8, seed=1),
    "b": LoraSpec(rank=24, seed=2, train_mlp=False, train_unembed=True),
    "c": LoraSpec(rank=128, seed=3),
    "too wide": LoraSpec(rank=200, seed=4),
}


@dataclass(frozen=True)
class Uncaptured:
    """Computes a pass anew instead of replaying a graph."""

    replay: Callable[[], None]


def uncaptured(sampler: TorchSampler, monkeypatch: pytest.MonkeyPatch) -> graphs.PromptGraphs:
    """Give the sampler prompt graphs that compute on the CPU, with few and small tiles."""

    def capture(self: graphs.PromptGraphs, bucket: tables.Bucket, lora: bool) -> Uncaptured:
        if self._hidden_TH is None:
            self._pass(bucket, lora)
        return Uncaptured(lambda: self._pass(bucket, lora))

    monkeypatch.setattr(tables, "MOST_SPANS", 5)
    monkeypatch.setattr(tables, "MOST_VERSIONS", 3)
    monkeypatch.setattr(graphs.PromptGraphs, "_capture", capture)
    trainer = sampler._trainer
    prompts = graphs.PromptGraphs(trainer.engine, sampler._cache, 64, sampler._versions)
    sampler._prompts = prompts
    sampler._pass = ModelPass(trainer.engine, sampler._cache, None, prompts)
    return prompts


@needs_interpreter
def test_the_captured_work_gives_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of several pieces, draws with penalties, versions of all kinds, and prefixes found in the cache."""
    trainer = toy_trainer()
    sampler = toy_sampler(trainer)
    requests = [
        request("long", "a", prompt(90, 1), max_tokens=2, seed=1),
        request("penalised", "b", prompt(20, 2), 2, max_tokens=2, seed=2, presence_penalty=1.0),
        request("base", None, prompt(7, 3), max_tokens=2, seed=3),
        replace(request("scored", "b", prompt(20, 2), max_tokens=1, seed=4), prompt_logprobs=True),
    ]
    expected = run(toy_sampler(trainer), requests)
    prompts = uncaptured(sampler, monkeypatch)
    buckets = []
    monkeypatch.setattr(
        prompts, "run", lambda plan, tokens: buckets.append(plan) or type(prompts).run(prompts, plan, tokens)
    )
    for name, result in run(sampler, requests).items():
        for left, right in zip(result.sequences, expected[name].sequences, strict=True):
            np.testing.assert_array_equal(left.tokens, right.tokens)
            np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-4)
        if expected[name].prompt_logprobs is not None:
            np.testing.assert_allclose(result.prompt_logprobs, expected[name].prompt_logprobs, atol=1e-4)
    assert len(buckets) > 2
    assert any(len(plan.versions) > 1 for plan in buckets)


@needs_interpreter
@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_windows_and_capped_scores(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(tiny_model(family))
    requests = [request("x", None, prompt(40, 1), max_tokens=1, temperature=0.0)]
    expected = run(TorchSampler(trainer, toy_tokenizer()), requests)
    sampler = TorchSampler(trainer, toy_tokenizer())
    uncaptured(sampler, monkeypatch)
    found = run(sampler, requests)
    np.testing.assert_allclose(found["x"].sequences[0].logprobs, expected["x"].sequences[0].logprobs, atol=1e-4)


# --- on CUDA ----------------------------------------------------------------------------------------------------------


def trained() -> Trainer:
    trainer = tiny_trainer(wide_llama(max_position_embeddings=8192).to("cuda", torch.bfloat16))
    generator = np.random.default_rng(0)
    for name, spec in SPECS.items():
        trainer.create_adapter(name, spec)
        snapshot = trainer.snapshot(name)
        noise = generator.normal(0, 0.02, snapshot.weights.shape).astype(np.float32)
        snapshot.weights[:] = np.where(snapshot.weights != 0, snapshot.weights, noise)
        trainer.restore(name, snapshot)
    return trainer


def without_graphs(sampler: TorchSampler) -> TorchSampler:
    sampler._graphs = sampler._prompts = None
    sampler._pass = ModelPass(sampler._trainer.engine, sampler._cache, None)
    return sampler


@pytest.fixture(scope="module")
def pair() -> tuple[TorchSampler, TorchSampler]:
    """Return two samplers: one with captured passes, the other without."""
    trainer = trained()
    captured, plain = (TorchSampler(trainer, toy_tokenizer(), max_sequences=128) for _ in range(2))
    for sampler in (captured, plain):
        for name in trainer.adapter_ids():
            sampler.publish(name, name)
    assert captured._prompts is not None
    return captured, without_graphs(plain)


def mixed(count: int, longest: int, **params: object) -> list[SampleRequest]:
    """Return requests for versions of all ranks and the base model, with prompts of any length."""
    names = [*SPECS, None]
    return [
        request(
            f"r{number}", names[number % 5], prompt(1 + 137 * number % longest, number), **{"seed": number} | params
        )
        for number in range(count)
    ]


def assert_first_tokens_alike(ours: dict, theirs: dict) -> None:
    """Check that log-probabilities of equal first tokens agree, and that most first tokens are equal."""
    equal = 0
    for name, result in ours.items():
        for left, right in zip(result.sequences, theirs[name].sequences, strict=True):
            if left.tokens[0] == right.tokens[0]:
                equal += 1
                np.testing.assert_allclose(left.logprobs[:1], right.logprobs[:1], atol=BOUND)
    assert equal >= 0.9 * len(ours) - 1


@needs_cuda
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("count", "longest"), [(1, 256), (2, 3), (16, 256), (100, 64), (20, 3000)])
def test_graphs_give_what_plain_passes_give(
    pair: tuple[TorchSampler, TorchSampler], count: int, longest: int, temperature: float
) -> None:
    captured, plain = pair
    captured.reset_prefix_cache()
    plain.reset_prefix_cache()
    requests = mixed(count, longest, max_tokens=1, temperature=temperature)
    assert_first_tokens_alike(run(captured, requests), run(plain, requests))


@needs_cuda
def test_log_probabilities_are_the_trainers(pair: tuple[TorchSampler, TorchSampler]) -> None:
    from twinkle.model import Datum, TrainItem

    captured, _ = pair
    captured.reset_prefix_cache()
    requests = [replace(each, prompt_logprobs=True) for each in mixed(10, 700, max_tokens=1)]
    for name, result in run(captured, requests).items():
        asked = next(each for each in requests if each.request_id == name)
        if asked.version_id is None or len(asked.prompt) < 2:
            continue
        (scored,) = captured._trainer.forward(
            [TrainItem(asked.version_id, [Datum(asked.prompt[:-1], asked.prompt[1:])])]
        )
        np.testing.assert_allclose(result.prompt_logprobs[1:], scored.logprobs[0], atol=2 * BOUND)


@needs_cuda
def test_the_same_pass_gives_the_same_bits(pair: tuple[TorchSampler, TorchSampler]) -> None:
    captured, _ = pair
    results = []
    for _ in range(2):
        captured.reset_prefix_cache()
        results.append(run(captured, mixed(12, 300, max_tokens=1)))
    for name, result in results[0].items():
        np.testing.assert_array_equal(result.sequences[0].tokens, results[1][name].sequences[0].tokens)
        np.testing.assert_array_equal(result.sequences[0].logprobs, results[1][name].sequences[0].logprobs)


@needs_cuda
def test_continued_prompts_and_found_prefixes(pair: tuple[TorchSampler, TorchSampler]) -> None:
    """A prompt of several passes, and prompts that begin as an earlier one."""
    captured, plain = pair
    long = prompt(6000, 1)
    requests = [request(f"r{stop}", "a", long[:stop], max_tokens=1, temperature=0.0) for stop in (6000, 5000, 4097, 33)]
    for sampler in (captured, plain):
        sampler.reset_prefix_cache()
    for each in requests:
        assert_first_tokens_alike(run(captured, [each]), run(plain, [each]))
    assert run(captured, requests[:1])["r6000"].cached_prompt_tokens > 5000


@needs_cuda
def test_a_version_of_nan_fails_alone() -> None:
    trainer = trained()
    snapshot = trainer.snapshot("c")
    snapshot.weights[:] = np.nan
    trainer.restore("c", snapshot)
    sampler = toy_sampler(trainer)
    assert sampler._prompts is not None
    for each in mixed(20, 200, max_tokens=1):
        sampler.submit(each)
    outcomes = {}
    while sampler.busy:
        outcomes |= {event.request_id: event.outcome for event in sampler.step()}
    for each in mixed(20, 200):
        assert isinstance(outcomes[each.request_id], SampleFailure) is (each.version_id == "c")


@needs_cuda
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen2", "qwen3", "mistral"])
def test_families(family: str) -> None:
    trainer = tiny_trainer(tiny_model(family).to("cuda", torch.bfloat16))
    captured, plain = TorchSampler(trainer, toy_tokenizer()), without_graphs(TorchSampler(trainer, toy_tokenizer()))
    assert captured._prompts is not None
    requests = [request(f"r{n}", None, prompt(3 + 9 * n, n), max_tokens=1, temperature=0.0) for n in range(10)]
    assert_first_tokens_alike(run(captured, requests), run(plain, requests))


@needs_cuda
def test_graphs_are_captured_again_with_the_cache() -> None:
    sampler = toy_sampler(trained())
    requests = mixed(6, 100, max_tokens=3, temperature=0.0)
    before = run(sampler, requests)
    sampler.free_cache()
    sampler.restore_cache()
    assert sampler._prompts is not None
    assert_first_tokens_alike(run(sampler, requests), before)
