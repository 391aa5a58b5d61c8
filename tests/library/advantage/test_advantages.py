"""Advantages, against worked examples and loops over groups."""

import math
import statistics

import pytest
import torch

import twinkle.advantage
from twinkle.advantage import Advantage, GRPOAdvantage, RLOOAdvantage
from twinkle.errors import InvalidInputError, UnknownNameError

REWARDS = [0.0, 1.0, 0.5, 2.0, 2.0, -1.0]


def groups(size: int) -> list[list[float]]:
    return [REWARDS[start : start + size] for start in range(0, len(REWARDS), size)]


def test_worked_example() -> None:
    rewards = [0, 1, 0, 1]
    half = 0.5 / (math.sqrt(0.5) + 1e-8)
    assert GRPOAdvantage()(rewards, num_generations=2).tolist() == pytest.approx([-half, half, -half, half])
    assert GRPOAdvantage()(rewards, num_generations=2, scale="none").tolist() == [-0.5, 0.5, -0.5, 0.5]


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("advantage", [GRPOAdvantage(), RLOOAdvantage()])
def test_formula(advantage: Advantage, scale: str, size: int) -> None:
    expected = []
    for group in groups(size):
        deviation = {"group": statistics.stdev(group), "batch": statistics.stdev(REWARDS), "none": 1.0}[scale]
        for index, reward in enumerate(group):
            others = group[:index] + group[index + 1 :]
            baseline = statistics.mean(group if isinstance(advantage, GRPOAdvantage) else others)
            expected.append((reward - baseline) / deviation)
    result = advantage(REWARDS, num_generations=size, scale=scale)
    assert result.tolist() == pytest.approx(expected, rel=1e-5)
    assert result.shape == (6,)


def test_completions_that_are_alone() -> None:
    mean, deviation = statistics.mean(REWARDS), statistics.stdev(REWARDS)
    assert GRPOAdvantage()(REWARDS).tolist() == REWARDS
    assert GRPOAdvantage()(REWARDS, scale="none").tolist() == pytest.approx([r - mean for r in REWARDS])
    scaled = [(r - mean) / deviation for r in REWARDS]
    assert GRPOAdvantage()(REWARDS, scale="batch").tolist() == pytest.approx(scaled, rel=1e-5)
    assert GRPOAdvantage()([3.0], scale="batch").tolist() == [0.0]


def test_several_reward_functions_are_summed() -> None:
    table = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [2.0, 0.5]])
    expected = GRPOAdvantage()(table.sum(-1), num_generations=2)
    assert torch.equal(GRPOAdvantage()(table, num_generations=2), expected)
    assert torch.equal(GRPOAdvantage()(table.tolist(), num_generations=2), expected)


def test_equal_rewards_have_no_advantage() -> None:
    for advantage in (GRPOAdvantage(), RLOOAdvantage()):
        for scale in ("group", "batch", "none"):
            assert advantage([0.3] * 4, num_generations=2, scale=scale).abs().max().item() < 1e-6


@pytest.mark.parametrize(
    ("rewards", "size", "message"),
    [
        (REWARDS, 0, "num_generations: got 0"),
        (REWARDS, -2, "num_generations: got -2"),
        (REWARDS, 4, "num_generations: got 4, allowed: a divisor of the number of rewards, 6"),
        ([1.0, math.nan], 2, "rewards: got .*, allowed: finite numbers"),
        ([[[1.0]]], 1, "rewards: got 'shape"),
    ],
)
def test_what_is_refused(rewards, size: int, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        GRPOAdvantage()(rewards, num_generations=size)


def test_leave_one_out_needs_others() -> None:
    with pytest.raises(InvalidInputError, match="num_generations: got 1, allowed: 2 or more"):
        RLOOAdvantage()(REWARDS, num_generations=1)


def test_unknown_scale() -> None:
    with pytest.raises(UnknownNameError, match="'std'; known: batch, group, none"):
        GRPOAdvantage()(REWARDS, num_generations=2, scale="std")


def test_public_names() -> None:
    assert twinkle.advantage.__all__ == ["Advantage", "GAEAdvantage", "GRPOAdvantage", "RLOOAdvantage"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        twinkle.advantage.nothing  # noqa: B018
