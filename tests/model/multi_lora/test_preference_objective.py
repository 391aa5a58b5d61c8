"""DPO as an objective: its value equals the formula, its slopes finite differences, and a step improves it."""

import numpy as np
import pytest

from twinkle.errors import NonFiniteError
from twinkle.model.multi_lora.preference_objective import PreferenceObjective
from twinkle.model.types import Datum, Preference, TokenValues

LENGTHS = (5, 3, 4, 6)  # chosen, rejected, chosen, rejected
NONE = np.zeros(0, np.float32)


def pairs(generator: np.random.Generator) -> tuple[list[Datum], list[np.ndarray], list[np.ndarray]]:
    """Return (data, log-probabilities, log-probabilities of the reference)."""
    data = []
    for length in LENGTHS:
        tokens, targets = (generator.integers(1, 50, length) for _ in range(2))
        weights = np.array([0.0] + [1.0] * (length - 1), np.float32)
        data.append(Datum(tokens, targets, weights))
    logprobs, reference = ([-generator.random(length).astype(np.float32) for length in LENGTHS] for _ in range(2))
    return data, logprobs, reference


def values(logprobs: list[np.ndarray]) -> list[TokenValues]:
    return [TokenValues(each.copy(), NONE, np.zeros(0, np.int64)) for each in logprobs]


def formula(logprobs: list[np.ndarray], reference: list[np.ndarray], beta: float, sft_weight: float) -> float:
    sums = np.array([each[1:].astype(np.float64).sum() for each in logprobs])  # the first token has weight 0
    deltas = sums - np.array([each[1:].astype(np.float64).sum() for each in reference])
    margins = beta * (deltas[0::2] - deltas[1::2])
    chosen_tokens = sum(length - 1 for length in LENGTHS[0::2])
    return float(np.log1p(np.exp(-margins)).mean() - sft_weight * sums[0::2].sum() / chosen_tokens)


@pytest.mark.parametrize(("beta", "sft_weight"), [(0.1, 0.0), (0.7, 0.5)])
def test_loss_and_slopes(beta: float, sft_weight: float) -> None:
    data, logprobs, reference = pairs(np.random.default_rng(1))
    value = PreferenceObjective(data, Preference(reference, beta, sft_weight))(values(logprobs))
    assert value.loss == pytest.approx(formula(logprobs, reference, beta, sft_weight), abs=1e-6)
    for datum, slopes in enumerate(value.logprobs):
        assert slopes.shape == logprobs[datum].shape
        for place in range(len(slopes)):
            moved = [each.astype(np.float64) for each in logprobs]
            moved[datum][place] += 1e-5
            rise = formula(moved, reference, beta, sft_weight) - formula(logprobs, reference, beta, sft_weight)
            assert slopes[place] == pytest.approx(rise / 1e-5, abs=1e-4)


def test_rewards() -> None:
    data, logprobs, reference = pairs(np.random.default_rng(2))
    metrics = PreferenceObjective(data, Preference(reference, beta=0.5))(values(logprobs)).metrics
    rewards = [0.5 * float((lp - ref)[1:].sum()) for lp, ref in zip(logprobs, reference, strict=True)]
    margins = [rewards[0] - rewards[1], rewards[2] - rewards[3]]
    assert metrics["rewards/chosen:mean"] == pytest.approx((rewards[0] + rewards[2]) / 2, abs=1e-5)
    assert metrics["rewards/rejected:mean"] == pytest.approx((rewards[1] + rewards[3]) / 2, abs=1e-5)
    assert metrics["rewards/margins:mean"] == pytest.approx(sum(margins) / 2, abs=1e-5)
    assert metrics["rewards/accuracies:mean"] == sum(margin > 0 for margin in margins) / 2


def test_without_weights_all_tokens_are_answers() -> None:
    data, logprobs, reference = pairs(np.random.default_rng(3))
    plain = [Datum(datum.tokens, datum.targets) for datum in data]
    ones = [Datum(datum.tokens, datum.targets, np.ones(len(datum.tokens), np.float32)) for datum in data]
    losses = [PreferenceObjective(each, Preference(reference))(values(logprobs)).loss for each in (plain, ones)]
    assert losses[0] == losses[1]


def test_rewards_beyond_all_numbers_fail_the_request() -> None:
    data, logprobs, reference = pairs(np.random.default_rng(4))
    with pytest.raises(NonFiniteError, match="rewards"):
        PreferenceObjective(data, Preference([each * 0 - 3e38 for each in reference], beta=2.0))(values(logprobs))
