"""Packing of several short sequences into one row: which sequences go together, and how their fields are joined."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import DataError

__all__ = ["DEFAULT_CAPACITY", "join_rows", "pack"]

# The capacity of a bin, in tokens, when the template has no max_length.
DEFAULT_CAPACITY = 2048

# Fields whose last axis is the sequence; other fields of numbers have it first.
_SEQUENCE_LAST = frozenset({"mm_token_type_ids", "position_ids"})
_TYPES = "mm_token_type_ids"
_OF_IMAGES = frozenset({"pixel_values", "image_grid_thw", _TYPES})


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Distribute ``lengths`` over bins of at most ``capacity``, first fit, longest first. Return the indices per bin.

    An item longer than a bin gets a bin of its own. Indices in a bin are in ascending order.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        length = lengths[place]
        for number, free in enumerate(room):
            if length <= free:
                bins[number].append(place)
                room[number] -= length
                break
        else:
            bins.append([place])
            room.append(max(0, capacity - length))
    return [sorted(places) for places in bins]


def join_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join encoded rows into one. Sequences are concatenated, lengths are summed, other fields become lists.

    Positions are concatenated unchanged, so they start again with each row. Rows without images may lack the fields of
    images.
    """
    rows = _like_rows_with_images(rows)
    names = rows[0].keys() - _OF_IMAGES
    for row in rows:
        if row.keys() - _OF_IMAGES != names:
            raise DataError(f"rows of one pack have different fields: {sorted(row.keys() - _OF_IMAGES ^ names)}")
    kept = list(dict.fromkeys(name for row in rows for name in row))
    return {name: _join(name, [row[name] for row in rows if name in row]) for name in kept}


def _like_rows_with_images(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return rows without the fields of images that are None; if one has images, all say which tokens are theirs."""
    rows = [{name: row[name] for name in row if name not in _OF_IMAGES or row[name] is not None} for row in rows]
    if not any(_TYPES in row for row in rows):
        return rows
    return [row if _TYPES in row else {**row, _TYPES: [0] * len(row["input_ids"])} for row in rows]


def _join(name: str, values: list[Any]) -> Any:
    import numpy as np

    if name == "length":
        return sum(values)
    if not all(_is_numeric(value) for value in values):
        return values
    axis = -1 if name in _SEQUENCE_LAST else 0
    return np.concatenate([np.asarray(value) for value in values], axis=axis)


def _is_numeric(value: Any) -> bool:
    """Return whether the value is a (nested) list or an array of numbers. Only the first element is checked."""
    import numpy as np

    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.dtype.kind in "biuf"
    while isinstance(value, list) and value:
        value = value[0]
        if isinstance(value, bool | int | float | np.number):
            return True
    return False
