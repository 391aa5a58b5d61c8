"""Generalized advantage estimation, against worked examples and a loop over tokens."""

import math
import random
import statistics

import numpy as np
import pytest
import torch

from twinkle.advantage import Advantage, GAEAdvantage
from twinkle.errors import InvalidInputError


def by_loop(rewards, values, gamma, lam, last_value=0.0):
    """Return the advantages of one completion from the definition: A_t = Σ_k (γλ)^k · δ_{t+k}."""
    following = [*values[1:], last_value][: len(values)]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[start:])) for start in range(len(deltas))]


def ragged(seed: int, rows: int = 5, width: int = 9):
    """Return rewards, values and masks (rows, width) with holes and padding; one row has no valid position."""
    drawn = random.Random(seed)
    masks = [[drawn.random() < 0.6 for _ in range(width)] for _ in range(rows)]
    masks[-1] = [False] * width
    rewards = [[drawn.gauss(0, 1) for _ in range(width)] for _ in range(rows)]
    values = [[drawn.gauss(0, 1) for _ in range(width)] for _ in range(rows)]
    return rewards, values, masks


def valid(row, mask):
    return [value for value, wanted in zip(row, mask, strict=True) if wanted]


def test_worked_examples() -> None:
    gae = GAEAdvantage(gamma=1.0, gae_lambda=1.0, normalize=False)
    assert isinstance(gae, Advantage)
    advantages, returns = gae([[0, 0, 1]], [[0.2, 0.3, 0.4]])
    torch.testing.assert_close(advantages, torch.tensor([[0.8, 0.7, 0.6]]))
    torch.testing.assert_close(returns, torch.ones(1, 3))
    advantages, returns = gae([[2]], [[0.5]])
    assert [advantages.item(), returns.item()] == [1.5, 2.0]
    rows = GAEAdvantage.build_token_rewards([2.0], [2], old_logps=[[-1, -2]], ref_logps=[[-1.5, -1.5]], kl_coef=0.1)
    assert rows == [pytest.approx([-0.05, 2.05])]
    for kind in (torch.tensor, np.array):
        assert GAEAdvantage.build_token_rewards(kind([2.0, 3.0]), kind([2, 1])) == [[0.0, 2.0], [3.0]]


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (0.99, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_formula_on_ragged_rows(gamma: float, lam: float, bootstrap: bool) -> None:
    rewards, values, masks = ragged(3)
    after = [0.5, -0.25, 0.0, 2.0, 1.0] if bootstrap else [0.0] * 5
    expected = [
        by_loop(valid(r, m), valid(v, m), gamma, lam, last)
        for r, v, m, last in zip(rewards, values, masks, after, strict=True)
    ]
    mask = torch.tensor(masks)
    gae, options = GAEAdvantage(gamma, lam), {"bootstrap_values": after} if bootstrap else {}
    poison = torch.tensor(rewards).masked_fill(~mask, math.nan)
    found, returns = gae(poison, values, masks=masks, normalize=False, **options)
    everything = torch.tensor([number for numbers in expected for number in numbers])
    torch.testing.assert_close(found[mask], everything, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns[mask], everything + torch.tensor(values)[mask], rtol=1e-5, atol=1e-5)
    whitened, same = gae(rewards, values, masks=mask, **options)
    mean, deviation = statistics.mean(everything.tolist()), statistics.pstdev(everything.tolist())
    torch.testing.assert_close(whitened[mask], (everything - mean) / (deviation + 1e-8), rtol=1e-4, atol=1e-5)
    assert torch.equal(same, returns)  # returns are not whitened
    for result in (found, returns, whitened):
        assert (result[~mask] == 0).all()
        assert result.dtype == torch.float32


def test_whitening_covers_one_call() -> None:
    gae = GAEAdvantage(gae_lambda=1.0)
    together, _ = gae([[1.0], [0.0], [5.0]], [[0.0], [0.0], [0.0]])
    apart, _ = gae([[1.0], [0.0]], [[0.0], [0.0]])
    assert apart[:, 0].tolist() == pytest.approx([1.0, -1.0])
    assert together[:2, 0].tolist() != pytest.approx([1.0, -1.0])
    alone, _ = gae([3.0], [1.0])  # one row, one number: nothing to compare it with
    assert alone.tolist() == [[2.0]]
    assert gae([[1.0, 2.0]], [[0.0, 0.0]], masks=[[False, False]])[0].tolist() == [[0.0, 0.0]]


def test_the_call_overrides_the_constructor() -> None:
    plain, whitens = GAEAdvantage(normalize=False), GAEAdvantage()
    inputs = ([[0.0, 1.0, 2.0]], [[0.1, 0.2, 0.3]])
    assert torch.equal(plain(*inputs, normalize=True)[0], whitens(*inputs)[0])
    assert torch.equal(whitens(*inputs, normalize=False)[0], plain(*inputs)[0])


BUILD = GAEAdvantage.build_token_rewards
GAE = GAEAdvantage()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: GAEAdvantage(gamma=1.1), "gamma: got 1.1, allowed: a number from 0 to 1"),
        (lambda: GAEAdvantage(gae_lambda=-0.1), "gae_lambda: got -0.1"),
        (lambda: GAEAdvantage(gamma=math.nan), "gamma: got nan"),
        (lambda: BUILD([1.0], [1, 2]), "lengths: got '?2 entries"),
        (lambda: BUILD([1.0], [0]), r"lengths\[0\]: got 0"),
        (lambda: BUILD([1.0], [1], old_logps=[[1.0]]), "ref_logps: got None"),
        (lambda: BUILD([1.0], [1], ref_logps=[[1.0]]), "old_logps: got None"),
        (lambda: BUILD([1.0], [1], kl_coef=0.1), "kl_coef: got 0.1, allowed: 0 without old_logps"),
        (lambda: BUILD([1.0], [2], old_logps=[[1.0]], ref_logps=[[1.0, 2.0]]), r"old_logps\[0\]: got '?1 values"),
        (lambda: BUILD([1.0], [1], old_logps=[[1.0]], ref_logps=[]), "ref_logps: got '?0 rows"),
        (lambda: BUILD([math.nan], [1]), "rewards: got"),
        (lambda: GAE([[1.0, 2.0]], [[1.0]]), "values: got '?shape"),
        (lambda: GAE([[1.0]], [[1.0]], masks=[[1, 1]]), "masks: got '?shape"),
        (lambda: GAE([[1.0], [1.0, 2.0]], [[1.0]]), "rewards: got .* pad shorter rows"),
        (lambda: GAE([[math.inf]], [[1.0]]), "rewards: got .* finite"),
        (lambda: GAE([[1.0]], [[1.0]], bootstrap_values=[1.0, 2.0]), "bootstrap_values: got"),
        (lambda: GAE([[[1.0]]], [[[1.0]]]), "rewards: got '?shape"),
        (lambda: GAE([[1.0]], [[1.0]], bootstrap_values=[None]), r"bootstrap_values: got \[None\]"),
        (lambda: GAE([[1.0, 2.0]], [[1.0, 2.0]], masks=[[math.nan, 1.0]]), "masks: got '?a number other than 0 and 1"),
        (lambda: GAE([[3e38, 3e38]], [[0.0, 0.0]]), "rewards: got '?numbers whose sum overflows"),
        (lambda: GAEAdvantage(normalize="no"), "normalize: got 'no', allowed: True or False"),
        (lambda: BUILD([1.0], 2), "lengths: got 2"),
        (lambda: BUILD([1.0], [1], old_logps=1.0, ref_logps=[[1.0]]), "old_logps: got 1.0"),
        (lambda: BUILD([1.0], [1], kl_coef="low"), "kl_coef: got 'low'"),
    ],
)
def test_mistakes_are_named(call, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        call()
