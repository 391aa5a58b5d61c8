"""The interfaces of preprocessors and filters, and functions that our preprocessors share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle.data_format import Message, pack_value
from twinkle.data_format.columns import Columns, Row, columns_to_rows, rows_to_columns
from twinkle.errors import InvalidInputError

__all__ = ["DataFilter", "Preprocessor", "by_row", "column", "notes", "text_message"]


class Preprocessor(ABC):
    """Turns a batch of columns into a batch of new columns.

    Our own preprocessors work on single rows and also have ``preprocess(row)``, for datasets that are read row by row.
    """

    map_col_to_row = staticmethod(columns_to_rows)
    map_row_to_col = staticmethod(rows_to_columns)

    @abstractmethod
    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> Columns:
        """Return the new columns, all of the same length."""


class DataFilter(ABC):
    """Decides whether a row is kept."""

    @abstractmethod
    def __call__(self, row: Row) -> bool:
        """Return True to keep the row."""


def by_row(preprocess: Callable[[Row], Mapping[str, Any]], columns: Mapping[str, Sequence[Any]]) -> Columns:
    """Apply ``preprocess`` to each row of a batch of columns, and return the new columns."""
    return rows_to_columns([preprocess(row) for row in columns_to_rows(columns)])


def column(row: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first of these columns that is not None in the row; raise if there is none."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise InvalidInputError("columns", sorted(row), f"one named {' or '.join(names)}, with a value in every row")


def text_message(role: str, text: str) -> Message:
    return {"role": role, "content": text}  # type: ignore[typeddict-item]  # role is one of four names


def notes(**values: object) -> list[tuple[str, str]]:
    """Return the values as ``user_data`` of a trajectory."""
    return [(key, pack_value(value)) for key, value in values.items()]
