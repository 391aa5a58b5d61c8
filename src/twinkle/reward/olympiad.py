"""Rewards for OlympiadBench: accuracy of one or several answers, their format, and the quality of the reasoning."""

import math
import re
from collections.abc import Sequence

from twinkle.data_format import user_data_get
from twinkle.reward.answers import boxed_answers, cleaned_latex, number_of
from twinkle.reward.interface import Reward, Trajectory, completion_text, ground_truth, paired

__all__ = ["OlympiadBenchAccuracyReward", "OlympiadBenchFormatReward", "OlympiadBenchQualityReward"]

# Words that are typical of reasoning. The benchmark is in Chinese and English.
_MARKERS = ("because", "since", "therefore", "thus", "hence", "suppose", "let ", "first", "then", "finally", "step")
_MARKERS_ZH = ("因为", "由于", "所以", "因此", "于是", "假设", "设", "首先", "然后", "最后", "步骤")
_SENTENCE_END = re.compile(r"[.!?。！？;；\n]+")


class OlympiadBenchAccuracyReward(Reward):
    """Compares the last boxed answer with the ``ground_truth``.

    The reward is 1 for the same text or a number within 1 % or 1e-4, 0.99 · e^(−5 · relative error) for any other
    number unless the correct one is 0, and 0 otherwise. If there are several correct answers, it is the share of them
    that was found.

    Several correct answers are a list, or a text with commas outside brackets. ``is_multiple_answer`` in ``user_data``,
    if present, says whether there can be several.
    """

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Trajectory] | None = None
    ) -> list[float]:
        return [self._score(*pair) for pair in paired(trajectories, ground_truths)]

    def _score(self, trajectory: Trajectory, truth_of: Trajectory) -> float:
        answers = [box.content for box in boxed_answers(completion_text(trajectory))]
        if not answers:
            return 0.0
        truth = ground_truth(truth_of, "ground_truth")
        multiple = user_data_get(truth_of.get("user_data"), "is_multiple_answer")
        parts = [str(part) for part in truth] if isinstance(truth, list) else _split(str(truth))
        if len(parts) > 1 and (multiple is None or multiple):
            given = _split(answers[-1])
            return _found(given if len(given) > 1 else answers[-len(parts) :], parts)
        single = parts[0] if isinstance(truth, list) else str(truth)
        return _closeness(answers[-1], single)


class OlympiadBenchFormatReward(Reward):
    r"""Gives 0.4 for a \boxed{…}, 0.3 if the last one is within 200 characters of the end, 0.3 if all boxes hold the
    same answer, and −0.3 if they hold more than two different ones. The sum is clamped to 0 … 1; without a box it is 0.
    """

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Trajectory] | None = None
    ) -> list[float]:
        return [_format_score(completion_text(trajectory)) for trajectory in trajectories]


class OlympiadBenchQualityReward(Reward):
    """Gives up to 0.4 for words that are typical of reasoning (in full for three different ones), up to 0.3 for a
    length of 300 to 1500 characters (less outside, in proportion), and up to 0.3 for the share of sentences that are
    not repetitions.
    """

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Trajectory] | None = None
    ) -> list[float]:
        return [_quality_score(completion_text(trajectory)) for trajectory in trajectories]


def _closeness(answer: str, truth: str) -> float:
    if _equal(answer, truth):
        return 1.0
    left, right = number_of(answer), number_of(truth)
    if left is None or right is None or right == 0:
        return 0.0
    return 0.99 * math.exp(-5 * abs(left - right) / abs(right))


def _equal(answer: str, truth: str) -> bool:
    if cleaned_latex(answer) == cleaned_latex(truth):
        return cleaned_latex(answer) != ""
    left, right = number_of(answer), number_of(truth)
    if left is None or right is None:
        return False
    return abs(left - right) <= max(1e-4, 0.01 * abs(right))


def _found(answers: list[str], truths: list[str]) -> float:
    """Return the share of ``truths`` found among ``answers``. Each answer counts only once."""
    left = list(answers)
    found = 0
    for truth in truths:
        match = next((answer for answer in left if _equal(answer, truth)), None)
        if match is not None:
            left.remove(match)
            found += 1
    return found / len(truths)


def _split(text: str) -> list[str]:
    """Split a text at commas outside brackets. A comma that separates thousands of a number does not count."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        is_thousands = re.match(r"\d,\d{3}(?!\d)", text[max(position - 1, 0) : position + 5]) is not None
        if (character == "," and depth == 0 and not is_thousands) or character in "，、":
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _format_score(text: str) -> float:
    boxes = boxed_answers(text)
    if not boxes:
        return 0.0
    distinct = len({cleaned_latex(box.content) for box in boxes})
    near_the_end = len(text) - boxes[-1].end <= 200
    score = 0.4 + (0.3 if near_the_end else 0.0) + (0.3 if distinct == 1 else -0.3 if distinct > 2 else 0.0)
    return min(max(score, 0.0), 1.0)


def _quality_score(text: str) -> float:
    length = len(text.strip())
    if length == 0:
        return 0.0
    lower = text.lower()
    markers = sum(marker in lower for marker in (*_MARKERS, *_MARKERS_ZH))
    sentences = [sentence.strip() for sentence in _SENTENCE_END.split(lower) if sentence.strip()]
    variety = len(set(sentences)) / len(sentences) if sentences else 0.0
    return 0.4 * min(markers / 3, 1.0) + 0.3 * min(length / 300, 1.0, 1500 / length) + 0.3 * variety
