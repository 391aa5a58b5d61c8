"""What a request can ask for besides tokens, for the prompt and for each sampled position, compared with formulas."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.models.reference import (
    TOLERANCE,
    ExactLogprobs,
    assert_numbers_close,
    assert_within,
    exact_logprobs,
    toy_llama,
    wide_llama,
)
from tests.support.models.sampling import (
    SPECS,
    assert_likeliest,
    next_logprobs,
    prompt,
    reference,
    request,
    run,
    toy_sampler,
    toy_trainer,
)
from tests.support.models.tiny_models import VOCAB, add_trained_adapter, tiny_model, tiny_trainer
from twinkle.sampler import SampleRequest, SampleResult, SamplingParams, TopLogprobs, TorchSampler
from twinkle.sampler.noise import alternative_uniforms, uniform, words
from twinkle.sampler.torch_sampler.drawing import pick

LENGTH = 70  # longer than a chunk
VERSIONS = (None, "a", "b")


@pytest.fixture(scope="module", params=["llama", "qwen3_5", "lfm2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model with a cache, one with a cache and states, and one without."""
    return toy_llama() if request.param == "llama" else tiny_model(request.param)


Exact = Callable[[SampleRequest], ExactLogprobs]  # of a request's prompt, for the request's version
World = tuple[TorchSampler, Exact]


@pytest.fixture(scope="module")
def world(model: PreTrainedModel) -> World:
    """A sampler, and a function that computes a request's exact numbers with the plain model."""
    trainer = tiny_trainer(model)
    for name in ("a", "b"):
        add_trained_adapter(trainer, name, SPECS[name], model)
    sampler = toy_sampler(trainer)
    assert (sampler._cache is None) == (type(model).__name__ == "Lfm2ForCausalLM")

    @cache
    def exact(version: str | None, length: int) -> ExactLogprobs:
        plain = model if version is None else reference(model, trainer, version)
        return exact_logprobs(plain, prompt(length, length))

    return sampler, lambda asked: exact(asked.version_id, len(asked.prompt))


def score(version: str | None, length: int = LENGTH, **options: object) -> SampleRequest:
    params = SamplingParams(max_tokens=1, seed=7)
    return SampleRequest(f"{version}{length}", version, prompt(length, length), params, **options)


def targets_for(tokens: np.ndarray, width: int = 3) -> np.ndarray:
    """Return random targets for each position, some missing (−1), with the prompt's own token among them."""
    ids = np.random.default_rng(len(tokens)).integers(-1, VOCAB, (len(tokens) - 1, width))
    ids[:, 1] = tokens[1:]
    ids[::3, 0] = -1
    return ids


def everything(version: str | None, length: int = LENGTH, **options: object) -> SampleRequest:
    asked = score(version, length, prompt_logprobs=True, topk_prompt_logprobs=4, prompt_alt_tokens=5, **options)
    return replace(asked, target_prompt_logprobs=targets_for(asked.prompt))


def assert_right(asked: SampleRequest, result: SampleResult, exact: ExactLogprobs, first: int = 1) -> None:
    """Check everything that :func:`everything` asks for. first: the position where the last n tokens begin."""
    assert_prompt_logprobs(asked, result, exact, first)
    assert_topk(asked, result, exact, first)
    assert_targets(asked, result, exact)
    assert_alternatives(asked, result, exact)


def assert_prompt_logprobs(asked: SampleRequest, result: SampleResult, exact: ExactLogprobs, first: int = 1) -> None:
    assert result.prompt_logprobs.shape == asked.prompt.shape
    assert np.isnan(result.prompt_logprobs[:first]).all()
    values, bounds = exact.rows(slice(first - 1, -1)).at(asked.prompt[first:, None])
    assert_within(result.prompt_logprobs[first:, None], values, bounds)


