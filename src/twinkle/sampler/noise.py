"""Random numbers without a generator: each is a pure function of its seed, its sample and its position.

The random numbers of a sample are therefore the same in any batch, in any order and on any device. The function
applies the 64-bit finalizer of SplitMix64 in turn to each part of the key; it relies on numpy's unsigned integers
wrapping around.
"""

from random import SystemRandom

import numpy as np
from numpy.typing import NDArray

_BITS = 48  # so few that u · total stays below total in float64
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SAMPLES, _ALTERNATIVES = 1, 2  # the two purposes; their numbers are independent

Words = NDArray[np.uint64]


def uniforms(seeds: Words, samples: Words, positions: Words) -> NDArray[np.float64]:
    """Return numbers in (0, 1) for generated tokens: by seed of the request, number of the sample and of the token."""
    return _numbers(_SAMPLES, seeds, samples, positions)


def alternative_uniforms(seed: int, positions: Words, draws: Words) -> NDArray[np.float64]:
    """Return numbers in (0, 1) for drawing alternatives to prompt tokens: by position and number of the alternative."""
    return _numbers(_ALTERNATIVES, words(seed), draws, positions)


def uniform(seed: int, sample: int, position: int) -> float:
    return float(uniforms(words(seed), words(sample), words(position))[0])


def words(*values: int) -> Words:
    """Convert integers to 64-bit unsigned words. A negative seed equals the unsigned one with the same bits."""
    return np.array([value % 2**64 for value in values], np.uint64)


def fresh_seed() -> int:
    return SystemRandom().randrange(2**63)


def _numbers(purpose: int, *key: Words) -> NDArray[np.float64]:
    state = words(purpose)
    for part in key:
        state = _mixed(state ^ _mixed(part))
    return ((state >> np.uint64(64 - _BITS)).astype(np.float64) + 0.5) * 2.0**-_BITS


def _mixed(values: Words) -> Words:
    values = values + _GAMMA
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))
