"""Finds the images of a row of tokens that has them as patches, in the form that templates make and clients send.

Such a row has the model's image token at the places of its images already. It does not import torch.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinkle.errors import InvalidInputError
from twinkle.images.positions import first_tokens, sizes_in_tokens
from twinkle.model.types import FloatArray, Image, IntArray, VisionSpec

# Media that no model here reads, by the names that rows have for them.
UNREAD_MEDIA = ("pixel_values_videos", "video_grid_thw", "input_features", "feature_attention_mask", "grid_thws")


@dataclass(frozen=True)
class RowPatches:
    """The images of one or several sequences as patches.

    ``patches``: of all images, (patches, patch width). ``grids`` (images, 3): frames (1), rows and columns of each
    image, in patches. ``fields``: the names of both in errors.
    """

    patches: FloatArray
    grids: IntArray
    fields: tuple[str, str]


def read_patches(row: Mapping[str, Any], vision: VisionSpec | None, field: str) -> RowPatches | None:
    """Return the patches in a row; None: it has no images. ``vision``: None for a model that reads text only."""
    for name in UNREAD_MEDIA:
        if row.get(name) is not None:
            raise InvalidInputError(f"{field}.{name}", "given", "none: videos and sounds are not read")
    values = [row.get(name) for name in ("pixel_values", "image_grid_thw")]
    if all(value is None for value in values):
        return None
    fields = f"{field}.pixel_values", f"{field}.image_grid_thw"
    if vision is None:
        raise InvalidInputError(fields[0], "given", "none: this model reads text only")
    for name, other, value in zip(fields, reversed(fields), values, strict=True):
        if value is None:
            raise InvalidInputError(name, None, f"an array beside {other}")
    return RowPatches(_patches(values[0], fields[0], vision), _array(values[1], fields[1]), fields)


def place_patches(
    sequences: Sequence[IntArray],
    types: Sequence[IntArray] | None,
    given: RowPatches,
    vision: VisionSpec,
    owner: str,
) -> list[tuple[Image, ...]]:
    """Return the images of each sequence, in their order. Each sequence has all tokens of its images.

    ``types``: 1 for the tokens of images, 0 for text; without them the model's image token is one of an image.
    ``owner``: digests of different owners differ.
    """
    sizes = sizes_in_tokens(given.grids, vision.merge, given.fields[1])
    marks = [tokens == vision.image_token for tokens in sequences]
    if types is not None:
        marks = [mark & (kind == 1) for mark, kind in zip(marks, types, strict=True)]
    places = [np.flatnonzero(mark) for mark in marks]
    _check_count(given, sizes, sum(map(len, places)), vision)
    placed: list[tuple[Image, ...]] = []
    number = patch = 0
    for own in places:
        images = []
        for first in first_tokens(own, sizes[number:], given.fields[1], number):
            rows, columns = sizes[number]
            count = rows * columns * vision.merge**2
            pixels = np.ascontiguousarray(given.patches[patch : patch + count])
            images.append(Image(first, rows, columns, owner_digest(owner, b"patches", pixels.tobytes()), pixels))
            patch, number = patch + count, number + 1
        placed.append(tuple(images))
    return placed


def images_in_row(
    row: Mapping[str, Any], vision: VisionSpec | None, *, owner: str = "", field: str = "inputs[0]"
) -> tuple[Image, ...]:
    """Return the images of a row with ``pixel_values`` and ``image_grid_thw``; none if it has neither.

    Their places are where ``mm_token_type_ids`` is 1, or without that key, where the model's image token is. A model
    may draw that token: beside types it is text.
    """
    given = read_patches(row, vision, field)
    if given is None or vision is None:
        return ()
    tokens: IntArray = np.asarray(row["input_ids"], np.int64).reshape(-1)
    kinds = row.get("mm_token_type_ids")
    types = None if kinds is None else [np.asarray(kinds, np.int64).reshape(-1)]
    if types is not None and len(types[0]) != len(tokens):
        raise InvalidInputError(f"{field}.mm_token_type_ids", f"{len(types[0])} entries", f"{len(tokens)}")
    return place_patches([tokens], types, given, vision, owner)[0]


def owner_digest(owner: str, kind: bytes, data: bytes) -> str:
    """Return a digest that depends on its owner: nobody can find out whether others have the same image."""
    key = hashlib.blake2b(owner.encode(), digest_size=32).digest()
    return hashlib.blake2b(data, key=key, digest_size=24, person=kind[:16]).hexdigest()


def _patches(value: Any, field: str, vision: VisionSpec) -> FloatArray:
    array = _array(value, field)
    if array.dtype.kind not in "fiu" or array.ndim != 2 or array.shape[1] != vision.patch_width:
        given = f"{array.dtype} of shape {array.shape}"
        raise InvalidInputError(field, given, f"numbers of shape (patches, {vision.patch_width})")
    patches: FloatArray = array.astype(np.float32, copy=False)
    if not np.isfinite(patches).all():
        raise InvalidInputError(field, "NaN or infinity", "finite numbers")
    return patches


def _array(value: Any, field: str) -> Any:
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:  # for example ragged lists
        raise InvalidInputError(field, str(error)[:80], "an array of numbers") from error


def _check_count(given: RowPatches, sizes: Sequence[tuple[int, int]], image_tokens: int, vision: VisionSpec) -> None:
    """Raise unless the grids have as many tokens as the sequences have, and as many patches as there are."""
    tokens = sum(rows * columns for rows, columns in sizes)
    if tokens != image_tokens:
        allowed = f"grids of {image_tokens} tokens: there are so many tokens {vision.image_token}"
        raise InvalidInputError(given.fields[1], f"grids of {tokens} tokens", allowed)
    shape = tokens * vision.merge**2, vision.patch_width
    if given.patches.shape != shape:
        raise InvalidInputError(given.fields[0], f"shape {given.patches.shape}", f"{shape}")
