"""The one place that reads environment variables.

TWINKLE_CACHE_DIR  where downloaded and converted models are kept (default ``~/.cache/twinkle``)
TWINKLE_OFFLINE    1/true/yes/on: never touch the network; what is not in the cache is an error
"""

import os
from dataclasses import dataclass
from pathlib import Path

from twinkle.errors import InvalidInputError

__all__ = ["Environment", "read_environment"]

_SWITCH = {"": False, "0": False, "false": False, "no": False, "off": False}
_SWITCH |= {"1": True, "true": True, "yes": True, "on": True}


@dataclass(frozen=True)
class Environment:
    """What the process was told from outside."""

    cache_dir: Path
    offline: bool


def read_environment() -> Environment:
    """Read the variables now: they are cheap to read, and tests and launchers may set them after import."""
    cache_dir = os.environ.get("TWINKLE_CACHE_DIR") or "~/.cache/twinkle"
    return Environment(cache_dir=Path(cache_dir).expanduser().absolute(), offline=_switch("TWINKLE_OFFLINE"))


def _switch(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value not in _SWITCH:
        raise InvalidInputError(name, value, "1, true, yes, on or 0, false, no, off")
    return _SWITCH[value]
