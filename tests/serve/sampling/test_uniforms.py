"""Random numbers by (seed, position) are SplitMix64's, bit for bit."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchwright.serve.sampling.uniforms import _mixed, streams, uniforms

MASK = (1 << 64) - 1
seeds = st.integers(-(1 << 63), MASK)


def mixed(z):
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed, position):
    """By Python's integers."""
    return (mixed(mixed(seed) + (position + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


@given(st.lists(st.tuples(seeds, st.integers(0, 1 << 40)), min_size=1, max_size=50))
def test_arrays_give_what_integers_give(keys):
    """All seeds of 64 bits, signed and not, at any position, several at once."""
    stream_R = streams([seed for seed, _ in keys])
    position_R = np.array([position for _, position in keys], dtype=np.uint64)
    assert uniforms(stream_R, position_R).tolist() == [uniform(seed, position) for seed, position in keys]


def test_the_generator_is_vignas():
    """A stream of state 0 begins with e220a8397b1dcdaf, by the reference implementation."""
    state = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
    assert int(_mixed(state)[0]) == mixed(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


def test_they_lie_between_zero_and_one():
    """Zero may come, one never does."""
    uniform_R = uniforms(streams([-1] * 100_000), np.arange(100_000, dtype=np.uint64))
    assert float(uniform_R.min()) >= 0
    assert float(uniform_R.max()) < 1
