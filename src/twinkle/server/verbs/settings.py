"""Check settings that a tenant sets up and the server stores: they must be small and plain, and patterns fast."""

import json
import re
from collections.abc import Mapping

from twinkle.errors import InvalidInputError
from twinkle.model.types import LoraSpec

_MOST_BYTES = 65_536  # as JSON
_DEEPEST = 16
_LARGEST = 2**63
_MOST_MODULES = 1024
_MOST_PATTERNS = 256  # of one field; each is compared with the name of every module
_LONGEST_PATTERN = 256
_MOST_GROUPS = 2
_MOST_REPEATS = 4
_MOST_REPEATS_AT_END = 2  # of a pattern for the end of a name: the part before it repeats, too
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


def check_modules(spec: LoraSpec) -> None:
    """Check that the names and patterns with which a spec chooses modules are few, and that patterns are fast."""
    for field in ("target_modules", "exclude_modules", "target_parameters"):
        wanted = vars(spec)[field]
        if isinstance(wanted, str):
            _check_pattern(field, wanted, 'names, "all-linear", or ' if field == "target_modules" else "names, or ")
        elif wanted is not None and len(wanted) > _MOST_MODULES:
            raise InvalidInputError(field, f"{len(wanted)} names", f"at most {_MOST_MODULES}")
    layers = spec.layers_pattern or ()
    for field, patterns in (
        ("rank_pattern", spec.rank_pattern),
        ("alpha_pattern", spec.alpha_pattern),
        ("layers_pattern", [layers] if isinstance(layers, str) else layers),
    ):
        if len(patterns) > _MOST_PATTERNS:
            raise InvalidInputError(field, f"{len(patterns)} patterns", f"at most {_MOST_PATTERNS}")
        for pattern in patterns:
            _check_pattern(field, pattern, "names, or ", _MOST_REPEATS_AT_END)
        if sum(map(_repeats, patterns)) > _MOST_REPEATS:
            allowed = f"at most {_MOST_REPEATS} .* and .+ in all patterns together"
            raise InvalidInputError(field, f"{sum(map(_repeats, patterns))} repeats", allowed)


def _repeats(pattern: str) -> int:
    return pattern.count("*") + pattern.count("+")


def _check_pattern(field: str, pattern: str, names: str, most_repeats: int = _MOST_REPEATS) -> None:
    if (
        len(pattern) > _LONGEST_PATTERN
        or not _PATTERN.fullmatch(pattern)
        or pattern.count("(") > _MOST_GROUPS
        or _repeats(pattern) > most_repeats
    ):
        allowed = (
            f"{names}a pattern of names, |, .* and .+ with at most {_MOST_GROUPS} groups, "
            f"{most_repeats} repeats and {_LONGEST_PATTERN} characters"
        )
        raise InvalidInputError(field, pattern, allowed)


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
