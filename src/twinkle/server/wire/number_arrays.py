"""Patches of images, and routes to experts, in JSON: they are millions of numbers.

A JSON parser blocks all other threads while it runs. So the numbers of ``pixel_values`` are taken out of a body before
it is parsed, and parsed a patch at a time. Twinkle's own client sends them as base64, which is a quarter of the size.
"""

import base64
import binascii
import json
import math
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinkle.errors import InvalidInputError
from twinkle.model.types import RouteArray

PATCHES = "pixel_values"
PATCHES_KEY = f'"{PATCHES}"'.encode()
_SPACE = b" \t\r\n"
_ALLOWED = "finite numbers (patches, numbers of a patch), or {'dtype': 'float32', 'shape': […], 'data': base64}"
ROUTES = "routed_experts"
_ROUTE_DTYPES = {"uint8": "u1", "int16": "<i2"}
_ROUTES_ALLOWED = "integers (tokens, layers, experts), or {'dtype': 'uint8' or 'int16', 'shape': […], 'data': base64}"
_MOST_EXPERTS = 2**15 - 1
_NARROWEST = 3 * 8 * 8  # numbers of a patch: colours of 8 × 8 pixels; those of all models are wider
_MARK = f"numbers:{secrets.token_hex(8)}:"  # no client can know it


class NumberArrays:
    """The arrays of numbers that were taken out of one body."""

    def __init__(self) -> None:
        self._texts: list[bytes] = []

    def take_from(self, body: bytes) -> bytes:
        """Return the body with a short text in the place of each array that is the value of ``pixel_values``.

        An array with anything but numbers inside is left where it is.
        """
        parts, done, at = [], 0, body.find(PATCHES_KEY)
        while at >= 0:
            start, stop = _array_after(body, at + len(PATCHES_KEY))
            if stop > start and body[at - 1 : at] != b"\\":
                parts += [body[done:start], f'"{_MARK}{len(self._texts)}"'.encode()]
                self._texts.append(body[start:stop])
                done = stop
            at = body.find(PATCHES_KEY, max(stop, at + len(PATCHES_KEY)))
        return b"".join([*parts, body[done:]]) if parts else body

    @property
    def count(self) -> int:
        return len(self._texts)

    def has(self, value: object) -> bool:
        """Return whether an array was taken out at the place that has this value now."""
        return isinstance(value, str) and value.startswith(_MARK)

    def read(self, value: str, field: str) -> NDArray[np.float32]:
        """Return the array that was taken out at the place that has this value now."""
        return _parsed(self._texts[int(value[len(_MARK) :])], field)


def read_patches(value: object, field: str) -> NDArray[np.float32]:
    """Return patches, (patches, numbers of a patch), from an array, lists of numbers or the client's packed form."""
    if isinstance(value, Mapping):
        value = _unpacked(value, field)
    try:
        patches = np.asarray(value)
    except (ValueError, OverflowError):  # lists of different lengths
        patches = np.asarray(None)
    if patches.ndim != 2 or patches.dtype.kind not in "fiu":
        shown = f"{patches.dtype} {patches.shape}" if patches.ndim else value
        raise InvalidInputError(field, shown, _ALLOWED)
    read: NDArray[np.float32] = np.ascontiguousarray(patches, np.float32)
    if not np.isfinite(read).all():
        raise InvalidInputError(field, "NaN or infinity", _ALLOWED)
    return read


def packed(patches: NDArray[np.float32]) -> dict[str, Any]:
    """Return patches in the packed form, which JSON can hold."""
    data = base64.b64encode(np.ascontiguousarray(patches, "<f4").tobytes()).decode()
    return {"dtype": "float32", "shape": list(patches.shape), "data": data}


def read_routes(value: object, field: str, tokens: int) -> RouteArray:
    """Return routes to experts (T, layers, K) of at most ``tokens`` tokens, from lists of numbers or the packed form.

    What the model allows is checked later, when the model is known.
    """
    if isinstance(value, Mapping):
        value = _unpacked_routes(value, field)
    try:
        routes = np.asarray(value)
    except (ValueError, OverflowError):  # lists of different lengths
        routes = np.asarray(None)
    if routes.ndim != 3 or routes.dtype.kind not in "iu":
        raise InvalidInputError(field, f"{routes.dtype} {routes.shape}" if routes.ndim else value, _ROUTES_ALLOWED)
    if not 1 <= len(routes) <= tokens:
        raise InvalidInputError(field, f"{len(routes)} tokens", f"1 to {tokens}, the tokens of the row")
    if not routes.size or routes.min() < 0 or routes.max() > _MOST_EXPERTS:
        raise InvalidInputError(field, str(routes.ravel()[:8].tolist()), f"numbers of experts, 0 to {_MOST_EXPERTS}")
    return routes.astype(np.int16)


