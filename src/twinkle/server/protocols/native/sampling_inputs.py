"""How a request wants to sample, and from what: InputFeatures, or Trajectories that a template encodes, never both."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from twinkle.data_format import SamplingParams
from twinkle.errors import InvalidInputError
from twinkle.model.types import IntArray
from twinkle.sampler.features import refuse_unsupported
from twinkle.server.backends.text_codec import text_groups
from twinkle.server.verbs.templates import SamplingTemplate
from twinkle.server.wire.fields import MAX_STOP_LENGTH, MAX_STOPS

Row = Mapping[str, Any]

MAX_INPUTS = 4096
MAX_SEQUENCES = 4096  # of all inputs together
# Columns that grow with the tokens; None in one of them is a column that is not there.
_COLUMNS = ("labels", "completion_mask", "mm_token_type_ids")


def sampling_params(given: Mapping[str, Any] | None, num_samples: int | None) -> SamplingParams:
    """The fields of SamplingParams by name; ``num_samples`` beside them counts where they have none."""
    named = dict(given or {})
    if named.get("num_samples") is None:
        named["num_samples"] = 1 if num_samples is None else num_samples
    params = SamplingParams.from_dict(named)
    refuse_unsupported(params)
    stops = [*params.stop_strings, *params.stop_token_ids]
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in params.stop_strings):
        allowed = f"at most {MAX_STOPS} texts or token ids; texts of 1 to {MAX_STOP_LENGTH} characters"
        raise InvalidInputError("stop", stops[:8], allowed)
    return params


def encoded(inputs: object, template: SamplingTemplate, params: SamplingParams, most_characters: int) -> list[Row]:
    """Return a feature for each input, in order. In a thread: tokenising takes a while.

    ``most_characters``: of one conversation.
    """
    rows = _rows(inputs)
    if len(rows) * params.num_samples > MAX_SEQUENCES:
        allowed = f"{MAX_SEQUENCES} sequences in all, here for each of {len(rows)} inputs"
        raise InvalidInputError("num_samples", params.num_samples, allowed)
    kinds = {"input_ids" in row for row in rows}
    if len(kinds) > 1:
        raise InvalidInputError("inputs", "some encoded and some not", "InputFeatures or Trajectories, not both")
    if kinds == {True}:
        return [_feature(row, f"inputs[{index}]") for index, row in enumerate(rows)]
    for index, row in enumerate(rows):
        if not isinstance(row.get("messages"), list):
            raise InvalidInputError(f"inputs[{index}]", sorted(row), "input_ids, or a list of messages")
    prompted = params.max_tokens != 0
    groups = text_groups(rows, most_characters)
    features = [feature for group in groups for feature in template.batch_encode(group, add_generation_prompt=prompted)]
    if len(features) != len(rows):
        left = f"{len(rows)} trajectories, of which the template leaves {len(features)}"
        raise InvalidInputError("inputs", left, "conversations that are not longer than the template's max_length")
    return list(features)


def _rows(inputs: object) -> list[Row]:
    rows = [inputs] if isinstance(inputs, dict) else inputs
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_INPUTS:
        allowed = f"an InputFeature or Trajectory, or a list of 1 to {MAX_INPUTS}"
        raise InvalidInputError("inputs", rows if not isinstance(rows, list) else f"{len(rows)} of them", allowed)
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InvalidInputError(f"inputs[{index}]", row, "an InputFeature or Trajectory")
    return rows


def _feature(row: Row, field: str) -> Row:
    """The row with its columns as arrays, (T,) each, all its other keys untouched."""
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
    return {**others, **columns}


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


def plain(value: object) -> object:
    """Arrays as lists, all the way down: what JSON can hold."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(each) for each in value]
    return value
