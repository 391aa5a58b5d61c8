"""The reward for competition mathematics, whose LaTeX answers can be written in many ways."""

from collections.abc import Sequence

from twinkle.data_format import user_data_get
from twinkle.reward.answers import answers_equal, boxed_answers, warn_without_math_verify
from twinkle.reward.interface import Reward, Trajectory, completion_text, last_message_text, paired

__all__ = ["MathReward"]

_HEADER = "# Answer"


class MathReward(Reward):
    r"""Gives 1 if the completion's answer equals the answer of the solution, else 0.

    The solution is ``ground_truth_key`` in ``user_data``, or else the last message. In both texts, the answer is the
    content of the last \boxed{…} or, without a box, the whole text. If there is a header "# Answer", only the text
    after its last occurrence is read.
    """

    def __init__(self, ground_truth_key: str = "solution") -> None:
        self.ground_truth_key = ground_truth_key
        warn_without_math_verify("MathReward")

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Trajectory] | None = None
    ) -> list[float]:
        return [
            float(answers_equal(_answer(completion_text(trajectory)), _answer(self._solution(truth))))
            for trajectory, truth in paired(trajectories, ground_truths)
        ]

    def _solution(self, truth: Trajectory) -> str:
        given = user_data_get(truth.get("user_data"), self.ground_truth_key)
        return last_message_text(truth) if given is None else str(given)


def _answer(text: str) -> str:
    section = text.rpartition(_HEADER)[2]
    boxes = boxed_answers(section)
    return boxes[-1].content if boxes else section.strip()