def packed_routes(routes: RouteArray) -> dict[str, Any]:
    """Return routes in a packed form, which JSON can hold: a byte for each number, or two if one is above 255."""
    dtype = "uint8" if routes.max(initial=0) < 256 else "int16"
    data = base64.b64encode(np.ascontiguousarray(routes, _ROUTE_DTYPES[dtype]).tobytes()).decode()
    return {"dtype": dtype, "shape": list(routes.shape), "data": data}


def _unpacked_routes(value: Mapping[str, Any], field: str) -> NDArray[Any]:
    shape, data, dtype = value.get("shape"), value.get("data"), str(value.get("dtype"))
    sizes = [each for each in shape if type(each) is int and each >= 1] if isinstance(shape, list) else []
    if dtype not in _ROUTE_DTYPES or len(sizes) != 3 or sizes != shape or not isinstance(data, str):
        raise InvalidInputError(field, sorted(map(str, value))[:8], _ROUTES_ALLOWED)
    raw, width = _decoded(data, field), np.dtype(_ROUTE_DTYPES[dtype]).itemsize
    if len(raw) != width * math.prod(sizes):
        raise InvalidInputError(f"{field}.shape", shape, f"sizes whose product is {len(raw) // width}")
    return np.frombuffer(raw, _ROUTE_DTYPES[dtype]).reshape(sizes)


def _array_after(body: bytes, at: int) -> tuple[int, int]:
    """Return where the array of numbers begins and ends that is the value of the key that ends at ``at``; (0, 0): none.

    A quote or a brace ends the search, because no number has one: what stands before it is the array, and a comma.
    """
    start = at
    for expected in (b":", b"["):
        while body[start : start + 1] and body[start : start + 1] in _SPACE:
            start += 1
        if body[start : start + 1] != expected:
            return 0, 0
        start += expected == b":"
    quote = body.find(b'"', start)
    brace = body.find(b"}", start, quote if quote >= 0 else len(body))  # not beyond it: a body may have many such keys
    end = brace if brace >= 0 else quote
    if end < 0:
        return 0, 0
    text = body[start:end].rstrip(_SPACE + b",")
    if not text.endswith(b"]") or text.count(b"[") != text.count(b"]"):
        return 0, 0
    return start, start + len(text)


def _parsed(text: bytes, field: str) -> NDArray[np.float32]:
    """Parse the text of an array of arrays. Other threads can run between two of them.

    Each takes a while, however short it is. So the first one decides how many there can be: a number takes two bytes.
    """
    width = len(_numbers(text[1 : text.index(b"]")], field))
    if width < _NARROWEST or 2 * width * (text.count(b"]") - 1) > len(text):
        allowed = f"patches of one width, at least {_NARROWEST} numbers"
        raise InvalidInputError(field, text[:80].decode(errors="replace"), allowed)
    rows = [_numbers(part, field) for part in text[1:-1].split(b"]") if part.strip(_SPACE)]
    if any(len(row) != width for row in rows):
        raise InvalidInputError(field, text[:80].decode(errors="replace"), _ALLOWED)
    return np.stack(rows)


def _numbers(text: bytes, field: str) -> NDArray[np.float32]:
    """Return the numbers of one patch from its text without the bracket at its end."""
    text = text.lstrip(_SPACE + b",")
    try:
        numbers = np.array(json.loads(text + b"]"), np.float32)
    except (ValueError, TypeError, OverflowError, RecursionError):
        numbers = np.array(0, np.float32)
    if numbers.ndim != 1:
        raise InvalidInputError(field, text[:80].decode(errors="replace"), _ALLOWED)
    return numbers


def _unpacked(value: Mapping[str, Any], field: str) -> NDArray[np.float32]:
    shape, data = value.get("shape"), value.get("data")
    sizes = [each for each in shape if type(each) is int and each >= 1] if isinstance(shape, list) else []
    if value.get("dtype") != "float32" or len(sizes) != 2 or sizes != shape or not isinstance(data, str):
        raise InvalidInputError(field, sorted(map(str, value))[:8], _ALLOWED)
    raw = _decoded(data, field)
    if len(raw) != 4 * math.prod(sizes):
        raise InvalidInputError(f"{field}.shape", shape, f"sizes whose product is {len(raw) // 4}")
    return np.frombuffer(raw, "<f4").reshape(sizes)


def _decoded(data: str, field: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):  # ValueError: characters beyond ASCII
        raise InvalidInputError(f"{field}.data", data[:80], "base64") from None
