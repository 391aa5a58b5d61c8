"""Which tokens are drawn: with the right probabilities, and the same ones for the same seed in any batch."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from tests.support.models.reference import toy_llama
from tests.support.models.sampling import SPECS, prompt, request, run, sample, toy_sampler, toy_trainer
from twinkle.sampler import SampleRequest, TorchSampler
from twinkle.sampler.noise import uniform
from twinkle.sampler.torch_sampler.drawing import Draw, Penalties, collect, draw_tokens


@pytest.fixture(scope="module")
def sampler() -> TorchSampler:
    return toy_sampler(toy_trainer())


# --- noise ------------------------------------------------------------------------------------------------------------


def test_noise_is_a_function_of_seed_sample_and_position() -> None:
    keys = [(seed, sample, place) for seed in (-(2**63), -1, 0, 1, 2**62) for sample in (0, 1) for place in (0, 1)]
    values = [uniform(*key) for key in keys]
    assert values == [uniform(*key) for key in keys]
    assert len(set(values)) == len(values)
    assert uniform(7, 0, 0) == pytest.approx(0.3985666390807179)  # must be the same in every release


def test_noise_is_uniform() -> None:
    values = np.array([uniform(1, sample, place) for sample in range(100) for place in range(100)])
    assert 0 < values.min() < values.max() < 1
    counts, _ = np.histogram(values, bins=50, range=(0, 1))
    assert chi_square(counts, np.full(50, len(values) / 50)) < bound(49)


# --- distribution -----------------------------------------------------------------------------------------------------


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def bound(freedom: int) -> float:
    """Return five standard deviations above the mean of the chi-square distribution."""
    return freedom + 5 * math.sqrt(2 * freedom)


def truncated(probabilities: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Truncate in the plain way.

    Take the k likeliest tokens and renormalise; then the fewest of them that reach p, and renormalise.
    """
    order = np.argsort(-probabilities, kind="stable")
    kept = order[:top_k] if top_k > 0 else order
    share = probabilities[kept] / probabilities[kept].sum()
    kept = kept[: int(np.searchsorted(np.cumsum(share), top_p)) + 1]
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, -1, 1.0), (0.6, -1, 1.0), (1.7, 0, 1.0), (1.3, 7, 1.0), (0.8, -1, 0.7), (2.0, 12, 0.8), (1.0, 1000, 1.0)],
)
def test_tokens_come_as_often_as_they_should(
    sampler: TorchSampler, temperature: float, top_k: int, top_p: float
) -> None:
    tokens = prompt(6)
    with torch.no_grad():
        logits = toy_llama()(input_ids=torch.from_numpy(tokens)[None]).logits[0, -1].double()
    expected = truncated((logits / temperature).softmax(-1).numpy(), top_k, top_p)
    how = {"max_tokens": 1, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    counts: Counter[int] = Counter()
    for seed in range(4):
        for sequence in sample(sampler, request("x", None, tokens, num_samples=1024, seed=seed, **how)):
            counts[int(sequence.tokens[0])] += 1
    observed = np.array([counts[token] for token in range(len(expected))])
    total = observed.sum()
    assert (observed[expected == 0] == 0).all()
    often = expected * total >= 5
    rest = ~often & (expected > 0)
    observed = np.append(observed[often], observed[rest].sum())
    expected = np.append(expected[often], expected[rest].sum()) * total
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert chi_square(observed, expected) < bound(len(expected) - 1)


def test_one_draw_by_hand() -> None:
    probabilities = torch.tensor([[0.1, 0.4, 0.0, 0.3, 0.2]])
    cases = [
        (Draw(1.0, -1, 1.0, 0.05), 0),
        (Draw(1.0, -1, 1.0, 0.499), 1),
        (Draw(1.0, -1, 1.0, 0.501), 3),
        (Draw(1.0, -1, 1.0, 1 - 2**-49), 4),
        (Draw(1.0, 2, 1.0, 0.57), 1),  # the two likeliest have 4/7 and 3/7
        (Draw(1.0, 2, 1.0, 0.58), 3),
        (Draw(1.0, -1, 0.39, 0.99), 1),
        (Draw(1.0, -1, 0.41, 0.99), 3),
        (Draw(1.0, 1, 1.0, 0.99), 1),
        (Draw(1.0, -1, 5e-324, 0.99), 1),
        (Draw(0.0, 3, 0.5, 0.99), 1),
        (Draw(1e-300, -1, 1.0, 0.99), 1),
        (Draw(1.0, -1, 1.0, 0.99, min_p=0.6), 3),  # 0.3 is at least 0.6 · 0.4, 0.2 is not
        (Draw(1.0, -1, 1.0, 0.99, min_p=0.8), 1),
        (Draw(1.0, -1, 0.5, 0.99, min_p=0.6), 1),  # of 4/7 and 3/7 the first alone holds top_p
    ]
    drawn = collect([draw_tokens(probabilities.log().repeat(len(cases), 1), [draw for draw, _ in cases], 5)])
    assert [each.token for each in drawn] == [token for _, token in cases]
    assert all(each.finite for each in drawn)
    logprobs = [each.logprob for each in drawn]
    for (draw, token), logprob in zip(cases, logprobs, strict=True):
        expected = 0.0 if draw.temperature == 1e-300 else math.log(probabilities[0, token])
        assert logprob == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_penalties_as_vllm_has_them(temperature: float) -> None:
    """The plain formula on logits: repetition for prompt and generated tokens, then frequency, then presence.

    The reported log-probability is that of the logits without penalties.
    """
    logits = torch.tensor([[2.0, 1.5, -1.0, 0.5, 3.0, 0.0]])
    penalties = Penalties(1.5, 0.4, 0.3, np.array([0, 2, 2]), [4, 4, 1])
    penalised = torch.tensor([2 / 1.5, 1.5 / 1.5 - 0.3 - 0.4, -1.5, 0.5, 3 / 1.5 - 0.6 - 0.4, 0.0])
    expected = (penalised / (temperature or 1.0)).softmax(-1)
    raw = (logits[0] / (temperature or 1.0)).log_softmax(-1)
    edges = expected.double().cumsum(0)
    for token in range(6):
        before = 0.0 if token == 0 else float(edges[token - 1])
        draw = Draw(temperature, -1, 1.0, (before + float(edges[token])) / 2, top=2, penalties=penalties)
        unpenalised = Draw(temperature, -1, 1.0, draw.uniform)
        (drawn, other) = collect([draw_tokens(logits.repeat(2, 1), [draw, unpenalised], 6)])
        assert drawn.token == (0 if temperature == 0 else token), "greedy takes 2 / 1.5, not 3"
        assert drawn.logprob == pytest.approx(float(raw[drawn.token]), abs=1e-6)
        assert drawn.top is not None
        assert drawn.top.token_ids.tolist() == [[4, 0]], "likeliest before penalties"
        alone = collect([draw_tokens(logits, [unpenalised], 6)])[0]
        assert (other.token, other.logprob) == (alone.token, alone.logprob), "a neighbour is not penalised"


def test_penalties_see_the_tokens_of_their_own_sample(sampler: TorchSampler) -> None:
    """With a high presence penalty no token is generated twice; without it, greedy text of this model repeats.

    The log-probabilities stay those of the model, and ``stop_at_eos=False`` lets end tokens pass.
    """
    how = {"max_tokens": 24, "temperature": 0.0, "stop_at_eos": False}
    plain = sample(sampler, request("plain", None, prompt(6), **how))[0]
    fresh = sample(sampler, request("fresh", None, prompt(6), presence_penalty=2.0, frequency_penalty=2.0, **how))[0]
    assert len(set(plain.tokens.tolist())) < 24
    assert len(set(fresh.tokens.tolist())) > len(set(plain.tokens.tolist()))
    logits = toy_llama()(input_ids=torch.from_numpy(np.concatenate([prompt(6), fresh.tokens]))[None]).logits[0].detach()
    scored, seen = logits.clone(), []
    for place, token in enumerate(fresh.tokens.tolist()):
        row = scored[5 + place]
        for earlier in set(seen):
            row[earlier] -= 2.0 + 2.0 * seen.count(earlier)
        assert token == int(row.argmax())
        seen.append(token)
    expected = logits[5:-1].log_softmax(-1).gather(1, torch.from_numpy(fresh.tokens)[:, None])[:, 0]
    assert np.allclose(fresh.logprobs, expected.numpy(), atol=1e-5)


def test_ids_without_an_embedding_are_never_drawn() -> None:
    logits = torch.tensor([[0.0, 1.0, 50.0]])
    draws = [Draw(1.0, -1, 1.0, 0.9), Draw(1.0, 3, 1.0, 0.9), Draw(0.0, -1, 1.0, 0.9)]
    assert [each.token for each in collect([draw_tokens(logits.repeat(3, 1), draws, 2)])] == [1, 0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_named(bad: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    for draw in (Draw(1.0, -1, 1.0, 0.3), Draw(0.0, -1, 1.0, 0.3), Draw(1.0, 3, 0.5, 0.3)):
        assert [each.finite for each in collect([draw_tokens(logits, [draw] * 3, 10)])] == [True, False, True]


# --- seeds ------------------------------------------------------------------------------------------------------------


def seeded(name: str, version: str | None = "a", seed: int | None = 5, num_samples: int = 3) -> SampleRequest:
    return request(name, version, prompt(8), num_samples=num_samples, max_tokens=20, seed=seed)


def test_a_seed_gives_the_same_tokens_alone_and_in_company(sampler: TorchSampler) -> None:
    alone = sample(sampler, seeded("x"))
    others = [request(f"{v}{n}", v, prompt(30 + n, n), 2, max_tokens=25) for v in (None, *SPECS) for n in range(3)]
    crowd = run(sampler, [*others, seeded("x"), seeded("y", "b"), seeded("z", None)])["x"].sequences
    for left, right in zip(alone, crowd, strict=True):
        np.testing.assert_array_equal(left.tokens, right.tokens)


def test_a_sample_does_not_depend_on_how_many_there_are(sampler: TorchSampler) -> None:
    few, many = (sample(sampler, seeded("x", num_samples=number)) for number in (1, 4))
    np.testing.assert_array_equal(few[0].tokens, many[0].tokens)


def test_samples_differ(sampler: TorchSampler) -> None:
    sequences = sample(sampler, seeded("x", num_samples=8))
    assert len({tuple(sequence.tokens) for sequence in sequences}) == 8


def test_more_samples_than_run_at_once() -> None:
    narrow, wide = (toy_sampler(toy_trainer({}), max_sequences=number) for number in (3, 64))
    for left, right in zip(*(sample(each, seeded("x", None, num_samples=20)) for each in (narrow, wide)), strict=True):
        np.testing.assert_array_equal(left.tokens, right.tokens)


def test_without_a_seed_each_request_has_its_own(sampler: TorchSampler) -> None:
    results = run(sampler, [seeded("x", seed=None), seeded("y", seed=None)])
    tokens = [tuple(sequence.tokens) for result in results.values() for sequence in result.sequences]
    assert len(set(tokens)) == len(tokens)


def test_seeds_are_any_64_bits(sampler: TorchSampler) -> None:
    tokens = [
        tuple(sample(sampler, seeded("x", seed=seed, num_samples=1))[0].tokens)
        for seed in (-(2**63), -1, 0, 2**63, 2**64 - 1)
    ]
    assert tokens[0] == tokens[3]  # the same 64 bits, read with and without a sign
    assert tokens[1] == tokens[4]
    assert len(set(tokens)) == 3
