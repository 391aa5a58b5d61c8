"""The positions of tokens in sequences with images, for rotary embeddings with three axes: time, row, column."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def position_axes(length: int, images: Iterable[tuple[int, int, int]]) -> NDArray[np.int64]:
    """Return the positions (3, length) of a sequence's tokens.

    images: the index of the first token, the rows and the columns of each image, in their order in the sequence; an
    image has rows × columns tokens. Text advances all axes by one a token. All tokens of an image have the time at
    which it begins, and their own row and column; what follows an image continues after its longer side.
    """
    axes = np.empty((3, length), np.int64)
    place = position = 0
    for first, rows, columns in images:
        axes[:, place:first] = np.arange(position, position + first - place)
        position += first - place
        place = first + rows * columns
        axes[0, first:place] = position
        axes[1, first:place] = position + np.repeat(np.arange(rows), columns)
        axes[2, first:place] = position + np.tile(np.arange(columns), rows)
        position += max(rows, columns)
    axes[:, place:] = np.arange(position, position + length - place)
    return axes
