"""Truncation of sequences that are longer than a template's ``max_length``."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.template.media import images_of

__all__ = ["TRUNCATION_STRATEGIES", "truncate"]

Feature = dict[str, Any]
Places = Sequence[tuple[int, int, int]]  # the first token, the rows and the columns of each image, in tokens

# The keys of a feature that have one entry for each token, before masks and positions are added.
PER_TOKEN = ("input_ids", "labels", "completion_mask", "mm_token_type_ids")


def truncate(feature: Feature, max_length: int, strategy: str, images: Places = ()) -> list[Feature]:
    """Return the features that replace this one. A feature that is short enough is returned unchanged.

    ``images``: the places of its images. An image is kept whole or not at all, so a row may become shorter still.
    """
    if strategy not in TRUNCATION_STRATEGIES:
        raise UnknownNameError("truncation_strategy", strategy, TRUNCATION_STRATEGIES)
    if len(feature["input_ids"]) <= max_length:
        return [feature]
    return TRUNCATION_STRATEGIES[strategy](feature, max_length, images)


def _refuse(feature: Feature, max_length: int, images: Places) -> list[Feature]:
    length = len(feature["input_ids"])
    # users of the original library search the message for this phrase
    raise InvalidInputError("messages", f"Input length {length} exceeds max_length {max_length}", "shorter ones")


def _keep_last(feature: Feature, max_length: int, images: Places) -> list[Feature]:
    length = len(feature["input_ids"])
    start = length - max_length
    ends = [first + rows * columns for first, rows, columns in images]
    start = next((end for (first, _, _), end in zip(images, ends, strict=True) if first < start < end), start)
    kept = [first >= start for first, _, _ in images]
    return [_with_images(_cut(feature, start, length), kept)]


def _keep_first(feature: Feature, max_length: int, images: Places) -> list[Feature]:
    end = next((first for first, rows, columns in images if first < max_length < first + rows * columns), max_length)
    kept = [first < end for first, _, _ in images]
    return [_with_images(_cut(feature, 0, end), kept)]


def _split(feature: Feature, max_length: int, images: Places) -> list[Feature]:
    if images:
        raise InvalidInputError("truncation_strategy", "split", "another one for rows with images")
    starts = range(0, len(feature["input_ids"]), max_length)
    return [_cut(feature, start, start + max_length) for start in starts]


def _drop(feature: Feature, max_length: int, images: Places) -> list[Feature]:
    return []


def _cut(feature: Feature, start: int, end: int) -> Feature:
    return {**feature, **{key: feature[key][start:end] for key in PER_TOKEN if key in feature}}


def _with_images(feature: Feature, kept: Sequence[bool]) -> Feature:
    """Return a feature with some of its images. Without patches these are in ``images``: its messages keep all."""
    if all(kept):
        return feature
    grids = np.asarray(feature["image_grid_thw"])
    patches = np.repeat(kept, grids.prod(1))
    changed = {**feature, "image_grid_thw": grids[np.array(kept)]}
    if "pixel_values" in feature:
        changed["pixel_values"] = np.asarray(feature["pixel_values"])[patches]
    elif len(files := images_of(feature)) == len(kept):
        changed["images"] = [file for file, is_kept in zip(files, kept, strict=True) if is_kept]
    if not any(kept):
        return {key: value for key, value in changed.items() if key not in ("image_grid_thw", "pixel_values")}
    return changed


TRUNCATION_STRATEGIES: dict[str, Callable[[Feature, int, Places], list[Feature]]] = {
    "raise": _refuse,
    "left": _keep_last,
    "right": _keep_first,
    "split": _split,
    "delete": _drop,
}
