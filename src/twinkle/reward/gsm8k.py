r"""Rewards for GSM8K, which read the final number in \boxed{…} or after ####."""

import re
from collections.abc import Sequence

from twinkle.reward.answers import boxed_answers, number_of
from twinkle.reward.interface import Reward, Trajectory, completion_text, ground_truth, paired

__all__ = ["GSM8KAccuracyReward", "GSM8KFormatReward"]

_WINDOW = 500  # characters at the end of a completion in which the final answer is searched
_HASHES = re.compile(r"####\s*((?:[-+−]\s*)?(?:\$\s*)?(?:\d[\d,]*(?:\.\d+)?|\.\d+))")


class GSM8KAccuracyReward(Reward):
    """Gives 1 if the final answer is the ``ground_truth`` (the same number within 1e-5, or the same text), else 0."""

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Trajectory] | None = None
    ) -> list[float]:
        return [
            float(_same(self.extract_answer(completion_text(trajectory)), str(ground_truth(truth, "ground_truth"))))
            for trajectory, truth in paired(trajectories, ground_truths)
        ]

    @staticmethod
    def extract_answer(completion: str) -> str:
        r"""Return the last \boxed{…} or else the last number after ####, in the last 500 characters; "" without either.

        Numbers are returned without thousands separators and currency signs.
        """
        tail = completion[-_WINDOW:]
        boxes = boxed_answers(tail)
        numbers = _HASHES.findall(tail)
        answer = boxes[-1].content if boxes else numbers[-1] if numbers else ""
        return re.sub(r"\\?\$|[\s,]", "", answer).replace("−", "-") if number_of(answer) is not None else answer.strip()


class GSM8KFormatReward(Reward):
    r"""Gives 1 if the completion has a \boxed{…} or a number after ####, else 0."""

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Trajectory] | None = None
    ) -> list[float]:
        texts = [completion_text(trajectory) for trajectory in trajectories]
        return [float(bool(boxed_answers(text)) or bool(_HASHES.search(text))) for text in texts]


def _same(answer: str, truth: str) -> bool:
    left, right = number_of(answer), number_of(truth)
    if left is not None and right is not None:
        return abs(left - right) < 1e-5
    return answer != "" and answer == truth.strip()
