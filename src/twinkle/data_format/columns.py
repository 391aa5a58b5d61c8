"""Rows and columns: the same table as a list of dicts and as a dict of lists."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import InvalidInputError

__all__ = ["columns_to_rows", "rows_to_columns"]

Row = dict[str, Any]
Columns = dict[str, list[Any]]


def columns_to_rows(columns: Mapping[str, Sequence[Any]] | Sequence[Row]) -> list[Row]:
    """The rows of a table; a list of rows is handed back as a new list of the same rows."""
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
    """The columns of a table; one row alone is a table, too.

    The columns are ``keys`` or, without them, every key that some row has, in the order of their first appearance; a
    row that lacks one has None there.
    """
    table = [rows] if isinstance(rows, Mapping) else rows
    names = list(dict.fromkeys(key for row in table for key in row)) if keys is None else list(keys)
    return {name: [row.get(name) for row in table] for name in names}
