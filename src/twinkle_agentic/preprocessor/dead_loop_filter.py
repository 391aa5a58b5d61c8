"""Replies that hesitate, correct themselves or repeat themselves without end."""

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from twinkle_agentic.preprocessor.utils import (
    Result,
    Row,
    Rows,
    drop_rows,
    is_agent_row,
    messages_of,
    thoughts_and_answer,
)

__all__ = ["DeadLoopFilter"]

_CORRECTIONS = (
    r"\bwait\b|\bhold on\b|\bno, (?:that|this|it)\b|\bactually, (?:no|wait|that|let)\b|\bon second thought\b|"
    r"\blet me (?:re-?think|re-?consider|re-?check|re-?do|start over|try again|correct)\b|\bscratch that\b|"
    r"\bthat(?:'s| is) (?:wrong|not right|incorrect)\b|\bi made a mistake\b|"
    "不对|等等|等一下|让我重新|重新(?:考虑|思考|计算|检查)|我(?:搞|弄|算)错了|再想想|"
    "待って|違う|いや、|もう一度考え|잠깐|아니,|다시 생각"
)
_HESITATIONS = (
    r"\bhmm+\b|\bumm*\b|\buhh*\b|\bactually\b|\bmaybe\b|\bperhaps\b|\bi'm not sure\b|\bi am not sure\b|"
    r"\blet me think\b|\balternatively\b|\bor maybe\b|"
    "嗯|也许|或许|可能是|不确定|让我想想|好像|うーん|えっと|たぶん|かもしれない|음\\.\\.\\.|글쎄|아마"
)
# The first group is a correction.
_HESITATION = re.compile(f"({_CORRECTIONS})|{_HESITATIONS}", re.IGNORECASE)
# A word of letters and digits; each Chinese, Japanese or Korean character is a word of its own.
_WORD = re.compile(
    "[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]|[^\\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)
_SHORT = 1000  # characters; the density of a shorter text is counted as if it had this length


@dataclass(frozen=True)
class _Limits:
    hesitation_density: float
    cascade: int
    repetition: float


class DeadLoopFilter:
    """Drops rows in which a reply goes round in circles (``dead_loop``). Agent rows pass.

    A reply does so if one of these holds for its text or, with the ``think_…`` limits, for its thoughts:

    - more than ``hesitation_density_threshold`` words of hesitation per 1000 characters (shorter texts count as
      1000);
    - ``cascade_threshold`` corrections or more begin within ``cascade_window`` characters;
    - a share of more than ``repetition_threshold`` of its ``ngram_size``-grams of words repeats an earlier one. Texts
      below ``ngram_min_words`` words are not checked.
    """

    def __init__(
        self,
        hesitation_density_threshold: float = 7.0,
        cascade_window: int = 800,
        cascade_threshold: int = 5,
        repetition_threshold: float = 0.45,
        ngram_size: int = 8,
        ngram_min_words: int = 30,
        think_hesitation_density_threshold: float = 15.0,
        think_cascade_threshold: int = 20,
        think_repetition_threshold: float = 0.65,
    ) -> None:
        self.cascade_window = cascade_window
        self.ngram_size = ngram_size
        self.ngram_min_words = ngram_min_words
        self._of_text = _Limits(hesitation_density_threshold, cascade_threshold, repetition_threshold)
        self._of_thoughts = _Limits(
            think_hesitation_density_threshold, think_cascade_threshold, think_repetition_threshold
        )

    def __call__(self, rows: Rows) -> Result:
        return drop_rows(rows, self._reason)

    def _reason(self, row: Row) -> str | None:
        if is_agent_row(row):
            return None
        replies = (message for message in messages_of(row) if message.get("role") == "assistant")
        for thoughts, answer in map(thoughts_and_answer, replies):
            if self._loops(thoughts, self._of_thoughts) or self._loops(answer, self._of_text):
                return "dead_loop"
        return None

    def _loops(self, text: str, limits: _Limits) -> bool:
        places = [(match.start(), match[1] is not None) for match in _HESITATION.finditer(text)]
        if len(places) * 1000 / max(len(text), _SHORT) > limits.hesitation_density:
            return True
        if self._most_within_window([place for place, corrects in places if corrects]) >= limits.cascade:
            return True
        return self._repeated_share(text) > limits.repetition

    def _most_within_window(self, places: list[int]) -> int:
        """Return the largest number of places within one window. They are in ascending order."""
        window: deque[int] = deque()
        most = 0
        for place in places:
            window.append(place)
            while place - window[0] >= self.cascade_window:
                window.popleft()
            most = max(most, len(window))
        return most

    def _repeated_share(self, text: str) -> float:
        words = [match[0].casefold() for match in _WORD.finditer(text)]
        if len(words) < max(self.ngram_min_words, self.ngram_size):
            return 0.0
        grams = list(_ngrams(words, self.ngram_size))
        return 1 - len(set(grams)) / len(grams)


def _ngrams(words: list[str], size: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(size)), strict=False)
