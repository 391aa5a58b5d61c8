"""Rewards that read <think> and <answer> tags."""

import re
from collections.abc import Sequence

from twinkle.reward.answers import has_math_verify, number_of, verified, warn_without_math_verify
from twinkle.reward.interface import Reward, Trajectory, completion_text, ground_truth, paired

__all__ = ["FormatReward", "MultiModalAccuracyReward"]

_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class FormatReward(Reward):
    """Gives 1 if the completion has both <think>…</think> and <answer>…</answer>, else 0."""

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Trajectory] | None = None
    ) -> list[float]:
        texts = [completion_text(trajectory) for trajectory in trajectories]
        return [float(bool(_THINK.search(text)) and bool(_ANSWER.search(text))) for text in texts]


class MultiModalAccuracyReward(Reward):
    """Gives 1 if the answer is correct, else 0. The answer is the last <answer>…</answer>, or else the whole text.

    It is correct if it equals the ``ground_truth`` (without one, the ``solution``) as text (ignoring case) or as a
    number, or if math_verify finds it equal to the answer in the ``solution``.
    """

    def __init__(self) -> None:
        warn_without_math_verify("MultiModalAccuracyReward")

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Trajectory] | None = None
    ) -> list[float]:
        return [float(self._right(*pair)) for pair in paired(trajectories, ground_truths)]

    def _right(self, trajectory: Trajectory, truth_of: Trajectory) -> bool:
        text = completion_text(trajectory)
        answers = _ANSWER.findall(text)
        answer = (answers[-1] if answers else text).strip()
        truth = _inner(str(ground_truth(truth_of, "ground_truth", "solution")))
        if not answer:
            return False
        if answer.lower() == truth.lower():
            return True
        left, right = number_of(answer), number_of(truth)
        if left is not None and right is not None:
            return abs(left - right) < 1e-6
        return has_math_verify() and verified(text, str(ground_truth(truth_of, "solution", "ground_truth")))


def _inner(truth: str) -> str:
    match = _ANSWER.search(truth)
    return (match.group(1) if match else truth).strip()
