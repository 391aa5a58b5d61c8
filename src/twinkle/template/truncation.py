"""Truncation of sequences that are longer than a template's ``max_length``."""

from collections.abc import Callable
from typing import Any

from twinkle.errors import InvalidInputError, UnknownNameError

__all__ = ["TRUNCATION_STRATEGIES", "truncate"]

Feature = dict[str, Any]

# The keys of a feature that have one entry for each token, before masks and positions are added.
PER_TOKEN = ("input_ids", "labels", "completion_mask", "mm_token_type_ids")


def truncate(feature: Feature, max_length: int, strategy: str) -> list[Feature]:
    """Return the features that replace this one. A feature that is short enough is returned unchanged."""
    if strategy not in TRUNCATION_STRATEGIES:
        raise UnknownNameError("truncation_strategy", strategy, TRUNCATION_STRATEGIES)
    if len(feature["input_ids"]) <= max_length:
        return [feature]
    return TRUNCATION_STRATEGIES[strategy](feature, max_length)


def _refuse(feature: Feature, max_length: int) -> list[Feature]:
    length = len(feature["input_ids"])
    # users of the original library search the message for this phrase
    raise InvalidInputError("messages", f"Input length {length} exceeds max_length {max_length}", "shorter ones")


def _keep_last(feature: Feature, max_length: int) -> list[Feature]:
    length = len(feature["input_ids"])
    return [_cut(feature, length - max_length, length)]


def _keep_first(feature: Feature, max_length: int) -> list[Feature]:
    return [_cut(feature, 0, max_length)]


def _split(feature: Feature, max_length: int) -> list[Feature]:
    starts = range(0, len(feature["input_ids"]), max_length)
    return [_cut(feature, start, start + max_length) for start in starts]


def _drop(feature: Feature, max_length: int) -> list[Feature]:
    return []


def _cut(feature: Feature, start: int, end: int) -> Feature:
    return {**feature, **{key: feature[key][start:end] for key in PER_TOKEN if key in feature}}


TRUNCATION_STRATEGIES: dict[str, Callable[[Feature, int], list[Feature]]] = {
    "raise": _refuse,
    "left": _keep_last,
    "right": _keep_first,
    "split": _split,
    "delete": _drop,
}
