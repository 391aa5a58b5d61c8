"""A reward for a correct answer that was found with a few tool calls that worked."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import InvalidInputError
from twinkle.reward import Reward
from twinkle.reward.interface import Trajectory, content_text, paired
from twinkle_agentic.reward.f1 import F1Reward

__all__ = ["ToolExploreReward"]


class ToolExploreReward(Reward):
    """Gives 1 for 1 to 3 turns with a tool call that worked, 0.5 for more, and 0 for none.

    An answer whose :class:`F1Reward` is below ``f1_threshold`` gets 0. A call worked if its result is neither empty nor
    an error text; a turn counts once, however many calls it has.
    """

    def __init__(self, f1_threshold: float = 0.5, answer_pattern: str | re.Pattern[str] | None = None) -> None:
        if not 0 <= f1_threshold <= 1:
            raise InvalidInputError("f1_threshold", f1_threshold, "a number from 0 to 1")
        self.f1_threshold = f1_threshold
        self._f1 = F1Reward(answer_pattern)

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Trajectory] | None = None
    ) -> list[float]:
        return [self._score(trajectory, truth) for trajectory, truth in paired(trajectories, ground_truths)]

    def _score(self, trajectory: Trajectory, truth: Trajectory) -> float:
        if self._f1.score(trajectory, truth) < self.f1_threshold:
            return 0.0
        turns = _turns_with_results(trajectory["messages"])
        return 0.0 if turns == 0 else 1.0 if turns <= 3 else 0.5


def _turns_with_results(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return how many assistant messages are followed by at least one tool message that is no failure."""
    turns = 0
    worked = False  # whether a result of the present turn has been counted
    for message in messages:
        if message.get("role") != "tool":
            worked = False
        elif not worked and _is_result(content_text(message.get("content"))):
            worked = True
            turns += 1
    return turns


def _is_result(text: str) -> bool:
    """Return whether a tool answered. A ToolManager answers "Error: …" for a call that failed, other tools "ERROR…"."""
    text = text.strip()
    return bool(text) and not text.startswith("ERROR") and not text.lower().startswith("error:")
