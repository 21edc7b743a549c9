"""Random numbers that depend on nothing but a request's seed and a position: output `position` of SplitMix64.

So a step that is run again, in whatever company, draws what it drew. Steele, Lea, Flood: Fast Splittable Pseudorandom
Number Generators, OOPSLA 2014; constants of Vigna's splitmix64.c. A seed is mixed once to become the generator's
state, so that seeds that differ by its increment do not share a stream.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def streams(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """The stream_R of each seed: an integer of at most 64 bits, signed or not."""
    return _mixed(np.array([seed & _MASK for seed in seeds], dtype=np.uint64))


def uniforms(stream_R: NDArray[np.uint64], position_R: NDArray[np.uint64]) -> NDArray[np.float64]:
    """uniform_R in [0, 1), of 53 bits."""
    bits_R = _mixed(stream_R + (position_R + np.uint64(1)) * _INCREMENT) >> np.uint64(11)
    return bits_R.astype(np.float64) * 2.0**-53


def _mixed(z_R: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z_R = (z_R ^ (z_R >> np.uint64(30))) * _FIRST
    z_R = (z_R ^ (z_R >> np.uint64(27))) * _SECOND
    return z_R ^ (z_R >> np.uint64(31))
