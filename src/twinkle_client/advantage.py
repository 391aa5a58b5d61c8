"""Advantages of completions that were sampled in groups, computed on the client with numpy.

A group is G consecutive completions of one prompt. Shapes: B completions, G of a group, F reward functions.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twinkle_client.compatibility import PATHS, missing
from twinkle_client.errors import invalid, unknown

__all__ = ["Advantage", "GRPOAdvantage", "RLOOAdvantage"]

FloatArray = NDArray[np.float32]

SCALES = ("batch", "group", "none")
EPSILON = np.float32(1e-8)  # added to the standard deviation, which is 0 if all rewards are equal


class Advantage(ABC):
    """The base class of advantages.

    ``rewards`` are (B,), or (B, F), which are summed over F. The result is one number for each completion, (B,): an
    array of numpy, where the library returns a tensor.
    """

    @abstractmethod
    def __call__(self, rewards: ArrayLike, num_generations: int, scale: str = "group") -> FloatArray: ...


class GRPOAdvantage(Advantage):
    """Reward minus the mean of its group, divided by a standard deviation.

    The deviation is that of the group or of the whole batch (``scale`` "group" or "batch"); "none" does not divide.

    With ``num_generations`` 1 a completion has no group to compare it with. Then "group" returns the rewards unchanged,
    and "batch" and "none" subtract the mean of the batch.
    """

    def __call__(self, rewards: ArrayLike, num_generations: int = 1, scale: str = "group") -> FloatArray:
        rewards_B = _checked(rewards, num_generations, scale)
        if num_generations > 1:
            means_B = rewards_B.reshape(-1, num_generations).mean(1).repeat(num_generations)
            return _scaled(rewards_B - means_B, rewards_B, num_generations, scale)
        if scale == "group":
            return rewards_B
        return _scaled(rewards_B - rewards_B.mean(), rewards_B, num_generations, scale)


class RLOOAdvantage(Advantage):
    """Reward minus the mean of the other rewards of its group, divided as in :class:`GRPOAdvantage`."""

    def __call__(self, rewards: ArrayLike, num_generations: int, scale: str = "group") -> FloatArray:
        if num_generations < 2:
            raise invalid("num_generations", num_generations, "2 or more: the others are the baseline")
        rewards_B = _checked(rewards, num_generations, scale)
        sums_B = rewards_B.reshape(-1, num_generations).sum(1).repeat(num_generations)
        centred_B = rewards_B - (sums_B - rewards_B) / np.float32(num_generations - 1)
        return _scaled(centred_B, rewards_B, num_generations, scale)


def _checked(rewards: Any, group: int, scale: str) -> FloatArray:
    if scale not in SCALES:
        raise unknown("scale of advantages", scale, SCALES)
    try:
        rewards_B: FloatArray = np.asarray(rewards, dtype=np.float32)
    except (TypeError, ValueError):  # None, text and ragged rows
        raise invalid("rewards", rewards, "numbers, (completions,) or (completions, functions)") from None
    if rewards_B.ndim == 2:
        rewards_B = rewards_B.sum(-1)
    if rewards_B.ndim != 1:
        raise invalid("rewards", f"shape {rewards_B.shape}", "(completions,) or (completions, functions)")
    if group < 1 or len(rewards_B) % group != 0:
        raise invalid("num_generations", group, f"a divisor of the number of rewards, {len(rewards_B)}")
    if not np.isfinite(rewards_B).all():
        raise invalid("rewards", rewards_B.tolist(), "finite numbers")
    return rewards_B


def _scaled(centred_B: FloatArray, rewards_B: FloatArray, group: int, scale: str) -> FloatArray:
    if scale == "none" or len(rewards_B) < 2:  # a single reward has no deviation
        return centred_B
    if scale == "batch":
        return centred_B / (rewards_B.std(ddof=1) + EPSILON)
    deviations_B = rewards_B.reshape(-1, group).std(1, ddof=1).repeat(group)
    return centred_B / (deviations_B + EPSILON)


def __getattr__(name: str) -> object:
    raise missing(PATHS, __name__, name)