def assert_topk(asked: SampleRequest, result: SampleResult, exact: ExactLogprobs, first: int = 1) -> None:
    top = result.topk_prompt_logprobs
    assert top.token_ids.shape == top.logprobs.shape == (len(asked.prompt), 4)
    assert (top.token_ids[:first] == 0).all()
    assert (top.logprobs[:first] == -np.inf).all()
    assert_likeliest(TopLogprobs(top.token_ids[first:], top.logprobs[first:]), exact.rows(slice(first - 1, -1)))


def assert_targets(asked: SampleRequest, result: SampleResult, exact: ExactLogprobs) -> None:
    ids = asked.target_prompt_logprobs
    assert result.target_prompt_logprobs.shape == ids.shape
    values, bounds = exact.rows(slice(-1)).at(np.maximum(ids, 0))
    assert_within(result.target_prompt_logprobs, np.where(ids < 0, 0, values), bounds)


def assert_alternatives(asked: SampleRequest, result: SampleResult, exact: ExactLogprobs) -> None:
    """Check the drawn tokens with the inverse of the distribution: each token owns a part of [0, 1), up to rounding.

    The ends of a part move by no more than the log-probabilities do, and adding V numbers in fp32 rounds V times.
    """
    drawn = result.prompt_alt_tokens
    assert drawn.tokens.shape == drawn.logprobs.shape == (len(asked.prompt) - 1, 5)
    rows = exact.rows(slice(-1))
    assert_within(drawn.logprobs, *rows.at(drawn.tokens))
    temperature = asked.params.temperature
    ends_TV = np.exp(rows.values_TV / temperature).cumsum(axis=1)
    ends_TV = np.pad(ends_TV / ends_TV[:, -1:], ((0, 0), (1, 0)))
    slack_T1 = rows.bound_TV.max(axis=1, keepdims=True) / temperature + VOCAB * 2.0**-24
    noise_TK = np.stack([alternative_uniforms(7, words(row + 1), words(*range(5))) for row in range(len(ends_TV))])
    assert (np.take_along_axis(ends_TV, drawn.tokens, axis=1) <= noise_TK + slack_T1).all()
    assert (np.take_along_axis(ends_TV, drawn.tokens + 1, axis=1) >= noise_TK - slack_T1).all()


# --- options for the prompt -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last_n", [None, 0, 1, 10, LENGTH - 1, 1000])
def test_all_that_can_be_asked_of_a_prompt(world: World, last_n: int | None) -> None:
    """All versions in one batch, next to prompts of another length with fewer options."""
    sampler, exact = world
    requests = [everything(version, prompt_logprobs_last_n=last_n) for version in VERSIONS]
    others = [score(version, 33, prompt_logprobs=True) for version in VERSIONS]
    results = run(sampler, [*requests, *others])
    first = 1 if last_n is None else max(1, LENGTH - last_n)
    for asked in requests:
        assert_right(asked, results[asked.request_id], exact(asked), first)
    for asked in others:
        result = results[asked.request_id]
        assert_prompt_logprobs(asked, result, exact(asked))
        assert result.topk_prompt_logprobs is result.target_prompt_logprobs is result.prompt_alt_tokens is None


def test_one_thing_at_a_time(world: World) -> None:
    """Each option alone gives the same result as with the others, in one batch and next to a prompt of one token."""
    sampler, exact = world
    asked = everything("a")
    checks = {
        "prompt_logprobs": assert_prompt_logprobs,
        "topk_prompt_logprobs": assert_topk,
        "target_prompt_logprobs": assert_targets,
        "prompt_alt_tokens": assert_alternatives,
    }
    nothing = {"topk_prompt_logprobs": 0, "prompt_alt_tokens": 0, "target_prompt_logprobs": None}
    bare = replace(asked, prompt_logprobs=False, **nothing)
    alone = [replace(bare, request_id=name, **{name: getattr(asked, name)}) for name in checks]
    short = everything("b", 1)
    results = run(sampler, [short, *alone])
    for name, assert_this in checks.items():
        for other in checks:
            assert (getattr(results[name], other) is None) == (other != name)
        assert_this(asked, results[name], exact(asked))
    one = results[short.request_id]
    assert one.prompt_logprobs.shape == (1,)
    assert one.topk_prompt_logprobs.token_ids.shape == (1, 4)
    assert one.target_prompt_logprobs.shape == (0, 3)
    assert one.prompt_alt_tokens.tokens.shape == (0, 5)


