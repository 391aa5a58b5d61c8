"""The inputs of a request for samples: rows of tokens or conversations, both with images, become features.

A feature is what a sample is appended to, and what clients train on afterwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from twinkle.data_format import SamplingParams
from twinkle.errors import InvalidInputError
from twinkle.images import EncodedImage, SentImages
from twinkle.images.sent import NO_IMAGES
from twinkle.model.types import Image, IntArray
from twinkle.server.backends.text_codec import text_groups
from twinkle.server.verbs.codec import ROWS_BYTES, read_fields
from twinkle.server.verbs.features import GRIDS, IMAGES, TYPES, are_encoded, as_rows, files_left, sent_images
from twinkle.server.verbs.templates import SamplingTemplate
from twinkle.server.wire.fields import check, parse
from twinkle.server.wire.image_files import ImageAllowance, data_uri
from twinkle.server.wire.number_arrays import PATCHES_KEY
from twinkle.template.labels import IGNORE
from twinkle.template.media import images_of
from twinkle_client.protocol.sampling import SampleRequest

Row = Mapping[str, Any]

MAX_SEQUENCES = 4096  # of all inputs together
# Columns with one value for each token. A column that is None counts as missing.
_COLUMNS = ("labels", "completion_mask", TYPES)
_PER_TOKEN = ("input_ids", *_COLUMNS)


@dataclass(frozen=True)
class SampledInput:
    """One input. ``feature``: its columns as arrays, (T,) each, and its other keys.

    ``sent``: its images as they were sent. ``images``: placed among the tokens of the feature; ``pixels``: how many
    their files have.
    """

    feature: Row
    sent: SentImages = NO_IMAGES
    images: tuple[Image, ...] = ()
    pixels: int = 0

    def placed(self, tokens: IntArray, images: Sequence[Image], pixels: int, merge: int) -> "SampledInput":
        """Return the input with its images placed.

        ``tokens`` are those of the feature, or if it has one token for each image, what that becomes. ``merge``:
        patches on a side of a token.
        """
        feature = dict(self.feature)
        if len(tokens) != len(feature["input_ids"]):
            feature |= _expanded(feature, images)
        if self.sent.patches is None:
            feature[GRIDS] = np.array([(1, each.rows * merge, each.columns * merge) for each in images], np.int64)
        return replace(self, feature=feature, images=tuple(images), pixels=pixels)


def read_sample(body: bytes) -> SampleRequest:
    """Parse a request for samples. A large one may have millions of numbers of images."""
    if len(body) <= ROWS_BYTES and PATCHES_KEY not in body:
        return parse(SampleRequest, body)
    fields, _ = read_fields(body, most=ROWS_BYTES)
    return check(SampleRequest, fields)


def encoded(
    inputs: object, template: SamplingTemplate, params: SamplingParams, most_characters: int, left: ImageAllowance
) -> list[SampledInput]:
    """Return the inputs in order. Call it in a thread, because tokenizing takes a while.

    ``most_characters``: the limit on the text of one conversation. ``left``: the images that the request may have.
    """
    rows = as_rows(inputs)
    if len(rows) * params.num_samples > MAX_SEQUENCES:
        allowed = f"{MAX_SEQUENCES} sequences in all, here for each of {len(rows)} inputs"
        raise InvalidInputError("num_samples", params.num_samples, allowed)
    if are_encoded(rows):
        return [_of_row(row, f"inputs[{index}]", left) for index, row in enumerate(rows)]
    for index, row in enumerate(rows):
        if not isinstance(row.get("messages"), list):
            raise InvalidInputError(f"inputs[{index}]", sorted(row), "input_ids, or a list of messages")
    prompted = params.max_tokens != 0
    groups = text_groups(rows, most_characters)
    features = [feature for group in groups for feature in template.batch_encode(group, add_generation_prompt=prompted)]
    if len(features) != len(rows):
        left_over = f"{len(rows)} trajectories, of which the template leaves {len(features)}"
        raise InvalidInputError("inputs", left_over, "conversations that are not longer than the template's max_length")
    strategy = template.truncation_strategy
    return [_of_conversation(feature, strategy, f"inputs[{index}]", left) for index, feature in enumerate(features)]


def _of_conversation(feature: Row, strategy: str, field: str, left: ImageAllowance) -> SampledInput:
    if not images_of(feature):
        return SampledInput(feature)
    sent = files_left(feature, strategy, field, left)
    shown = {**feature, "messages": [_as_sent(message) for message in feature["messages"]]}
    if IMAGES in feature or not sent.files:  # the template has cut some off, or all
        shown[IMAGES] = [data_uri(image.file) for image in sent.files]
    return SampledInput(shown, sent)


def _as_sent(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its image files as data URIs, which JSON can hold."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    blocks = [
        {**block, "image": data_uri(block["image"])} if isinstance(block.get("image"), EncodedImage) else block
        for block in content
    ]
    return {**message, "content": blocks}


def _of_row(row: Row, field: str, left: ImageAllowance) -> SampledInput:
    """Return a row with ``input_ids`` and its ``_COLUMNS`` as arrays, (T,) each, and its other keys unchanged."""
    tokens = _integers(row["input_ids"], f"{field}.input_ids")
    columns = {"input_ids": tokens}
    for name in _COLUMNS:
        if row.get(name) is not None:
            columns[name] = _integers(row[name], f"{field}.{name}")
            if len(columns[name]) != len(tokens):
                allowed = f"{len(tokens)}, one for each of input_ids"
                raise InvalidInputError(f"{field}.{name}", f"{len(columns[name])} numbers", allowed)
    messages = row.get("messages")
    if messages is not None and not isinstance(messages, list):
        raise InvalidInputError(f"{field}.messages", messages, "a list of messages")
    others = {key: value for key, value in row.items() if key not in _COLUMNS or value is not None}
    return SampledInput({**others, **columns}, sent_images(row, field, left))


def _integers(values: object, field: str) -> IntArray:
    allowed = "a list of at least one 64-bit integer"
    if not isinstance(values, list):
        raise InvalidInputError(field, values, allowed)
    try:
        column = np.asarray(values)
    except ValueError:  # lists of different lengths
        raise InvalidInputError(field, values[:8], allowed) from None
    if column.ndim != 1 or not column.size or column.dtype.kind != "i":
        raise InvalidInputError(field, values[:8], allowed)
    return column.astype(np.int64)


def _expanded(feature: Row, images: Sequence[Image]) -> dict[str, IntArray]:
    """Return the columns of a feature that has one token for each image, with as many tokens as each image becomes.

    No token of an image is learnt.
    """
    counts = np.ones(len(feature["input_ids"]), np.int64)
    added = 0
    for image in images:
        counts[image.first - added] = image.tokens
        added += image.tokens - 1
    columns = {name: np.repeat(feature[name], counts) for name in _PER_TOKEN if feature.get(name) is not None}
    types = np.zeros(len(columns["input_ids"]), np.int64)
    for image in images:
        types[image.first : image.first + image.tokens] = 1
        if "labels" in columns:  # shifted: the last token of an image has the label of what follows it
            columns["labels"][image.first : image.first + image.tokens - 1] = IGNORE
    return {**columns, TYPES: types}
