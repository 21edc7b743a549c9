"""Laws of printing and reading quantities, then the spellings that users write."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright import units
from batchwright.errors import InputError

ROUNDED: list[tuple[Callable[[float, int], str], Callable[[str], float], float, int]] = [
    (units.format_bytes, units.parse_bytes, 1.0, 1),
    (units.format_seconds, units.parse_seconds, 1e-9, 0),
    (units.format_flops_per_second, units.parse_flops_per_second, 1.0, 0),
    (units.format_bandwidth, units.parse_bandwidth, 1.0, 0),
]
"""Print, read, the least value worth printing, and the grain to which reading rounds."""


@pytest.mark.parametrize(("show", "read", "least", "whole"), ROUNDED)
@given(magnitude=st.floats(0, 17), digits=st.integers(1, 6))
def test_reading_what_was_printed_is_off_by_no_more_than_the_rounding(
    show: Callable[[float, int], str],
    read: Callable[[str], float],
    least: float,
    whole: int,
    magnitude: float,
    digits: int,
) -> None:
    """A printed quantity reads back within half a unit of its last digit."""
    value = least * 10**magnitude
    error = abs(read(show(value, digits)) - value)
    assert error <= value * 0.5 * 10.0 ** (1 - digits) * (1 + 1e-9) + whole / 2


@pytest.mark.parametrize(("show", "read", "least", "whole"), ROUNDED)
@given(magnitude=st.floats(0, 17))
def test_printing_again_what_was_read_gives_the_same_text(
    show: Callable[[float, int], str], read: Callable[[str], float], least: float, whole: int, magnitude: float
) -> None:
    """Print, read, print is the same as print, also where reading rounds to a whole byte."""
    del whole
    text = show(least * 10**magnitude, 3)
    assert show(read(text), 3) == text


@given(st.integers(0, 10**18))
def test_token_counts_survive_a_round_trip_exactly(num_tokens: int) -> None:
    """A token count is never rounded."""
    assert units.parse_tokens(units.format_tokens(num_tokens)) == num_tokens


@given(st.integers(0, 2**62))
def test_a_plain_number_of_bytes_is_exact(num_bytes: int) -> None:
    """Bytes without a unit are bytes, to the last one."""
    assert units.parse_bytes(str(num_bytes)) == num_bytes


def test_gib_and_gb_are_different_units() -> None:
    """A GiB is 2**30 bytes and a GB is 10**9."""
    assert units.parse_bytes("80 GiB") == 80 * 2**30
    assert units.parse_bytes("80GB") == 80 * 10**9


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.format_bytes(85_899_345_920), "80 GiB"),
        (units.format_bytes(85_520_809_984), "79.6 GiB"),
        (units.format_bytes(2**30 - 1), "1 GiB"),
        (units.format_bytes(1023), "1023 B"),
        (units.format_bytes(0), "0 B"),
        (units.format_seconds(0.0123), "12.3 ms"),
        (units.format_seconds(59.999), "1 min"),
        (units.format_seconds(-0.002), "-2 ms"),
        (units.format_flops_per_second(989e12), "989 TFLOP/s"),
        (units.format_flops(13.5e9), "13.5 GFLOP"),
        (units.format_bandwidth(4.8e12), "4.8 TB/s"),
        (units.format_tokens(8192), "8,192"),
    ],
)
def test_quantities_print_in_the_unit_that_fits(shown: str, expected: str) -> None:
    """The largest unit in which the number is at least 1, without trailing zeros."""
    assert shown == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (units.parse_bytes("1_024"), 1024),
        (units.parse_bytes(" 1.5 KiB "), 1536),
        (units.parse_tokens("8k"), 8000),
        (units.parse_tokens("8Ki"), 8192),
        (units.parse_tokens("131,072"), 131_072),
        (units.parse_seconds("200 ms"), 0.2),
        (units.parse_seconds("1e-3"), 0.001),
        (units.parse_seconds("30 µs"), 30e-6),
        (units.parse_seconds("2 min"), 120.0),
        (units.parse_flops_per_second("312 TFLOPS"), 312e12),
        (units.parse_bandwidth("1.008 TB/s"), 1.008e12),
    ],
)
def test_common_spellings_are_read(value: float, expected: float) -> None:
    """Spaces, separators, exponents and both spellings of FLOP/s are understood."""
    assert value == expected


@pytest.mark.parametrize("text", ["", "GiB", "80 G", "80 Gb", "1,5 GiB", "-1 B", "nan", "inf", "e5", "1 2", "\u0663 B"])
def test_bytes_that_could_mean_two_things_are_refused(text: str) -> None:
    """A missing, ambiguous or foreign spelling is an error with three parts, never a guess."""
    with pytest.raises(InputError) as caught:
        units.parse_bytes(text)
    assert repr(text) in caught.value.asked
    assert "GiB" in caught.value.remedy


def test_half_a_token_is_refused() -> None:
    """Token counts are whole numbers."""
    with pytest.raises(InputError, match="whole number"):
        units.parse_tokens("1.5")


def test_minutes_and_milliseconds_are_not_confused() -> None:
    """`5m` names neither minutes nor milliseconds."""
    with pytest.raises(InputError, match="'m' is no unit"):
        units.parse_seconds("5m")
