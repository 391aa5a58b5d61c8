"""Texts with many special characters, found with data_juicer."""

from twinkle.errors import InvalidInputError
from twinkle_agentic.preprocessor.data_juicer_ops import Operator
from twinkle_agentic.preprocessor.utils import Result, Row, Rows, check_roles, drop_rows, joined_text

__all__ = ["SpecialCharsFilter"]


class SpecialCharsFilter:
    """Drops rows in which the texts of one role have too large a share of special characters (special_chars_ratio).

    What is special (punctuation, digits, spaces, emoji …) is decided by data_juicer's ``special_characters_filter``,
    which this step needs. A row without text of that role is kept.
    """

    def __init__(self, max_ratio: float = 0.25, role: str = "assistant") -> None:
        if not isinstance(max_ratio, int | float) or not 0 <= max_ratio <= 1:
            raise InvalidInputError("max_ratio", max_ratio, "a share in [0, 1]")
        self.max_ratio = max_ratio
        self.role = check_roles("role", [role])[0]
        self._operator = Operator(
            "SpecialCharsFilter",
            "filter.special_characters_filter",
            "SpecialCharactersFilter",
            max_ratio=float(max_ratio),
        )

    def __call__(self, rows: Rows) -> Result:
        return drop_rows(rows, self._reason)

    def _reason(self, row: Row) -> str | None:
        text = joined_text(row, self.role)
        return None if not text or self._operator.keeps(text) else "special_chars_ratio"
