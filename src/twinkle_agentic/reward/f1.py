r"""A reward for questions whose answer is a few words: the F1 of the words in \boxed{…} and of the correct answer."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

from twinkle.data_format import user_data_get
from twinkle.errors import InvalidInputError
from twinkle.extras import missing
from twinkle.reward import Reward
from twinkle.reward.answers import boxed_answers
from twinkle.reward.interface import Trajectory, completion_text, paired

__all__ = ["F1Reward", "ground_truths_of"]

_ARTICLES = frozenset({"a", "an", "the"})
# Words without which an answer means the same. Words that turn or choose an answer (no, not, or, but) are not here.
# fmt: off
_FILLERS = frozenset({
    "about", "also", "and", "answer", "answers", "approximately", "are", "around", "as", "at", "be", "been", "being",
    "by", "did", "do", "does", "final", "for", "from", "had", "has", "have", "he", "her", "his", "in", "into", "is",
    "it", "its", "of", "on", "she", "so", "that", "their", "there", "these", "they", "this", "those", "to", "was",
    "were", "which", "who", "with", "would",
})
# fmt: on
_NO_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "“”‘’„«»…–—、。，；：？！（）《》·", " "))
_SHORTEST_STEMMED = 4  # letters


class F1Reward(Reward):
    r"""Gives the F1 of the words of the answer and of the correct one, between 0 and 1.

    The answer is the last complete \boxed{…} of the last assistant message or, without one, what ``answer_pattern``
    finds last: its first group, or the whole match if it has no group. The correct answers are all values of
    ``ground_truth`` in ``user_data``, and the members of values that are lists; the best one counts.

    Both are compared in lower case, without punctuation and articles, and with the stems (Porter's) of words of four
    letters and more. Two texts that differ only in filler words (of, in, is …), or in numbers that the answer has
    beyond the correct one, count as equal. So F1Reward suits names and phrases. For numbers use GSM8KAccuracyReward or
    MathReward: here, an answer that lists many numbers beside the correct one gets 1.
    """

    def __init__(self, answer_pattern: str | re.Pattern[str] | None = None) -> None:
        self.answer_pattern = compiled_pattern(answer_pattern)
        _stemmer()  # a missing package is told here, not after the first rollout

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Trajectory] | None = None
    ) -> list[float]:
        return [self.score(trajectory, truth) for trajectory, truth in paired(trajectories, ground_truths)]

    def score(self, trajectory: Trajectory, truth: Trajectory) -> float:
        """Return the reward of one trajectory. ``truth``: the trajectory that holds the correct answers."""
        answer = _extract_final_answer(completion_text(trajectory), self.answer_pattern)
        return max((_f1_score(answer, correct) for correct in ground_truths_of(truth)), default=0.0)


def compiled_pattern(pattern: str | re.Pattern[str] | None) -> re.Pattern[str] | None:
    """Return the compiled ``answer_pattern``. Raise InvalidInputError if it is no regular expression."""
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise InvalidInputError("answer_pattern", pattern, f"a regular expression ({error})") from error


def ground_truths_of(trajectory: Trajectory) -> list[str]:
    """Return the texts of all ``ground_truth`` entries of ``user_data``. Raise InvalidInputError if there is none."""
    pairs = trajectory.get("user_data") or []
    values = [user_data_get([pair], "ground_truth") for pair in pairs]
    texts = [str(text) for value in values if value is not None for text in _members(value)]
    if not texts:
        raise InvalidInputError("user_data", trajectory.get("user_data"), "must hold 'ground_truth'")
    return texts


def _members(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _extract_final_answer(text: str, answer_pattern: str | re.Pattern[str] | None = None) -> str:
    r"""Return the last complete \boxed{…} or else what the pattern finds last; "" without either."""
    boxes = boxed_answers(text)
    if boxes:
        return boxes[-1].content
    pattern = compiled_pattern(answer_pattern)
    matches = [] if pattern is None else list(pattern.finditer(text))
    if not matches:
        return ""
    last = matches[-1]
    return (last[1] or "").strip() if last.re.groups else last[0].strip()


def _f1_score(prediction: str, ground_truth: str) -> float:
    """Return the F1 of the words of two texts, or 1 if they differ only in what does not matter."""
    said, correct = _words(prediction), _words(ground_truth)
    if not said or not correct:
        return 0.0
    if _means_the_same(said, correct):
        return 1.0
    common = sum((Counter(said) & Counter(correct)).values())
    return 2 * common / (len(said) + len(correct))


def _means_the_same(said: Sequence[str], correct: Sequence[str]) -> bool:
    """Return whether only filler words differ, or numbers that are said beyond the correct answer."""
    needed = Counter(word for word in correct if word not in _FILLERS)
    given = Counter(word for word in said if word not in _FILLERS)
    return bool(needed) and not needed - given and all(word.isdigit() for word in given - needed)


def _words(text: str) -> list[str]:
    words = text.lower().translate(_NO_PUNCTUATION).split()
    return [_stem(word) for word in words if word not in _ARTICLES]


@lru_cache(maxsize=65536)
def _stem(word: str) -> str:
    # Filler words stay as they are listed: Porter's stem of "this" is "thi".
    return word if len(word) < _SHORTEST_STEMMED or word in _FILLERS else _stemmer()(word)


@cache
def _stemmer() -> Callable[[str], str]:
    try:
        from nltk.stem.porter import PorterStemmer
    except ImportError as error:
        raise missing("nltk", "F1Reward") from error
    stem: Callable[[str], str] = PorterStemmer().stem
    return stem
