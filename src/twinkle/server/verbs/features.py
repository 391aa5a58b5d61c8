"""Check rows of tokens that clients send: lists of numbers, among many columns that training does not read."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model.types import IntArray

MAX_ROWS = 4096
_TOKENS = "input_ids"
# The columns that training reads; all others of a row (messages, length, columns of its dataset) are dropped.
FIELDS = (_TOKENS, "labels", "attention_mask", "position_ids", "completion_mask")
UNSUPPORTED = (
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "input_features",
    "inputs_embeds",
    "routed_experts",
)
_LIMIT = 2**31

Row = Mapping[str, IntArray]  # (T,) each


def as_rows(inputs: object) -> list[Mapping[str, object]]:
    """Return the inputs of a request, one feature or trajectory or a list of them, as a list."""
    rows = [inputs] if isinstance(inputs, Mapping) else inputs
    if not isinstance(rows, list | tuple) or not 1 <= len(rows) <= MAX_ROWS:
        shown = f"{len(rows)} rows" if isinstance(rows, list | tuple) else rows
        raise InvalidInputError("inputs", shown, f"an InputFeature or Trajectory, or a list of 1 to {MAX_ROWS}")
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InvalidInputError(f"inputs[{index}]", row, "an InputFeature or Trajectory")
    return list(rows)


def are_encoded(rows: Sequence[Mapping[str, object]]) -> bool:
    """Return whether the rows are features, which have tokens; trajectories have none yet.

    InvalidInputError: some are features and some are not.
    """
    encoded = {_TOKENS in row for row in rows}
    if len(encoded) > 1:
        raise InvalidInputError("inputs", "some encoded and some not", "InputFeatures or Trajectories, not both")
    return encoded == {True}


def checked_rows(rows: Sequence[Mapping[str, object]], max_tokens: int) -> tuple[Row, ...]:
    """Return the rows with the fields that training reads, checked: each field has one number for each token. The field
    ``labels`` may have a single one.

    InvalidInputError: a row is invalid, or all rows together have more than ``max_tokens``.
    """
    checked = tuple(_row(row, f"inputs[{index}]") for index, row in enumerate(rows))
    texts = [len(row["labels"]) != len(row[_TOKENS]) for row in checked if "labels" in row]
    if any(texts) and sum(texts) + sum(len(row[_TOKENS]) == 1 for row in checked) < len(checked):
        raise InvalidInputError("inputs", "labels of texts and labels of tokens", "one kind in a request")
    tokens = sum(len(row[_TOKENS]) for row in checked)
    if tokens > max_tokens:
        raise InvalidInputError("inputs", f"{tokens} tokens", f"at most {max_tokens} in one request")
    return checked


def _row(row: Mapping[str, object], where: str) -> Row:
    for name in UNSUPPORTED:
        if row.get(name) is not None:
            raise UnsupportedError(f"{where}.{name}: the models served here read text only")
    fields = {name: numbers(row[name], f"{where}.{name}") for name in FIELDS if row.get(name) is not None}
    if _TOKENS not in fields or not len(fields[_TOKENS]):
        raise InvalidInputError(f"{where}.{_TOKENS}", row.get(_TOKENS), "at least one token id")
    for name, values in fields.items():
        is_of_text = name == "labels" and len(values) == 1  # one label for the whole text, as losses on embeddings read
        if len(values) != len(fields[_TOKENS]) and not is_of_text:
            allowed = f"{len(fields[_TOKENS])}, as {_TOKENS}"
            raise InvalidInputError(f"{where}.{name}", f"{len(values)} numbers", allowed)
    return fields


def numbers(value: object, where: str) -> IntArray:
    """Return whole numbers, (T,). Of a nested list (a batch of one, rope axes) take the first row: the text's."""
    while isinstance(value, list | np.ndarray) and len(value) > 0 and isinstance(value[0], list | np.ndarray):
        value = value[0]
    if isinstance(value, list | np.ndarray):
        try:
            column = np.asarray(value)
        except (ValueError, OverflowError):  # lists of different lengths
            column = np.asarray(None)
        if column.ndim == 1 and column.dtype.kind in "biuf" and _are_whole(column):
            return column.astype(np.int64)
    shown = list(value[:8]) if isinstance(value, list | np.ndarray) else value
    raise InvalidInputError(where, str(shown)[:80], "a list of whole numbers")


def _are_whole(column: NDArray[Any]) -> bool:
    """Return whether all values are integers of 32 bits, whatever their type. NaN and infinity are not."""
    if not column.size:
        return True
    inside = bool((column >= -_LIMIT).all() and (column < _LIMIT).all()) if column.dtype.kind != "b" else True
    return inside and (column.dtype.kind != "f" or bool((column == np.trunc(column)).all()))
