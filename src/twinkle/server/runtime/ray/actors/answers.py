"""What a rank answers to a call of its group: the result, where the group uses it, and a fingerprint of it.

All ranks compute the results of optimizer steps, and all ranks of one copy of the model those of its passes. One rank
sends the result, and all send fingerprints, by which the group finds a rank that has computed something else.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

import numpy as np

from twinkle.server.runtime.ray.replica import Failure

# Relative; floats such as norms are sums, which processors of different kinds may round in different ways.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Fingerprint:
    """What must be the same on several ranks: names, texts and integers exactly, floats to 1e-6.

    Of an array of floats, such as log-probabilities, two weighted sums are compared: ranks on different processors may
    round the last bits of its numbers in different ways. Of an error only its type is, because its text may name
    things of one process.
    """

    digest: str
    floats: tuple[float, ...]

    def equals(self, other: "Fingerprint") -> bool:
        return (
            self.digest == other.digest
            and len(self.floats) == len(other.floats)
            and all(map(_close, self.floats, other.floats))
        )

    def __str__(self) -> str:
        numbers = ", ".join(f"{number:.9g}" for number in self.floats[:8])
        return f"digest {self.digest}, numbers {numbers}{', …' if len(self.floats) > 8 else ''}"


@dataclass(frozen=True)
class Answer:
    """The answer of one rank. ``result`` is None on a rank whose result the group does not use."""

    result: object
    fingerprint: Fingerprint | None  # None: results of this call are not compared


@dataclass(frozen=True)
class BrokenGroup(Failure):
    """A failure after which a rank cannot work with the others any more: their connections are gone or out of step."""


def fingerprint(result: object) -> Fingerprint:
    """Return the fingerprint of a result: of dataclasses, containers, numbers, texts, errors and numpy arrays."""
    digest = hashlib.blake2b(digest_size=8)
    floats: list[float] = []
    for part in _parts(result):
        if isinstance(part, float):
            floats.append(part)
        else:
            digest.update(part)
    return Fingerprint(digest.hexdigest(), tuple(floats))


def _parts(value: object) -> Iterator[bytes | float]:
    """Yield the floats of a value, and all its other contents as bytes, in an order that its contents decide."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        yield b"float;"
        yield float(value)
    elif value is None or isinstance(value, bool | int | str | bytes):
        yield f"{type(value).__name__} {value!r};".encode()
    elif isinstance(value, np.ndarray):
        yield f"array {value.dtype.str} {value.shape};".encode()
        yield from _sums(value) if value.dtype.kind == "f" else (np.ascontiguousarray(value).tobytes(),)
    elif isinstance(value, Exception):
        yield f"{type(value).__name__};".encode()
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)};".encode()
        for key in sorted(value):
            yield f"{key};".encode()
            yield from _parts(value[key])
    elif isinstance(value, Sequence):
        yield f"sequence {len(value)};".encode()
        for each in value:
            yield from _parts(each)
    elif is_dataclass(value):
        yield f"{type(value).__name__};".encode()
        for field in fields(value):
            yield from _parts(getattr(value, field.name))
    else:
        raise TypeError(f"a result holds a {type(value).__name__}, which has no fingerprint")


def _sums(array: np.ndarray) -> Iterator[float]:
    """Yield two sums of an array's sizes; in the second the weights grow along the array, so that the order counts."""
    sizes = np.abs(array.astype(np.float64).reshape(-1))
    yield float(sizes.sum())
    yield float(sizes @ np.linspace(1.0, 2.0, len(sizes)))


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE) or (math.isnan(one) and math.isnan(other))
