"""Preprocessors of preference datasets, which have two answers to one question."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import Trajectory
from twinkle.data_format.columns import Columns, Row
from twinkle.preprocessor.interface import Preprocessor, by_row, column, text_message

__all__ = ["EmojiDPOProcessor"]


class EmojiDPOProcessor(Preprocessor):
    """Makes the columns ``positive`` and ``negative``, one trajectory each, from the columns named by the arguments."""

    def __init__(
        self,
        system: str | None = None,
        chosen_key: str = "answer_zh",
        rejected_key: str = "answer_en",
        prompt_key: str = "prompt",
    ) -> None:
        self.system = system
        self.chosen_key = chosen_key
        self.rejected_key = rejected_key
        self.prompt_key = prompt_key

    def preprocess(self, row: Row) -> dict[str, Trajectory]:
        prompt = column(row, self.prompt_key)
        return {
            "positive": self._trajectory(prompt, column(row, self.chosen_key)),
            "negative": self._trajectory(prompt, column(row, self.rejected_key)),
        }

    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> Columns:
        return by_row(self.preprocess, columns)

    def _trajectory(self, prompt: str, answer: str) -> Trajectory:
        system = [] if self.system is None else [text_message("system", self.system)]
        return {"messages": [*system, text_message("user", prompt), text_message("assistant", answer)]}
