"""Random changes to valid requests, drawn from a seed: to the bytes, or to values of a JSON document."""

import copy
import json
import random
from typing import Any

_BYTES = (0, 1, 0x7F, 0x80, 0xFF)
_LARGE = (0, 1, -1, 2, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30)
_TEXTS = (
    "",
    "\x00",
    "x" * 5000,
    "é" * 100,
    "\ud7ff",
    "__class__",
    "../../etc",
    "nan",
    "inf",
    "s:train:0",
    "custom",
    "operator.add",
)


def changed_bytes(draw: random.Random, body: bytes, others: list[bytes]) -> bytes:
    """Make one to six changes; pieces of ``others`` may be spliced in."""
    data = bytearray(body)
    for _ in range(draw.randint(1, 6)):
        place = draw.randrange(len(data) + 1)
        end = min(len(data), place + draw.choice((1, 1, 2, 4, 8, 64)))
        match draw.randrange(7):
            case 0 if place < len(data):
                data[place] = draw.choice(_BYTES)
            case 1 if place < len(data):
                data[place] ^= 1 << draw.randrange(8)
            case 2:
                data[place:end] = b""
            case 3:
                data[place:place] = draw.randbytes(draw.randint(1, 8))
            case 4:
                data[place:place] = data[place:end] * draw.choice((1, 2, 50))
            case 5:
                other = draw.choice(others)
                start = draw.randrange(len(other) + 1)
                data[place:end] = other[start : start + draw.randint(1, 40)]
            case _:
                data = data[:place] if draw.random() < 0.2 else data
    return bytes(data)


def changed_json(draw: random.Random, body: bytes, others: list[bytes]) -> bytes:
    """Replace, remove, repeat or move one to four values, sometimes bytes.

    A body that is nested too deeply is unchanged.
    """
    try:
        document = json.loads(body)
    except RecursionError:  # made by an earlier change; it tests the decoder's limit, not json's
        return body
    for _ in range(draw.randint(1, 4)):
        document = _changed(draw, document, json.loads(draw.choice(others)))
    text = json.dumps(document).encode()
    return changed_bytes(draw, text, others) if draw.random() < 0.1 else text


def _changed(draw: random.Random, document: Any, other: Any) -> Any:
    places = list(_places(document))
    if not places:
        return _value(draw, other)
    container, key = draw.choice(places)
    match draw.randrange(6):
        case 0:
            del container[key]
        case 1 if isinstance(container, list):
            container[key:key] = [copy.deepcopy(container[key])] * draw.choice((1, 3, 40))
        case 2 if isinstance(container, dict):
            container[draw.choice(_TEXTS)] = container.pop(key)
        case 3:
            container[key] = {key: container[key]} if isinstance(key, str) else [container[key]]
        case _:
            container[key] = _value(draw, other)
    return document


def _places(document: Any) -> Any:
    pairs = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in list(pairs):
        yield document, key
        yield from _places(value)


def _value(draw: random.Random, other: Any) -> Any:
    """Return another value: a number at an edge, a text, nothing, nesting, or a piece of another document."""
    match draw.randrange(7):
        case 0:
            return draw.choice(_LARGE)
        case 1:
            return draw.choice(_TEXTS)
        case 2:
            return draw.choice((None, True, False, [], {}, 0.5, -0.0, 1e308, 1e-320))
        case 3:
            nested: Any = 1
            for _ in range(draw.choice((3, 30, 150))):
                nested = [nested] if draw.random() < 0.5 else {"a": nested}
            return nested
        case 4:
            return [draw.choice(_LARGE) for _ in range(draw.choice((1, 5, 300)))]
        case _:
            places = list(_places(other))
            if not places:
                return None
            container, key = draw.choice(places)
            return copy.deepcopy(container[key])
