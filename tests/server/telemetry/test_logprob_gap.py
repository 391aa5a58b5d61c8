"""The gap between trainer and sampler, compared with the plain formula."""

import math

import numpy as np
import pytest

from twinkle.model.types import Datum
from twinkle.server.telemetry.recording import gap_of


def row(sampled: list[float] | None) -> Datum:
    length = 3 if sampled is None else len(sampled)
    ids = np.arange(length)
    extras = {} if sampled is None else {"logprobs": np.array(sampled, np.float32)}
    return Datum(ids, ids, extras=extras)


def test_formula() -> None:
    """The mean over all sampled tokens of all rows, without prompts (zeros)."""
    data = [row([0.0, -1.0, -2.0]), row(None), row([-0.5, -3.0])]
    trained = [np.array(lp, np.float32) for lp in ([-9.0, -1.5, -1.75], [-1.0, -1.0, -1.0], [-0.5, -2.0])]
    differences = [-0.5, 0.25, 0.0, 1.0]
    gap = gap_of(data, trained)
    assert gap is not None
    assert gap.distance == pytest.approx(sum(map(abs, differences)) / 4, rel=1e-6)
    assert gap.divergence == pytest.approx(sum(math.exp(d) - 1 - d for d in differences) / 4, rel=1e-6)


@pytest.mark.parametrize("data", [[row(None)], [row([0.0, 0.0])], []])
def test_nothing_to_compare(data: list[Datum]) -> None:
    assert gap_of(data, [np.zeros(len(datum.tokens), np.float32) for datum in data]) is None


def test_several_targets_a_token_are_not_compared() -> None:
    assert gap_of([row([-1.0, -1.0])], [np.zeros((2, 3), np.float32)]) is None


def test_absurd_values_stay_finite() -> None:
    gap = gap_of([row([-1e30])], [np.array([-1.0], np.float32)])
    assert gap is not None
    assert math.isfinite(gap.divergence)
