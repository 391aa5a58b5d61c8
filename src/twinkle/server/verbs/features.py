"""Check rows of tokens that clients send: lists of numbers, among many columns that training does not read.

A row may have images: as patches (``pixel_values`` and ``image_grid_thw``), or as files (``images``, or ``image`` in
``multi_modal_data``). Nothing here decodes an image, and nothing opens a path or a URL.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinkle.errors import InvalidInputError, LimitExceededError, UnsupportedError
from twinkle.images import SentImage, SentImages, SentPatches
from twinkle.model.types import IntArray
from twinkle.server.wire.image_files import ImageAllowance, from_message
from twinkle.server.wire.number_arrays import PATCHES, ROUTES, read_patches, read_routes
from twinkle.template.media import images_of

MAX_ROWS = 4096
_TOKENS = "input_ids"
# The columns that training reads; all others of a row (messages, length, columns of its dataset) are dropped.
FIELDS = (_TOKENS, "labels", "attention_mask", "position_ids", "completion_mask")
# Columns of other media than text and images, and other columns that would change what is computed.
UNSUPPORTED = (
    "pixel_values_videos",
    "video_grid_thw",
    "videos",
    "input_features",
    "audios",
    "inputs_embeds",
)
GRIDS, IMAGES, MULTI_MODAL = "image_grid_thw", "images", "multi_modal_data"
TYPES = "mm_token_type_ids"  # 1 for the tokens of images
_LIMIT = 2**31

# Its columns, (T,) each; routed_experts (T, layers, K); under "images" SentImages, if it has some.
Row = Mapping[str, Any]


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


def checked_rows(
    rows: Sequence[Mapping[str, object]], max_tokens: int, left: ImageAllowance | None = None
) -> tuple[Row, ...]:
    """Return the rows with the fields that training reads, checked: each field has one number for each token. The field
    ``labels`` may have a single one.

    ``left``: the images that the rows may have; None: as many as they like. InvalidInputError: a row is invalid, or all
    rows together have more than ``max_tokens``.
    """
    left = left or ImageAllowance()
    checked = tuple(_row(row, f"inputs[{index}]", left) for index, row in enumerate(rows))
    texts = [len(row["labels"]) != len(row[_TOKENS]) for row in checked if "labels" in row]
    if any(texts) and sum(texts) + sum(len(row[_TOKENS]) == 1 for row in checked) < len(checked):
        raise InvalidInputError("inputs", "labels of texts and labels of tokens", "one kind in a request")
    tokens = sum(len(row[_TOKENS]) for row in checked)
    if tokens > max_tokens:
        raise InvalidInputError("inputs", f"{tokens} tokens", f"at most {max_tokens} in one request")
    return checked


def _row(row: Mapping[str, object], where: str, left: ImageAllowance) -> Row:
    fields: dict[str, Any] = {
        name: numbers(row[name], f"{where}.{name}") for name in FIELDS if row.get(name) is not None
    }
    if _TOKENS not in fields or not len(fields[_TOKENS]):
        raise InvalidInputError(f"{where}.{_TOKENS}", row.get(_TOKENS), "at least one token id")
    for name, values in fields.items():
        is_of_text = name == "labels" and len(values) == 1  # one label for the whole text, as losses on embeddings read
        if len(values) != len(fields[_TOKENS]) and not is_of_text:
            allowed = f"{len(fields[_TOKENS])}, as {_TOKENS}"
            raise InvalidInputError(f"{where}.{name}", f"{len(values)} numbers", allowed)
    if row.get(ROUTES) is not None:
        fields[ROUTES] = read_routes(row[ROUTES], f"{where}.{ROUTES}", len(fields[_TOKENS]))
    images = sent_images(row, where, left)
    if images:
        _check_one_sequence(fields, images, where)
        fields[IMAGES] = images
    return fields


def sent_images(row: Mapping[str, Any], where: str, left: ImageAllowance) -> SentImages:
    """Return the images of a row, and subtract them from what is ``left``. Video and audio are refused by name.

    Patches are what the row's tokens were made with: beside them, files are not read.
    """
    for name in UNSUPPORTED:
        if _is_given(row.get(name)):
            raise UnsupportedError(f"{where}.{name}: the models served here read text and images")
    types = None if row.get(TYPES) is None else numbers(row[TYPES], f"{where}.{TYPES}")
    if row.get(PATCHES) is not None:
        return SentImages(patches=_patches(row, where, left), types=types)
    files = _sent_files(row, where, left)
    if not files and _is_given(row.get(GRIDS)):
        raise InvalidInputError(f"{where}.{GRIDS}", "grids", f"none without {PATCHES} or {IMAGES}")
    return replace(files, types=types) if files else files


def _sent_files(row: Mapping[str, Any], where: str, left: ImageAllowance) -> SentImages:
    beside = row.get(MULTI_MODAL)
    if beside is None:
        return row_files(row, where, left)
    if not isinstance(beside, Mapping) or set(beside) - {"image"}:
        given = sorted(map(str, beside)) if isinstance(beside, Mapping) else beside
        raise InvalidInputError(f"{where}.{MULTI_MODAL}", given, "image alone: an image, or a list of images")
    if _is_given(row.get(IMAGES)):
        raise InvalidInputError(f"{where}.{IMAGES}", "images", f"none beside {MULTI_MODAL}")
    return _files(beside.get("image"), f"{where}.{MULTI_MODAL}.image", left)


def row_files(row: Mapping[str, Any], where: str, left: ImageAllowance) -> SentImages:
    """Return the image files of a row: those of ``images``, or else of its messages. Each is subtracted from ``left``.

    They are the files of a conversation, too, before and after a template has encoded it.
    """
    if _is_given(row.get(IMAGES)):
        return _files(row[IMAGES], f"{where}.{IMAGES}", left)
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return SentImages()
    return _files(images_of(row), f"{where}.{IMAGES}", left)


def image_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of an encoded row that hold its images. Those of its messages are put into ``images``."""
    columns = {name: row[name] for name in (PATCHES, GRIDS, TYPES, IMAGES, MULTI_MODAL) if _is_given(row.get(name))}
    if GRIDS in columns and not columns.keys() & {PATCHES, IMAGES, MULTI_MODAL}:
        columns[IMAGES] = images_of(row)
    return columns


