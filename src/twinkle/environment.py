"""The one place that reads environment variables.

TWINKLE_CACHE_DIR          where downloaded and converted models are kept (default ``~/.cache/twinkle``)
TWINKLE_OFFLINE            1/true/yes/on: never touch the network; what is not in the cache is an error
TWINKLE_FORBID_HF          a switch like the one above: nothing is fetched from or sent to Hugging Face
TWINKLE_TRUST_REMOTE_CODE  a switch: plugins and functions from outside may run in this process (default: off)
TWINKLE_MODEL_ID_ALIASES   a JSON object, other names of models to their ids
TWINKLE_SEED               the seed of whatever was given none
LOG_LEVEL                  a name or number of Python's logging (default INFO)
LOCAL_RANK                 this process's number on its machine, as torchrun sets it
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from twinkle.errors import InvalidInputError

__all__ = ["Environment", "read_environment", "set_variable_defaults"]

_SWITCH = {"": False, "0": False, "false": False, "no": False, "off": False}
_SWITCH |= {"1": True, "true": True, "yes": True, "on": True}


@dataclass(frozen=True)
class Environment:
    """What the process was told from outside."""

    cache_dir: Path
    offline: bool
    forbid_hf: bool
    trust_remote_code: bool
    model_id_aliases: Mapping[str, str]
    seed: int | None
    log_level: int
    local_rank: int


def read_environment() -> Environment:
    """Read the variables now: they are cheap to read, and tests and launchers may set them after import."""
    cache_dir = os.environ.get("TWINKLE_CACHE_DIR") or "~/.cache/twinkle"
    return Environment(
        cache_dir=Path(cache_dir).expanduser().absolute(),
        offline=_switch("TWINKLE_OFFLINE"),
        forbid_hf=_switch("TWINKLE_FORBID_HF"),
        trust_remote_code=_switch("TWINKLE_TRUST_REMOTE_CODE"),
        model_id_aliases=_aliases(),
        seed=_integer("TWINKLE_SEED"),
        log_level=_log_level(),
        local_rank=max(0, _integer("LOCAL_RANK") or 0),  # some launchers say −1 for "not distributed"
    )


def set_variable_defaults(defaults: Mapping[str, str]) -> None:
    """Tell a library that has no other settings than variables; what was set from outside stays."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _switch(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value not in _SWITCH:
        raise InvalidInputError(name, value, "1, true, yes, on or 0, false, no, off")
    return _SWITCH[value]


def _integer(name: str) -> int | None:
    value = os.environ.get(name, "").strip()
    if not value:
        return None
    try:
        return int(value)
    except ValueError as error:
        raise InvalidInputError(name, value, "an integer") from error


def _log_level() -> int:
    value = os.environ.get("LOG_LEVEL", "").strip().upper() or "INFO"
    if value.isascii() and value.isdecimal():
        return int(value)
    levels = logging.getLevelNamesMapping()
    if value not in levels:
        raise InvalidInputError("LOG_LEVEL", value, f"a number or one of {', '.join(levels)}")
    return levels[value]


def _aliases() -> dict[str, str]:
    name = "TWINKLE_MODEL_ID_ALIASES"
    text = os.environ.get(name, "").strip()
    allowed = "a JSON object of strings: alias to model id"
    try:
        aliases = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise InvalidInputError(name, text, allowed) from error
    if not isinstance(aliases, dict) or not all(isinstance(value, str) for value in aliases.values()):
        raise InvalidInputError(name, text, allowed)
    return aliases
