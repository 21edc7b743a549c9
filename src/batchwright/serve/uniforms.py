"""Random numbers that depend on nothing but a request's seed and a position: output `position` of SplitMix64.

So a step that is run again, in whatever company, draws what it drew. Steele, Lea, Flood: Fast Splittable Pseudorandom
Number Generators, OOPSLA 2014; constants of Vigna's splitmix64.c. A seed is mixed once to become the generator's
state, so that seeds that differ by its increment do not share a stream. All in int64 tensors, whose products wrap.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def streams(seeds: Sequence[int]) -> Tensor:
    """The stream_R of each seed: an integer of at most 64 bits, signed or not."""
    signed = [seed - (1 << 64) if seed >= 1 << 63 else seed for seed in seeds]
    return _mixed(torch.tensor(signed, dtype=torch.int64))


def uniforms(stream_R: Tensor, position_R: Tensor) -> Tensor:
    """uniform_R: float64 in [0, 1), of 53 bits."""
    mixed_R = _mixed(stream_R + (position_R + 1) * _INCREMENT)
    return _shifted(mixed_R, 11).double() * 2.0**-53


def _mixed(z_R: Tensor) -> Tensor:
    z_R = (z_R ^ _shifted(z_R, 30)) * _FIRST
    z_R = (z_R ^ _shifted(z_R, 27)) * _SECOND
    return z_R ^ _shifted(z_R, 31)


def _shifted(z_R: Tensor, num_bits: int) -> Tensor:
    """To the right, zeros coming in at the left."""
    return (z_R >> num_bits) & ((1 << (64 - num_bits)) - 1)
