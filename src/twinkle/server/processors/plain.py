"""Results as JSON: arrays and tensors are lists, numbers that are not finite are null, times are text."""

import json
import math
import sys
from collections.abc import Mapping
from datetime import date, time
from typing import Any

import numpy as np

from twinkle.errors import UnsupportedError

__all__ = ["to_json"]


def to_json(value: object) -> str:
    """Raises UnsupportedError for what JSON cannot hold: bytes, images and other objects."""
    try:
        return json.dumps(value, allow_nan=False, default=_listed)
    except ValueError:  # a number that is not finite: the rare case may take longer
        return json.dumps(_finite(value), allow_nan=False)


def _listed(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    torch = sys.modules.get("torch")  # there are no tensors unless somebody imported it
    if torch is not None and isinstance(value, torch.Tensor):
        return value.tolist()
    raise UnsupportedError(f"result: {type(value).__name__} cannot be sent as JSON; allowed: numbers, text and lists")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    return _finite(_listed(value))
