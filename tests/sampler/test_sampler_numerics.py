"""The sampler computes the same as Transformers with PEFT, and the same as the trainer."""

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.models.reference import TOLERANCE, assert_numbers_close, wide_llama
from tests.support.models.sampling import (
    SPECS,
    blocks,
    next_logprobs,
    prompt,
    reference,
    request,
    run,
    sample,
    toy_sampler,
    toy_tokenizer,
    toy_trainer,
)
from tests.support.models.tiny_models import EXPERT_FAMILIES, FAMILIES, add_trained_adapter, tiny_model, tiny_trainer
from tests.support.thorough import by_default
from twinkle.model import Datum, LoraSpec, Trainer, TrainItem, TrainResult
from twinkle.sampler import SampleRequest, SamplingParams, TorchSampler

LENGTHS = (5, 13, 70)  # below and above windows, blocks, chunks, and the length where longrope switches
NEW = 12


def generate(model: PreTrainedModel, tokens: np.ndarray, count: int) -> list[int]:
    """Generate with the plain model.

    Without a cache if positions depend on the length: up to 5.19, Phi-3's cache loses the prompt at the switch.
    """
    ids = torch.from_numpy(tokens)[None]
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=0,
        use_cache=model.config.model_type != "phi3",
    )
    return out[0, len(tokens) :].tolist()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "family", by_default("llama", "qwen2-sliding", "gemma3", "phi3-longrope", "gpt_oss", "qwen3_5", of=FAMILIES)
)
def test_greedy_is_what_transformers_generates(family: str) -> None:
    """All lengths, the base model and two versions in one batch, including end tokens."""
    model = tiny_model(family)
    trainer = tiny_trainer(model)
    specs = {"a": LoraSpec(rank=4, seed=1, train_mlp=family not in EXPERT_FAMILIES), "b": SPECS["b"]}
    for adapter_id, spec in specs.items():
        add_trained_adapter(trainer, adapter_id, spec, model)
    sampler = toy_sampler(trainer)
    plain = {None: model, **{name: reference(model, trainer, name) for name in specs}}
    cases = {(name, length): prompt(length, seed=length) for name in plain for length in LENGTHS}
    requests = [
        SampleRequest(str(case), case[0], tokens, SamplingParams(max_tokens=NEW, temperature=0))
        for case, tokens in cases.items()
    ]
    results = run(sampler, requests)
    for case, tokens in cases.items():
        (sequence,) = results[str(case)].sequences
        assert sequence.tokens.tolist() == generate(plain[case[0]], tokens, NEW), case
        whole = np.concatenate([tokens, sequence.tokens])
        if family != "phi3-longrope":  # the plain pass below encodes positions by the total length
            expected = next_logprobs(plain[case[0]], whole[:-1])[len(tokens) - 1 :]
            picked = expected[np.arange(len(sequence.tokens)), sequence.tokens]
            assert_numbers_close(sequence.logprobs, picked)


def test_a_wide_model_too() -> None:
    model = wide_llama()
    trainer = toy_trainer(SPECS, model)
    sampler = toy_sampler(trainer)
    tokens = prompt(30)
    results = run(sampler, [request(name, name, tokens, max_tokens=20, temperature=0) for name in SPECS])
    for name in SPECS:
        plain = reference(model, trainer, name)
        (sequence,) = results[name].sequences
        assert sequence.tokens.tolist() == generate(plain, tokens, 20)


@pytest.mark.parametrize("length", [1, 2, 17, 64, 65, 100])
def test_prompt_logprobs_are_those_of_the_trainer_and_of_peft(length: int) -> None:
    model = wide_llama()
    trainer = toy_trainer(SPECS, model)
    sampler = toy_sampler(trainer)
    tokens = prompt(length, seed=length)
    params = SamplingParams(max_tokens=1)
    requests = [
        SampleRequest(str(version), version, tokens, params, prompt_logprobs=True, topk_prompt_logprobs=5)
        for version in (None, *SPECS)
    ]
    results = run(sampler, requests)
    for version in (None, *SPECS):
        result = results[str(version)]
        assert result.prompt_logprobs.shape == (length,)
        assert result.prompt_logprobs.dtype == np.float32
        assert np.isnan(result.prompt_logprobs[0])
        plain = next_logprobs(model if version is None else reference(model, trainer, version), tokens)
        theirs = plain[np.arange(length - 1), tokens[1:]]
        assert_numbers_close(result.prompt_logprobs[1:], theirs)
        if version is not None and length > 1:
            ours = trainer_logprobs(trainer, version, tokens)
            assert_numbers_close(result.prompt_logprobs[1:], ours)
        top = result.topk_prompt_logprobs
        assert top.token_ids.shape == top.logprobs.shape == (length, 5)
        assert (top.token_ids[0] == 0).all()
        assert (top.logprobs[0] == -np.inf).all()
        likeliest = np.argsort(-plain[:-1], axis=1, kind="stable")[:, :5]
        np.testing.assert_array_equal(top.token_ids[1:], likeliest)
        expected = np.take_along_axis(plain[:-1], likeliest, axis=1)
        assert_numbers_close(top.logprobs[1:], expected)


