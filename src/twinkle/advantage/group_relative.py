"""Advantages of completions that were sampled in groups. A group is G consecutive completions of one prompt.

Shapes: B completions, G of a group, F reward functions.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import InvalidInputError, UnknownNameError

__all__ = ["Advantage", "GRPOAdvantage", "RLOOAdvantage"]

SCALES = ("batch", "group", "none")
EPSILON = 1e-8  # added to the standard deviation, which is 0 if all rewards are equal


class Advantage(ABC):
    """The base class of advantages.

    Those of this module take ``num_generations`` and ``scale``; ``rewards`` are (B,), or (B, F), which are summed over
    F, and the result is one number for each completion, (B,). :class:`twinkle.advantage.GAEAdvantage` takes values of a
    critic instead, and has a result for each token.
    """

    @abstractmethod
    def __call__(
        self, rewards: Tensor | Sequence[float] | Sequence[Sequence[float]], *args: Any, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Tensor]: ...


class GRPOAdvantage(Advantage):
    """Reward minus the mean of its group, divided by a standard deviation.

    The deviation is that of the group or of the whole batch (``scale`` "group" or "batch"); "none" does not divide.

    With ``num_generations`` 1 a completion has no group to compare it with. Then "group" returns the rewards unchanged,
    and "batch" and "none" subtract the mean of the batch.
    """

    def __call__(
        self,
        rewards: Tensor | Sequence[float] | Sequence[Sequence[float]],
        num_generations: int = 1,
        scale: str = "group",
    ) -> Tensor:
        rewards_B = _checked(rewards, num_generations, scale)
        if num_generations > 1:
            centred_B = rewards_B - _of_group(rewards_B.view(-1, num_generations).mean(1), num_generations)
            return _scaled(centred_B, rewards_B, num_generations, scale)
        if scale == "group":
            return rewards_B
        return _scaled(rewards_B - rewards_B.mean(), rewards_B, num_generations, scale)


class RLOOAdvantage(Advantage):
    """Reward minus the mean of the other rewards of its group, divided as in :class:`GRPOAdvantage`."""

    def __call__(
        self,
        rewards: Tensor | Sequence[float] | Sequence[Sequence[float]],
        num_generations: int,
        scale: str = "group",
    ) -> Tensor:
        if num_generations < 2:
            raise InvalidInputError("num_generations", num_generations, "2 or more: the others are the baseline")
        rewards_B = _checked(rewards, num_generations, scale)
        sums_B = _of_group(rewards_B.view(-1, num_generations).sum(1), num_generations)
        centred_B = rewards_B - (sums_B - rewards_B) / (num_generations - 1)
        return _scaled(centred_B, rewards_B, num_generations, scale)


def _checked(rewards: Tensor | Sequence[float] | Sequence[Sequence[float]], group: int, scale: str) -> Tensor:
    if scale not in SCALES:
        raise UnknownNameError("scale of advantages", scale, SCALES)
    try:
        rewards_B = torch.as_tensor(rewards, dtype=torch.float32)
    except (TypeError, ValueError):  # raised by torch for None, text and ragged rows
        raise InvalidInputError("rewards", rewards, "numbers, (completions,) or (completions, functions)") from None
    if rewards_B.dim() == 2:
        rewards_B = rewards_B.sum(-1)
    if rewards_B.dim() != 1:
        raise InvalidInputError(
            "rewards", f"shape {tuple(rewards_B.shape)}", "(completions,) or (completions, functions)"
        )
    if group < 1 or len(rewards_B) % group != 0:
        raise InvalidInputError("num_generations", group, f"a divisor of the number of rewards, {len(rewards_B)}")
    if not bool(torch.isfinite(rewards_B).all()):
        raise InvalidInputError("rewards", rewards_B.tolist(), "finite numbers")
    return rewards_B


def _scaled(centred_B: Tensor, rewards_B: Tensor, group: int, scale: str) -> Tensor:
    if scale == "none" or len(rewards_B) < 2:  # a single reward has no deviation
        return centred_B
    if scale == "batch":
        return centred_B / (rewards_B.std() + EPSILON)
    return centred_B / (_of_group(rewards_B.view(-1, group).std(1), group) + EPSILON)


def _of_group(per_group: Tensor, group: int) -> Tensor:
    return per_group.repeat_interleave(group)
