"""Random numbers without a generator: each is a function of what it is drawn for.

A sample is the same whatever else is computed beside it, in whatever order, on whatever device.
"""

import hashlib
import struct
from random import SystemRandom

_BITS = 48  # few enough that u · total stays below total in float64


def uniform(seed: int, sample: int, position: int) -> float:
    """In (0, 1), for token number ``position`` of sample number ``sample`` of a request with this seed."""
    key = struct.pack("<QQQ", seed % 2**64, sample, position)
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> (64 - _BITS)
    return (bits + 0.5) * 2.0**-_BITS


def fresh_seed() -> int:
    return SystemRandom().randrange(2**63)
