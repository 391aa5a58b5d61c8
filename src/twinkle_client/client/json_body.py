"""Encode request bodies as JSON: arrays and tensors as lists, remote objects as their ids, never NaN.

``json`` encodes ordinary values at C speed and calls :func:`_plain` for all others. Only if that fails is the body
walked in Python, to leave out values that are not needed or to name the value that is wrong.
"""

import json
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, is_dataclass
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel

from twinkle_client.errors import invalid

__all__ = ["HasTolist", "Wired", "encode"]

_CODE = "the name of a class, as text: code is never shipped to the server"


@runtime_checkable
class Wired(Protocol):
    """An object that defines its own wire format: a remote object, a batch of a remote dataloader, a DatasetMeta."""

    def to_wire(self) -> Any: ...


@runtime_checkable
class HasTolist(Protocol):
    """An array, a tensor or a scalar of one, of any library."""

    def tolist(self) -> Any: ...


class _NotJsonError(TypeError):
    pass


def encode(body: Mapping[str, Any]) -> bytes:
    """Return a request's body.

    A row with ``input_ids`` may hold other values beside it; those that JSON cannot express (an image, or messages that
    contain one) are left out. Anywhere else such a value is an error that names the place.
    """
    try:
        return _dumps(body)
    except (_NotJsonError, ValueError, RecursionError):
        return _dumps(_checked(body, ""))


def _dumps(body: Any) -> bytes:
    return json.dumps(body, default=_plain, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Wired):
        return value.to_wire()
    if isinstance(value, HasTolist):
        return value.tolist()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, AbstractSet):
        return sorted(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise _NotJsonError


def _checked(value: Any, path: str) -> Any:
    """Return the value without the extras of encoded rows; raise for the first value that JSON cannot express."""
    if isinstance(value, float) and not math.isfinite(value):
        raise invalid(path, value, "a finite number")
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        optional = "input_ids" in value
        pairs = ((str(key), item, f"{path}.{key}" if path else str(key)) for key, item in value.items())
        return {key: _checked(item, place) for key, item, place in pairs if not (optional and not _can_travel(item))}
    if isinstance(value, list | tuple):
        return [_checked(item, f"{path}[{index}]") for index, item in enumerate(value)]
    try:
        plain = _plain(value)
    except _NotJsonError:
        allowed = _CODE if callable(value) else "a JSON value, an array or a tensor"
        raise invalid(path, value, allowed) from None
    return _checked(plain, path)


def _can_travel(value: Any) -> bool:
    try:
        _dumps(value)
    except _NotJsonError:
        return False
    except ValueError:  # NaN or infinity: do not leave it out; _checked raises an error that names its place
        return True
    return True
