"""Conversion of a table between rows (a list of dicts) and columns (a dict of lists)."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import InvalidInputError

__all__ = ["columns_to_rows", "rows_to_columns"]

Row = dict[str, Any]
Columns = dict[str, list[Any]]


def columns_to_rows(columns: Mapping[str, Sequence[Any]] | Sequence[Row]) -> list[Row]:
    """Return the rows of a table. A list of rows is returned as a new list of the same rows."""
    if not isinstance(columns, Mapping):
        return list(columns)
    if not columns:
        return []
    names = list(columns)
    lengths = {name: len(columns[name]) for name in names}
    if len(set(lengths.values())) > 1:
        raise InvalidInputError("columns", lengths, "columns of one length")
    return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def rows_to_columns(
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Any], keys: Sequence[str] | None = None
) -> Columns:
    """Return the columns of a table. A single row counts as a table of one row.

    The columns are ``keys`` or, without them, every key of any row in the order of first appearance. A row without a
    key gets None in that column.
    """
    table = [rows] if isinstance(rows, Mapping) else rows
    names = list(dict.fromkeys(key for row in table for key in row)) if keys is None else list(keys)
    return {name: [row.get(name) for row in table] for name in names}
