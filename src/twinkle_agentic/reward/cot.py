r"""A reward for an answer that is reasoned in a few numbered steps."""

import re
from collections.abc import Sequence

from twinkle.reward import Reward
from twinkle.reward.interface import Trajectory, completion_text

__all__ = ["CoTReward"]

# A line that begins with "Step 3:", also as a heading, in bold letters or as a point of a list.
_STEP = re.compile(r"^[ \t>#*_-]*step[ \t]+(\d+)[ \t*_]*:", re.IGNORECASE | re.MULTILINE)


class CoTReward(Reward):
    r"""Gives 0.3 for 3 to 6 different steps, 0.1 for 7 and more, and 0 otherwise.

    A step is a line of the last assistant message that begins with ``Step n:``; a number counts once. An answer
    without ``\boxed{`` gets 0.
    """

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Trajectory] | None = None
    ) -> list[float]:
        return [_score(completion_text(trajectory)) for trajectory in trajectories]


def _score(text: str) -> float:
    if "\\boxed{" not in text:
        return 0.0
    steps = len({int(number) for number in _STEP.findall(text)})
    return 0.3 if 3 <= steps <= 6 else 0.1 if steps >= 7 else 0.0
