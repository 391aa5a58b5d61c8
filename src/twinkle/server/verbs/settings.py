"""Check settings that a tenant sets up and the server stores: they must be small and plain, and patterns fast."""

import json
import re
from collections.abc import Mapping, Sequence

from twinkle.errors import InvalidInputError

_MOST_BYTES = 65_536  # as JSON
_DEEPEST = 16
_LARGEST = 2**63
_MOST_MODULES = 1024
_LONGEST_PATTERN = 256
_MOST_GROUPS = 2
_MOST_REPEATS = 4
# Python's matcher may backtrack for ever, and blocks all other threads meanwhile. So only a dot may repeat, and no
# group may: then there is little to backtrack.
_PATTERN = re.compile(r"(?:[\w^$()|-]|\\\.|\.[*+]?)*")


def check_small(field: str, settings: Mapping[str, object]) -> None:
    """Check that settings are small: the reader of snapshots, which hold them, knows no long integers or deep nesting.

    Raise InvalidInputError otherwise.
    """
    _check_plain(field, settings, 0)
    size = len(json.dumps(settings))
    if size > _MOST_BYTES:
        raise InvalidInputError(field, f"{size} bytes of JSON", f"at most {_MOST_BYTES}")


def check_target_modules(wanted: Sequence[str] | None) -> None:
    if wanted is not None and not isinstance(wanted, str) and len(wanted) > _MOST_MODULES:
        raise InvalidInputError("target_modules", f"{len(wanted)} names", f"at most {_MOST_MODULES}")
    if not isinstance(wanted, str):
        return
    repeats = wanted.count("*") + wanted.count("+")
    if (
        len(wanted) > _LONGEST_PATTERN
        or not _PATTERN.fullmatch(wanted)
        or wanted.count("(") > _MOST_GROUPS
        or repeats > _MOST_REPEATS
    ):
        allowed = (
            f'names, "all-linear", or a pattern of names, |, .* and .+ with at most {_MOST_GROUPS} groups, '
            f"{_MOST_REPEATS} repeats and {_LONGEST_PATTERN} characters"
        )
        raise InvalidInputError("target_modules", wanted, allowed)


def _check_plain(field: str, value: object, depth: int) -> None:
    if depth > _DEEPEST:
        raise InvalidInputError(field, "nested values", f"at most {_DEEPEST} levels")
    if type(value) is int and not -_LARGEST <= value < _LARGEST:
        raise InvalidInputError(field, f"an integer of {value.bit_length()} bits", "64-bit integers")
    if isinstance(value, Mapping):
        for each in value.values():
            _check_plain(field, each, depth + 1)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_plain(field, each, depth + 1)
