"""Rows by the model that wrote them."""

import re
from collections.abc import Sequence

from twinkle.errors import InvalidInputError
from twinkle_agentic.preprocessor.utils import Result, Row, Rows, drop_rows

__all__ = ["ModelFilter"]

# Families of models that write long, careful answers. An organisation may stand before the name: `Qwen/Qwen3-32B`.
_FAMILIES = (
    "claude",
    "gpt-4",
    "gpt-5",
    "o[134]",
    "gemini-[23]",
    "qwen-?[3-9]",
    "qwen-max",
    "deepseek",
    "glm-[4-9]",
    "kimi",
    "minimax-m",
)
_ORGANISATION = r"(?:[\w.\-]+/)?"


class ModelFilter:
    """Drops rows whose model belongs to no allowed family (``model_not_allowed``), or that name no model.

    patterns: regular expressions of families. A model is allowed if one of them matches the beginning of its name, in
    any case; whatever follows is a version or a date. None: families of large models of several makers, with or
    without an organisation before the name. field: the column that names the model.
    """

    def __init__(self, patterns: Sequence[str] | None = None, field: str = "model_id") -> None:
        if isinstance(patterns, str):
            raise InvalidInputError("patterns", patterns, "a list of regular expressions")
        families = [_ORGANISATION + family for family in _FAMILIES] if patterns is None else patterns
        self.field = field
        self._patterns = [_compiled(pattern) for pattern in families]

    def __call__(self, rows: Rows) -> Result:
        return drop_rows(rows, self._reason)

    def _reason(self, row: Row) -> str | None:
        model = row.get(self.field)
        if isinstance(model, str) and any(pattern.fullmatch(model.strip()) for pattern in self._patterns):
            return None
        return "model_not_allowed"


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(?:{pattern}).*", re.IGNORECASE | re.DOTALL)
    except (re.error, TypeError) as error:
        raise InvalidInputError("patterns", pattern, f"regular expressions ({error})") from error