def trainer_logprobs(trainer: Trainer, adapter_id: str, tokens: np.ndarray) -> np.ndarray:
    (outcome,) = trainer.forward([TrainItem(adapter_id, [Datum(tokens[:-1], tokens[1:])])])
    assert isinstance(outcome, TrainResult)
    return outcome.logprobs[0]


def test_what_is_not_asked_for_is_absent() -> None:
    sampler = toy_sampler(toy_trainer({}))
    (result,) = run(sampler, [request("x", None, prompt(5), max_tokens=1)]).values()
    assert result.prompt_logprobs is None
    assert result.topk_prompt_logprobs is None


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_logprobs_are_tempered_over_the_whole_vocabulary(temperature: float) -> None:
    """Also for tokens that were drawn from a part of the vocabulary."""
    model = wide_llama()
    trainer = toy_trainer({"a": SPECS["a"]}, model)
    sampler = toy_sampler(trainer)
    tokens = prompt(9)
    how = {"max_tokens": 15, "temperature": temperature, "top_k": 20, "top_p": 0.9, "seed": 4}
    for sequence in sample(sampler, request("x", "a", tokens, num_samples=3, **how)):
        whole = np.concatenate([tokens, sequence.tokens[:-1]])
        plain = next_logprobs(reference(model, trainer, "a"), whole)[len(tokens) - 1 :]
        tempered = torch.from_numpy(plain / temperature).log_softmax(-1).numpy()
        expected = tempered[np.arange(15), sequence.tokens]
        assert_numbers_close(sequence.logprobs, expected, TOLERANCE / min(temperature, 1))


def test_long_prompts_share_passes_with_others() -> None:
    """Prompts longer than a chunk run next to sequences that are already drawing tokens."""
    trainer = toy_trainer()
    sampler = toy_sampler(trainer)
    tokens = {f"{version}{length}": (version, prompt(length, length)) for version in "abc" for length in (3, 64, 110)}
    alone = {
        name: sample(sampler, request(name, version, each, max_tokens=16, temperature=0))[0]
        for name, (version, each) in tokens.items()
    }
    together = run(
        sampler,
        [request(name, version, each, max_tokens=16, temperature=0) for name, (version, each) in tokens.items()],
    )
    for name, sequence in alone.items():
        np.testing.assert_array_equal(sequence.tokens, together[name].sequences[0].tokens)
        assert_numbers_close(sequence.logprobs, together[name].sequences[0].logprobs)


def test_half_precision() -> None:
    model = wide_llama(hidden_size=256, intermediate_size=512).to(torch.bfloat16)  # slow on CPUs without bf16
    trainer = toy_trainer({"a": SPECS["a"]}, model)
    sampler = toy_sampler(trainer)
    tokens = prompt(24)
    asked = SampleRequest("x", "a", tokens, SamplingParams(max_tokens=8, temperature=0), prompt_logprobs=True)
    result = run(sampler, [asked])["x"]
    np.testing.assert_allclose(result.prompt_logprobs[1:], trainer_logprobs(trainer, "a", tokens), atol=0.05)
    (sequence,) = result.sequences
    whole = np.concatenate([tokens, sequence.tokens])
    ours = trainer_logprobs(trainer, "a", whole)[len(tokens) - 1 :]
    np.testing.assert_allclose(sequence.logprobs, ours, atol=0.05)


def test_a_cache_of_a_few_blocks_gives_the_same() -> None:
    """Preempted sequences compute their tokens again."""
    trainer = toy_trainer()
    large = toy_sampler(trainer)
    requests = [
        request(f"{version}{n}", version, prompt(10 + n, n), num_samples=3, max_tokens=30, seed=n)
        for version in "abc"
        for n in range(3)
    ]
    expected = run(large, requests)
    small = TorchSampler(trainer, toy_tokenizer(), kv_budget_bytes=blocks(large, 7))
    for version in "abc":
        small.publish(version, version)
    preempted = []
    preempt = small._schedule._preempt
    small._schedule._preempt = lambda sequence: (preempted.append(sequence), preempt(sequence))
    results = run(small, requests)
    assert preempted
    for name, result in expected.items():
        for left, right in zip(results[name].sequences, result.sequences, strict=True):
            np.testing.assert_array_equal(left.tokens, right.tokens)
            assert_numbers_close(left.logprobs, right.logprobs)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "phi3-longrope", "qwen2-sliding"])
def test_samples_of_one_prompt_while_others_come_and_go(family: str) -> None:
    """Without a cache, across the switch of longrope, and beyond a window; with room for two samples, then for one."""
    model = tiny_model(family)
    trainer = tiny_trainer(model)
    add_trained_adapter(trainer, "a", SPECS["b"], model)
    large = toy_sampler(trainer)
    options = {} if large._cache is None else {"kv_budget_bytes": blocks(large, 4)}
    sampler = toy_sampler(trainer, max_sequences=2, **options)
    asked = {f"{version}{length}": (version, prompt(length)) for version in ("a", None) for length in (4, 14, 30)}
    results = run(
        sampler,
        [request(name, version, each, 3, max_tokens=20, temperature=0) for name, (version, each) in asked.items()],
    )
    model.generation_config.eos_token_id = None
    for name, (version, tokens) in asked.items():
        plain = reference(model, trainer, version) if version else model
        expected = generate(plain, tokens, 20)
        assert [sequence.tokens.tolist() for sequence in results[name].sequences] == [expected] * 3
