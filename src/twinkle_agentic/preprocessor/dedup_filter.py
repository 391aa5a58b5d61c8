"""Conversations that begin alike."""

from collections.abc import Hashable

from twinkle.data_format.columns import columns_to_rows
from twinkle.errors import InvalidInputError
from twinkle.utils.logger import get_logger
from twinkle_agentic.preprocessor.message_normalizer import is_heartbeat
from twinkle_agentic.preprocessor.utils import Result, Row, Rows, messages_of, text_of, thoughts_and_answer

__all__ = ["DedupFilter"]


class DedupFilter:
    """Drops all rows but one of those with the same beginning (``duplicate``).

    Rows have the same beginning if the first ``prefix_chars`` characters of the first real user turn are equal, and the
    first and the last ``asst_chars`` characters of the first reply after it. Case and spaces do not matter, nor do
    thoughts. A real user turn has text and is not a heartbeat. Of equal rows the one with most messages is kept, the
    first of several. Rows without a real user turn, or without a reply to it, are kept.

    Duplicates are found among the rows of one call: with ``Dataset.map`` give ``batch_size=-1`` and no ``num_proc``.
    A second call of the same object logs a warning.
    """

    def __init__(self, prefix_chars: int = 100, asst_chars: int = 100) -> None:
        for name, value in (("prefix_chars", prefix_chars), ("asst_chars", asst_chars)):
            if not isinstance(value, int) or value < 1:
                raise InvalidInputError(name, value, "an integer ≥ 1")
        self.prefix_chars = prefix_chars
        self.asst_chars = asst_chars
        self._calls = 0

    def __call__(self, rows: Rows) -> Result:
        self._calls += 1
        if self._calls == 2:
            get_logger().warning(
                "DedupFilter was called more than once: duplicates across calls are not found. "
                "With Dataset.map, give batch_size=-1 and no num_proc"
            )
        table = columns_to_rows(rows)
        winners = self._winners(table)
        kept: list[Row] = []
        dropped: list[Row] = []
        for place, row in enumerate(table):
            if winners.get(self._key(row), place) == place:
                kept.append(row)
            else:
                dropped.append({**row, "drop_reason": "duplicate"})
        return kept, dropped

    def _winners(self, table: list[Row]) -> dict[Hashable, int]:
        """Return the place of the row that stays, for each beginning."""
        winners: dict[Hashable, int] = {}
        for place, row in enumerate(table):
            key = self._key(row)
            if key is None:
                continue
            if key not in winners or len(messages_of(row)) > len(messages_of(table[winners[key]])):
                winners[key] = place
        return winners

    def _key(self, row: Row) -> Hashable | None:
        question: str | None = None
        for message in messages_of(row):
            if message.get("role") == "user" and question is None:
                text = _plain(text_of(message))
                if text and not is_heartbeat(text):
                    question = text
            elif message.get("role") == "assistant" and question is not None:
                reply = _plain(thoughts_and_answer(message)[1])
                return question[: self.prefix_chars], reply[: self.asst_chars], reply[-self.asst_chars :]
        return None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