def test_the_head_is_computed_for_what_is_scored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, _ = world
    head, rows = sampler._pass._engine.head, []
    plain_logprobs, plain_logits = head.logprobs, head.logits

    def logprobs(hidden: torch.Tensor, *rest: object) -> torch.Tensor:
        rows.append(len(hidden))
        return plain_logprobs(hidden, *rest)

    def logits(hidden: torch.Tensor, *rest: object) -> object:
        rows.append(len(hidden))
        return plain_logits(hidden, *rest)

    monkeypatch.setattr(head, "logprobs", logprobs)
    monkeypatch.setattr(head, "logits", logits)
    none = np.full((LENGTH - 1, 2), -1)
    some = none.copy()
    some[LENGTH - 6 :, 0] = 9
    for options, expected in (
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 7}, 7),
        ({"topk_prompt_logprobs": 3, "prompt_logprobs_last_n": 7}, 7),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, 0),
        ({"prompt_logprobs_last_n": 7}, 0),
        ({"target_prompt_logprobs": some}, 5),
        ({"target_prompt_logprobs": none}, 0),
        ({}, 0),
    ):
        rows.clear()
        run(sampler, [score("a", **options)])
        assert sum(rows) == expected + 1, options  # plus the row to draw from


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_alternatives_come_as_often_as_they_should(temperature: float) -> None:
    """They follow the tempered distribution, whatever else limits the samples."""
    base = toy_llama()
    sampler = toy_sampler(toy_trainer({}, base))
    tokens = prompt(5)
    plain = np.exp(next_logprobs(base, tokens).astype(np.float64) / temperature)
    plain /= plain.sum(axis=1, keepdims=True)
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(4):
        params = SamplingParams(max_tokens=1, seed=seed, temperature=temperature, top_k=2)
        drawn = run(sampler, [SampleRequest("x", None, tokens, params, prompt_alt_tokens=1024)])["x"].prompt_alt_tokens
        counts.update((row, token) for row, each in enumerate(drawn.tokens.tolist()) for token in each)
    for row in range(4):
        observed = np.array([counts[row, token] for token in range(VOCAB)])
        expected = plain[row] * 4096
        often = expected >= 5
        observed = np.append(observed[often], observed[~often].sum())
        expected = np.append(expected[often], expected[~often].sum())
        freedom = len(expected) - 1
        assert ((observed - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom)


def test_alternatives_are_a_function_of_the_seed() -> None:
    sampler = toy_sampler(toy_trainer())

    def drawn(seed: int, count: int, **options: object) -> np.ndarray:
        params = SamplingParams(max_tokens=1, seed=seed)
        asked = SampleRequest("x", "a", prompt(40), params, prompt_alt_tokens=count, **options)
        return run(sampler, [asked])["x"].prompt_alt_tokens.tokens

    few, many = drawn(1, 3), drawn(1, 8)
    np.testing.assert_array_equal(few, many[:, :3])
    np.testing.assert_array_equal(many, drawn(1, 8, num_samples=4, topk_prompt_logprobs=2))
    assert (many != drawn(2, 8)).any(axis=1).all()
    assert (many[:, :1] != many[:, 1:]).any()


def test_alternatives_at_temperature_0_are_the_likeliest() -> None:
    base = toy_llama()
    params = SamplingParams(max_tokens=1, temperature=0.0)
    asked = SampleRequest("x", None, prompt(6), params, prompt_alt_tokens=3)
    drawn = run(toy_sampler(toy_trainer({}, base)), [asked])["x"].prompt_alt_tokens
    likeliest = next_logprobs(base, prompt(6))[:-1].argmax(axis=1)
    np.testing.assert_array_equal(drawn.tokens, np.repeat(likeliest[:, None], 3, axis=1))


def test_noise_of_alternatives_is_their_own() -> None:
    keys = [(seed, draw, place) for seed in (-1, 0, 1) for draw in (0, 1) for place in (0, 1)]
    values = {float(alternative_uniforms(seed, words(place), words(draw))[0]) for seed, draw, place in keys}
    assert len(values) == len(keys)
    assert not values & {uniform(*key) for key in keys}


# --- options for sampled positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 2.5])
def test_the_likeliest_at_each_sampled_position(temperature: float) -> None:
    """They come from the tempered distribution over the whole vocabulary.

    For greedy samples it is the untempered one.
    """
    base = wide_llama()
    trainer = toy_trainer({"a": SPECS["a"]}, base)
    sampler = toy_sampler(trainer)
    tokens = prompt(9)
    how = {"max_tokens": 12, "temperature": temperature, "top_k": 3, "top_p": 0.9, "seed": 4}
    asked = replace(request("x", "a", tokens, 3, **how), topk_sample_logprobs=6)
    beside = [request("y", None, tokens, 2, max_tokens=12), replace(asked, request_id="z", topk_sample_logprobs=2)]
    results = run(sampler, [asked, *beside])
    assert all(sequence.topk_logprobs is None for sequence in results["y"].sequences)
    for sequence, narrow in zip(results["x"].sequences, results["z"].sequences, strict=True):
        whole = np.concatenate([tokens, sequence.tokens[:-1]])
        raw = next_logprobs(reference(base, trainer, "a"), whole)[len(tokens) - 1 :]
        tempered = torch.from_numpy(raw / (temperature or 1)).log_softmax(-1).numpy()
        top = sequence.topk_logprobs
        assert top.token_ids.shape == top.logprobs.shape == (12, 6)
        assert (top.token_ids.dtype, top.logprobs.dtype) == (np.int64, np.float32)
        likeliest = np.argsort(-tempered, axis=1, kind="stable")[:, :6]
        np.testing.assert_array_equal(top.token_ids, likeliest)
        tolerance = TOLERANCE / min(temperature or 1, 1)
        assert_numbers_close(top.logprobs, np.take_along_axis(tempered, likeliest, axis=1), tolerance)
        for position, token in enumerate(sequence.tokens):  # drawn from the three likeliest
            (place,) = np.flatnonzero(top.token_ids[position] == token)
            assert top.logprobs[position, place] == sequence.logprobs[position]
        np.testing.assert_array_equal(narrow.topk_logprobs.token_ids, top.token_ids[:, :2])


def test_differences_of_tempered_logprobs(world: World) -> None:
    """log p_τ(i) − log p_τ(j) = (log p_1(i) − log p_1(j)) / τ."""
    sampler, _ = world
    tokens = prompt(12)
    asked = [
        replace(request(str(t), "a", tokens, max_tokens=1, temperature=t, seed=0), topk_sample_logprobs=VOCAB)
        for t in (1.0, 0.5, 2.0)
    ]
    results = run(sampler, asked)
    logprobs = {}
    for name, result in results.items():
        top = result.sequences[0].topk_logprobs
        logprobs[name] = top.logprobs[0][np.argsort(top.token_ids[0])]
        assert np.exp(logprobs[name].astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
    for temperature in (0.5, 2.0):
        ours, raw = logprobs[str(temperature)], logprobs["1.0"]
        assert_numbers_close(ours - ours[0], (raw - raw[0]) / temperature, 1e-4)


def test_many_alternatives_take_no_more_memory_than_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory depends only on the rows that the head computes at once, not on the number of alternatives."""
    sampler = toy_sampler(toy_trainer({}))
    head, drawn = sampler._trainer.engine.head, []

    def watched(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        drawn.append(uniform.shape)
        return pick(weights, uniform)

    monkeypatch.setattr("twinkle.sampler.torch_sampler.scoring.pick", watched)
    monkeypatch.setattr(head, "chunk_rows", 4096)
    run(sampler, [score(None, prompt_alt_tokens=1024)])
    assert sum(rows for rows, _ in drawn) == LENGTH - 1
    assert max(rows * draws for rows, draws in drawn) * 256 <= 4096 * VOCAB
