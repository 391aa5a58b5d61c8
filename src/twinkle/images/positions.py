"""The places of images among the tokens of a sequence, and the positions of all its tokens.

Positions are for rotary embeddings with three axes: time, row, column.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from twinkle.errors import InvalidInputError

IntArray = NDArray[np.int64]


def sizes_in_tokens(grids: IntArray, merge: int, field: str) -> list[tuple[int, int]]:
    """Return rows and columns of images in tokens, each of which stands for merge × merge patches.

    grids (images, 3): frames (1), rows and columns in patches. InvalidInputError: there can be no such image.
    """
    if grids.ndim != 2 or grids.shape[1] != 3 or grids.dtype.kind not in "iu":
        given = f"{grids.dtype} of shape {grids.shape}"
        raise InvalidInputError(field, given, "integers of shape (images, 3): frames, rows and columns in patches")
    wrong = (grids[:, 0] != 1) | (grids[:, 1:] < 1).any(1) | (grids[:, 1:] % merge != 0).any(1)
    if wrong.any():
        number = int(np.flatnonzero(wrong)[0])
        allowed = f"1, and rows and columns of patches that {merge} divides"
        raise InvalidInputError(f"{field}[{number}]", grids[number].tolist(), allowed)
    # Python's integers: the numbers are the client's, and their product must not wrap around.
    return [(rows // merge, columns // merge) for _, rows, columns in grids.tolist()]


def first_tokens(places: IntArray, sizes: Sequence[tuple[int, int]], field: str, number: int = 0) -> list[int]:
    """Return the index of the first token of each image of a sequence.

    places: the indices of all tokens of its images. sizes: rows and columns of images, of which the first ones are its
    own; ``number`` is that of the first one, for errors.
    """
    firsts: list[int] = []
    used = 0
    while used < len(places):
        count = sizes[len(firsts)][0] * sizes[len(firsts)][1] if len(firsts) < len(sizes) else 0
        own = places[used : used + count]
        if not count or len(own) < count or own[-1] - own[0] + 1 != count:
            allowed = f"{count} image tokens in a row from index {places[used]} on" if count else "fewer image tokens"
            raise InvalidInputError(f"{field}[{number + len(firsts)}]", f"an image of {count} tokens", allowed)
        firsts.append(int(own[0]))
        used += count
    return firsts


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
