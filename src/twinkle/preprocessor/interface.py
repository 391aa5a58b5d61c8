"""What a preprocessor and a filter are, and what every one of ours needs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle.data_format import Message, pack_value
from twinkle.data_format.columns import Columns, Row, columns_to_rows, rows_to_columns
from twinkle.errors import InvalidInputError

__all__ = ["DataFilter", "Preprocessor", "by_row", "column", "notes", "text_message"]


class Preprocessor(ABC):
    """Turns a batch of columns into a batch of new columns.

    Ours, which look at one row at a time, also have ``preprocess(row)`` for datasets that read row by row.
    """

    map_col_to_row = staticmethod(columns_to_rows)
    map_row_to_col = staticmethod(rows_to_columns)

    @abstractmethod
    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> Columns:
        """The new columns, all of one length."""


class DataFilter(ABC):
    """Decides of one row whether it stays."""

    @abstractmethod
    def __call__(self, row: Row) -> bool:
        """True to keep the row."""


def by_row(preprocess: Callable[[Row], Mapping[str, Any]], columns: Mapping[str, Sequence[Any]]) -> Columns:
    """A batch by way of its rows."""
    return rows_to_columns([preprocess(row) for row in columns_to_rows(columns)])


def column(row: Mapping[str, Any], *names: str) -> Any:
    """The value in the first of these columns that the row has."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise InvalidInputError("columns", sorted(row), f"one named {' or '.join(names)}, with a value in every row")


def text_message(role: str, text: str) -> Message:
    return {"role": role, "content": text}  # type: ignore[typeddict-item]  # a name out of four


def notes(**values: object) -> list[tuple[str, str]]:
    """``user_data``."""
    return [(key, pack_value(value)) for key, value in values.items()]
