"""How quantities are written: bytes, token counts, seconds, FLOP/s and bytes/s, parsed and printed.

GiB (2**30) and GB (10**9) are different units and both are read; memory prints in GiB, bandwidth in GB/s, as
hardware is sold. A unit that could mean two things (`80G`, `5m`, `8 Gb`) is refused, never guessed. Token counts
print exactly, everything else with three significant digits; reading back what was printed and printing it again
gives the same text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from batchwright.errors import InputError


def parse_bytes(text: str) -> int:
    """`"79.6 GiB"`, `"80 GB"` or `"512"` as bytes, rounded to a whole one. Raises InputError."""
    return round(_BYTES.read(text))


def format_bytes(num_bytes: float, digits: int = 3) -> str:
    """`85899345920` as `"80 GiB"`, always in binary units; a fraction of a byte is rounded away."""
    return _BYTES.print(round(num_bytes), digits)


def parse_tokens(text: str) -> int:
    """`"8,192"`, `"8Ki"` (8192) or `"8k"` (8000) as a count of tokens. Raises InputError."""
    count = _TOKENS.read(text)
    if count != int(count):
        raise InputError(f"read {text!r} as a token count", f"it is {count} tokens", "give a whole number")
    return int(count)


def format_tokens(num_tokens: int) -> str:
    """`8192` as `"8,192"`: a count is never rounded."""
    return f"{num_tokens:,}"


def parse_seconds(text: str) -> float:
    """`"200 ms"`, `"1.5 s"`, `"2 min"` or `"0.2"` in seconds. Raises InputError."""
    return float(_SECONDS.read(text))


def format_seconds(seconds: float, digits: int = 3) -> str:
    """`0.0123` as `"12.3 ms"`."""
    return _SECONDS.print(seconds, digits)


def parse_flops_per_second(text: str) -> float:
    """`"989 TFLOP/s"` or `"989 TFLOPS"` in FLOP/s. Raises InputError."""
    return float(_FLOP_RATE.read(text))


def format_flops_per_second(rate: float, digits: int = 3) -> str:
    """`989e12` as `"989 TFLOP/s"`."""
    return _FLOP_RATE.print(rate, digits)


def format_flops(count: float, digits: int = 3) -> str:
    """`1.35e10` operations, not a rate, as `"13.5 GFLOP"`."""
    return _FLOPS.print(count, digits)


def parse_bandwidth(text: str) -> float:
    """`"4.8 TB/s"` or `"300 GiB/s"` in bytes per second. Raises InputError."""
    return float(_BANDWIDTH.read(text))


def format_bandwidth(bytes_per_second: float, digits: int = 3) -> str:
    """`4.8e12` as `"4.8 TB/s"`, in decimal units as vendors print it."""
    return _BANDWIDTH.print(bytes_per_second, digits)


_NUMBER = re.compile(r"((?:\d{1,3}(?:,\d{3})+|\d[\d_]*)?(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(\S.*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Scale:
    """The units of one quantity. `printed` is the subset that output uses, smallest first."""

    noun: str
    example: str
    units: Mapping[str, Decimal]
    printed: tuple[str, ...]

    def read(self, text: str) -> Decimal:
        """Raises InputError that names the units there are."""
        match = _NUMBER.fullmatch(text.strip())
        if match is None or not match[1] or not match[1][0].isascii() or match[1][0] in "eE":
            raise InputError(f"read {text!r} as {self.noun}", "it is not a number and a unit", self._remedy)
        number, unit = Decimal(match[1].replace(",", "").replace("_", "")), match[2] or ""
        if unit not in self.units:
            raise InputError(f"read {text!r} as {self.noun}", f"{unit!r} is no unit of it", self._remedy)
        return number * self.units[unit]

    def print(self, value: float, digits: int) -> str:
        """The largest unit in which the rounded number is at least 1, or the smallest unit there is."""
        assert digits >= 1
        for unit in reversed(self.printed):
            number = _significant(value / float(self.units[unit]), digits)
            if abs(float(number)) >= 1 or unit == self.printed[0]:
                return f"{number} {unit}"
        raise AssertionError("a scale prints in at least one unit")

    @property
    def _remedy(self) -> str:
        return f"write it like {self.example}, with one of {', '.join(unit for unit in self.units if unit)}"


def _significant(value: float, digits: int) -> str:
    """`value` with `digits` significant digits, more where its integer part is longer; no trailing zeros."""
    if value == 0 or not abs(value) < float("inf"):
        return f"{value:g}"
    decimals = max(0, digits - 1 - Decimal(value).adjusted())
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


_DECIMAL_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_BINARY_PREFIXES = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


def _decimal(suffix: str) -> dict[str, Decimal]:
    return {f"{prefix}{suffix}": Decimal(1000) ** power for power, prefix in enumerate(_DECIMAL_PREFIXES)}


def _binary(suffix: str) -> dict[str, Decimal]:
    return {f"{prefix}{suffix}": Decimal(1024) ** power for power, prefix in enumerate(_BINARY_PREFIXES)}


_TIME_UNITS = {"ns": "1e-9", "us": "1e-6", "µs": "1e-6", "ms": "1e-3", "s": "1", "min": "60", "h": "3600"}

_BYTES = _Scale(
    noun="a number of bytes",
    example="80 GiB",
    units={**_binary("B"), **_decimal("B"), "KB": Decimal(1000), "": Decimal(1)},
    printed=tuple(_binary("B")),
)
_TOKENS = _Scale(
    noun="a token count",
    example="8,192",
    units={"": Decimal(1), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "Ki": Decimal(2**10)}
    | {"Mi": Decimal(2**20), "tokens": Decimal(1)},
    printed=("",),
)
_SECONDS = _Scale(
    noun="a duration",
    example="200 ms",
    units={unit: Decimal(scale) for unit, scale in _TIME_UNITS.items()} | {"": Decimal(1)},
    printed=("ns", "us", "ms", "s", "min", "h"),
)
_FLOP_RATE = _Scale(
    noun="a rate of FLOP/s",
    example="989 TFLOP/s",
    units={**_decimal("FLOP/s"), **_decimal("FLOPS"), "": Decimal(1)},
    printed=tuple(_decimal("FLOP/s")),
)
_FLOPS = _Scale(noun="a number of FLOPs", example="13.5 GFLOP", units=_decimal("FLOP"), printed=tuple(_decimal("FLOP")))
_BANDWIDTH = _Scale(
    noun="a bandwidth",
    example="4.8 TB/s",
    units={**_decimal("B/s"), **_binary("B/s"), "": Decimal(1)},
    printed=tuple(_decimal("B/s")),
)