def image_characters(inputs: object) -> int:
    """Return how many characters of a request's inputs are images, files and packed patches, or packed routes."""
    rows = inputs if isinstance(inputs, list) else [inputs]
    return sum(_image_characters(row) for row in rows if isinstance(row, Mapping))


def _image_characters(row: Mapping[str, Any]) -> int:
    values: list[Any] = []
    values += [row[name].get("data") for name in (PATCHES, ROUTES) if isinstance(row.get(name), Mapping)]
    if isinstance(row.get(MULTI_MODAL), Mapping):
        values.append(row[MULTI_MODAL].get("image"))
    messages = row.get("messages")
    if messages is None or (isinstance(messages, list) and all(isinstance(each, Mapping) for each in messages)):
        values += images_of({**row, MULTI_MODAL: None})
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    files = [each.get("bytes") if isinstance(each, Mapping) else each for each in flat]
    return sum(len(each) for each in files if isinstance(each, str))


def files_left(row: Mapping[str, Any], strategy: str, where: str, left: ImageAllowance | None = None) -> SentImages:
    """Return the image files of a conversation that a template has encoded, without those that it has cut off.

    ``strategy``: how the template truncates. ``left``: the images that the request may have.
    """
    found = row_files(row, where, left or ImageAllowance())
    kept = len(row[GRIDS]) if row.get(GRIDS) is not None else 0
    files = found.files[:kept] if strategy == "right" else found.files[len(found.files) - kept :]
    types = row[TYPES] if files else None
    return SentImages(files, beside=True, types=types)


def _files(given: object, field: str, left: ImageAllowance) -> SentImages:
    if not _is_given(given):
        return SentImages()
    values = given if isinstance(given, list | tuple) else [given]
    files = [_file(value, f"{field}[{number}]", left) for number, value in enumerate(values)]
    return SentImages(tuple(files), beside=True)


def _is_given(value: object) -> bool:
    """Return whether a column has a value: a table fills empty cells with None, and lists may be empty."""
    return value is not None and not (isinstance(value, list | tuple) and not any(each is not None for each in value))


def _file(value: object, field: str, left: ImageAllowance) -> SentImage:
    return SentImage(0, from_message(value, field, left), None, field)


def _patches(row: Mapping[str, Any], where: str, left: ImageAllowance) -> SentPatches:
    if row.get(GRIDS) is None:
        raise InvalidInputError(f"{where}.{GRIDS}", None, f"an array, because {PATCHES} is there")
    patches = read_patches(row[PATCHES], f"{where}.{PATCHES}")
    try:
        grids = np.asarray(row[GRIDS])
    except (ValueError, OverflowError):  # lists of different lengths
        grids = np.asarray(None)
    if grids.ndim != 2 or grids.shape[1] != 3 or grids.dtype.kind not in "iu" or not len(grids):
        raise InvalidInputError(f"{where}.{GRIDS}", str(row[GRIDS])[:80], "integers (images, 3): 1, rows and columns")
    left.images -= len(grids)
    if left.images < 0:
        field, allowed = f"{where}.{GRIDS}", f"{left.images + len(grids)}: what is left of the request's limit"
        raise LimitExceededError(field, f"{len(grids)} images", allowed, "max_images_per_request")
    return SentPatches(patches, grids.astype(np.int64), (f"{where}.{PATCHES}", f"{where}.{GRIDS}"))


def _check_one_sequence(fields: Mapping[str, IntArray], images: SentImages, where: str) -> None:
    """Raise InvalidInputError for a row with images that has padding, or several sequences."""
    length = len(fields[_TOKENS])
    if images.types is not None and len(images.types) != length:
        raise InvalidInputError(f"{where}.{TYPES}", f"{len(images.types)} numbers", f"{length}, as {_TOKENS}")
    if "attention_mask" in fields and not (fields["attention_mask"] == 1).all():
        raise InvalidInputError(f"{where}.attention_mask", "padding", "1 for each token of a row with images")
    if "position_ids" in fields and not np.array_equal(fields["position_ids"], np.arange(length)):
        allowed = "0, 1, 2 … as the first axis: a row with images is one sequence"
        raise InvalidInputError(f"{where}.position_ids", fields["position_ids"][:8].tolist(), allowed)


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
