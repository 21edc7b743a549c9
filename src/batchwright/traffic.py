"""Who arrives when and wants how much: arrival processes, length distributions and recorded traces.

`generate` joins arrival times with (prompt, output) lengths; `read_trace` replays a file. Both give
`TrafficRequest`s in order of arrival. Everything random is seeded and repeats exactly; streams of different kinds
are independent even under one seed, two of a kind need two seeds. Nothing is rescaled behind the user's back: a
Poisson run of n requests does not end at exactly n / rate.
"""

import json
import math
import random
import re
import reprlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

from batchwright.errors import ConfigError, InputError
from batchwright.units import format_bytes, format_tokens

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """One request of a workload: when it arrives (seconds from the start) and its two lengths in tokens.

    `keys[i]` stands for prompt tokens `i * key_block .. (i + 1) * key_block`: equal keys mean equal tokens up to
    that block's end, or to the shorter prompt's. Prompt tokens past the last key are shared with nobody.
    """

    id: str
    arrival: float
    num_prompt: int
    num_output: int
    keys: tuple[Hashable, ...] = ()
    key_block: int = 0

    def page_keys(self, page_size: int) -> tuple[Hashable, ...]:
        """The keys of the prompt's full pages of `page_size` tokens, as far as `keys` reach."""
        if not self.keys:
            return ()
        num_pages = min(self.num_prompt, len(self.keys) * self.key_block) // page_size
        ends = ((page + 1) * page_size - 1 for page in range(num_pages))
        return tuple((self.keys[end // self.key_block], page) for page, end in enumerate(ends))


def generate(arrivals: Iterable[float], lengths: Iterable[tuple[int, int]]) -> Iterator[TrafficRequest]:
    """Requests named "0", "1", ... until either stream ends. Combine samplers with `zip(prompts, outputs)`."""
    for index, (arrival, (num_prompt, num_output)) in enumerate(zip(arrivals, lengths, strict=False)):
        yield TrafficRequest(str(index), arrival, num_prompt, num_output)


def limit(requests: Iterable[T], num_requests: int) -> Iterator[T]:
    """The first `num_requests` of them."""
    _require(num_requests >= 1, "limit traffic", f"{num_requests} requests were asked for", "ask for at least 1")
    return islice(requests, num_requests)


# Arrival processes: endless streams of seconds, never decreasing (ramp ends).


def all_at_once() -> Iterator[float]:
    """Everything arrives at time 0: the offline case."""
    while True:
        yield 0.0


def uniform(rate: float) -> Iterator[float]:
    """Evenly spaced, `rate` per second, the first at time 0."""
    _require_rate("uniform", rate)
    return (index / rate for index in count())


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Independent exponential gaps of mean 1 / rate: many users who do not know of each other."""
    _require_rate("poisson", rate)
    return (total / rate for total in _running_sum(_exponential("poisson", seed)))


def gamma(rate: float, cv: float, seed: int) -> Iterator[float]:
    """Independent gamma gaps of mean 1 / rate and coefficient of variation `cv`: 1 is Poisson, above it bursty.

    Shape is 1 / cv**2 (the "burstiness" of other load generators) and scale cv**2 / rate.
    """
    _require_rate("gamma", rate)
    remedy = f"give a positive coefficient of variation, from {1 / MAX_CV:g} to {MAX_CV:g}"
    _require(1 / MAX_CV <= cv <= MAX_CV, "gamma arrivals", f"cv is {cv}", remedy)
    rng = _random("gamma", seed)
    return _running_sum(rng.gammavariate(1 / cv**2, cv**2 / rate) for _ in count())


def ramp(rate_from: float, rate_to: float, duration: float, seed: int) -> Iterator[float]:
    """Poisson with a rate that changes linearly over `duration` seconds, then ends.

    Unit-rate arrivals are mapped through the inverse of the expected count a*t + (b - a)*t**2 / (2*duration)
    (Cinlar, Introduction to Stochastic Processes, 1975, section 4.7), so no thinning and no rejected draws.
    """
    _require(
        0 <= rate_from <= RATES[1] and 0 <= rate_to <= RATES[1] and rate_from + rate_to > 0,
        "ramp arrivals",
        f"the rate goes from {rate_from} to {rate_to} per second",
        f"give rates from 0 to {RATES[1]:g}, not both 0",
    )
    remedy = f"give a positive number of seconds, at most {MAX_SECONDS:g}"
    _require(0 < duration <= MAX_SECONDS, "ramp arrivals", f"duration is {duration} seconds", remedy)
    return _ramp(rate_from, rate_to, duration, seed)


# Length samplers: endless streams of token counts, at least 1.


def fixed_lengths(num_tokens: int) -> Iterator[int]:
    """Always the same."""
    _require_range("fixed lengths", num_tokens, num_tokens)
    return (num_tokens for _ in count())


def uniform_lengths(low: int, high: int, seed: int) -> Iterator[int]:
    """Every length from `low` to `high`, both included, equally likely."""
    _require_range("uniform lengths", low, high)
    rng = _random("uniform lengths", seed)
    return (rng.randint(low, high) for _ in count())


def lognormal_lengths(mean: float, cv: float, low: int, high: int, seed: int) -> Iterator[int]:
    """Log-normal of that mean and coefficient of variation, rounded, then held to `low .. high`.

    Underlying sigma**2 is ln(1 + cv**2) and mu is ln(mean) - sigma**2 / 2. Holding to the range shifts the mean of
    what comes out.
    """
    _require_range("log-normal lengths", low, high)
    _require(
        low <= mean <= high and 0 <= cv <= MAX_CV,
        "log-normal lengths",
        f"mean {mean} and cv {cv} for lengths {low} to {high}",
        f"give a mean within the range and a cv from 0 to {MAX_CV:g}",
    )
    variance = math.log1p(cv**2)
    rng = _random("lognormal lengths", seed)
    draws = (rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance)) for _ in count())
    return (min(max(round(draw), low), high) for draw in draws)


def sampled_lengths(values: Sequence[T], seed: int) -> Iterator[T]:
    """Drawn from `values` with replacement; these may be lengths or (prompt, output) pairs that belong together."""
    _require(len(values) > 0, "sample lengths from a list", "the list is empty", "give at least one length")
    rng = _random("sampled lengths", seed)
    return (values[int(rng.random() * len(values))] for _ in count())


# Whole workloads, changed as a whole.


def scale_lengths(
    requests: Iterable[TrafficRequest], max_context: int, how: Literal["scale", "clip"] = "scale"
) -> list[TrafficRequest]:
    """The same requests, so that prompt + output of each is at most `max_context` tokens.

    `scale` shrinks prompts, outputs and key blocks by one factor, the longest request's, and so preserves the
    distribution's shape; `clip` cuts the end off long prompts, then off outputs, and leaves short requests alone.
    Each length stays at least 1. What already fits is returned unchanged.
    """
    _require(max_context >= 2, "scale lengths", f"max_context is {max_context}", "allow at least 2 tokens")
    kept = list(requests)
    longest = max((request.num_prompt + request.num_output for request in kept), default=0)
    if longest <= max_context:
        return kept
    if how == "clip":
        return [_clipped(request, max_context) for request in kept]
    return [_scaled(request, max_context, longest) for request in kept]


def scale_rate(requests: Iterable[TrafficRequest], rate: float) -> list[TrafficRequest]:
    """The same requests with time stretched evenly: first arrival at 0, mean rate (n - 1) / span as asked."""
    _require_rate("scale_rate", rate)
    kept = list(requests)
    span = kept[-1].arrival - kept[0].arrival if kept else 0.0
    _require(
        span > 0,
        f"scale {len(kept)} requests to {rate} per second",
        f"their arrivals span {span:g} s, so they have no rate",
        "use requests that arrive at two different times at least",
    )
    stretch = (len(kept) - 1) / rate / span
    _require(
        stretch < math.inf and all(math.isfinite(request.arrival) for request in kept),
        f"scale {len(kept)} requests to {rate} per second",
        f"their arrivals span {span:g} s, or some are not finite, so that times would not be either",
        "use requests whose arrivals are finite and further apart",
    )
    return [replace(request, arrival=(request.arrival - kept[0].arrival) * stretch) for request in kept]


# Recorded traces.


def read_trace(path: Path) -> Iterator[TrafficRequest]:
    """The requests of a recorded trace, first arrival at 0, ids their line numbers, read as they are asked for.

    Formats, told apart by the first line: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) and Mooncake's
    JSON lines (timestamp in ms, input_length, output_length, hash_ids of 512-token blocks). Raises InputError, with
    the line number; for a file that is missing or of another format, at once. No more than MAX_LINE is read ahead,
    so that a file without lines is refused and not held in memory.
    """
    parse_row, skip = _format_of(path)
    return _rows(path, parse_row, skip)


AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK = 512

MAX_LINE = 2**20
"""Characters in a line of a trace."""

MAX_TOKENS = 10**9
"""Of a prompt or an output."""

MAX_SECONDS = 1e12
"""On a trace's clock, or for a ramp."""

RATES = (1e-12, 1e12)
"""Per second: beyond them gaps are no longer told from 0, or times from infinity."""

MAX_CV = 1e6
"""Of gaps or lengths: the square must stay a number."""


def _require(condition: bool, asked: str, fact: str, remedy: str) -> None:  # noqa: FBT001
    if not condition:
        raise ConfigError(asked, fact, remedy)


def _require_rate(process: str, rate: float) -> None:
    low, high = RATES
    remedy = f"give a positive rate, from {low:g} to {high:g}"
    _require(low <= rate <= high, f"{process} arrivals", f"rate is {rate} per second", remedy)


def _require_range(what: str, low: int, high: int) -> None:
    remedy = f"give a range that starts at 1 or above and ends at {format_tokens(MAX_TOKENS)} or below"
    _require(1 <= low <= high <= MAX_TOKENS, what, f"they go from {low} to {high}", remedy)


def _random(kind: str, seed: int) -> random.Random:
    """A generator of its own for every kind of stream, so that equal seeds do not correlate them."""
    return random.Random(f"{kind}:{seed}")


def _exponential(kind: str, seed: int) -> Iterator[float]:
    rng = _random(kind, seed)
    return (-math.log1p(-rng.random()) for _ in count())


def _running_sum(gaps: Iterable[float]) -> Iterator[float]:
    total = 0.0
    for gap in gaps:
        total += gap
        yield total


def _ramp(rate_from: float, rate_to: float, duration: float, seed: int) -> Iterator[float]:
    slope = (rate_to - rate_from) / duration
    num_expected = (rate_from + rate_to) / 2 * duration
    for total in _running_sum(_exponential("ramp", seed)):
        if total > num_expected:
            return
        # The root of slope/2 * t**2 + rate_from * t = total, in the form that does not cancel and allows slope 0.
        discriminant = max(0.0, rate_from**2 + 2 * slope * total)
        yield min(duration, 2 * total / (rate_from + math.sqrt(discriminant)))


def _scaled(request: TrafficRequest, max_context: int, longest: int) -> TrafficRequest:
    """Integer arithmetic: flooring both lengths keeps their sum within, also where one is raised to 1."""
    num_prompt = max(1, request.num_prompt * max_context // longest)
    key_block = max(1, request.key_block * max_context // longest) if request.keys else 0
    return TrafficRequest(
        id=request.id,
        arrival=request.arrival,
        num_prompt=num_prompt,
        num_output=max(1, request.num_output * max_context // longest),
        keys=_keys_within(request.keys, key_block, num_prompt),
        key_block=key_block,
    )


def _clipped(request: TrafficRequest, max_context: int) -> TrafficRequest:
    num_prompt = min(request.num_prompt, max_context - 1)
    return replace(
        request,
        num_prompt=num_prompt,
        num_output=min(request.num_output, max_context - num_prompt),
        keys=_keys_within(request.keys, request.key_block, num_prompt),
    )


def _keys_within(keys: tuple[Hashable, ...], key_block: int, num_prompt: int) -> tuple[Hashable, ...]:
    return keys[: -(-num_prompt // key_block)] if keys else ()


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of a trace. `time` in whole nanoseconds on the trace's own clock, so that differences are exact."""

    time: int
    num_prompt: int
    num_output: int
    keys: tuple[Hashable, ...] = ()
    key_block: int = 0


def _format_of(path: Path) -> tuple[Callable[[str], _Row], int]:
    """How to parse a line, and how many lines to skip first."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            first = next(_lines(path, file), (1, ""))[1].strip()
    except OSError as error:
        raise InputError(
            f"read a trace from {path}", str(error), "give the path of a CSV or JSON lines file"
        ) from error
    if tuple(first.split(",")) == AZURE_HEADER:
        return _azure_row, 1
    if first.startswith("{") and "hash_ids" in first:
        return _mooncake_row, 0
    raise InputError(
        f"read a trace from {path}",
        f"line 1 is {first[:60]!r}, which is neither Azure's header nor a Mooncake record",
        f"give a CSV that starts with {','.join(AZURE_HEADER)} or JSON lines with timestamp, input_length, "
        "output_length and hash_ids",
    )


def _rows(path: Path, parse_row: Callable[[str], _Row], skip: int) -> Iterator[TrafficRequest]:
    first: int | None = None
    last: int | None = None
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in islice(_lines(path, file), skip, None):
            if not line.strip():
                continue
            try:
                row = _checked(parse_row(line.strip()), last)
            except (ValueError, OverflowError, RecursionError) as error:
                fact = f"line {number} is no request ({error!s:.300})"
                raise InputError(f"read a trace from {path}", fact, "repair or remove the line") from error
            first, last = row.time if first is None else first, row.time
            yield TrafficRequest(
                str(number), (row.time - first) / 1e9, row.num_prompt, row.num_output, row.keys, row.key_block
            )


def _lines(path: Path, file: TextIO) -> Iterator[tuple[int, str]]:
    """The numbered lines of `file`, of which never more than one is held."""
    for number in count(1):
        line = file.readline(MAX_LINE + 1)
        if len(line) > MAX_LINE:
            raise InputError(
                f"read a trace from {path}",
                f"line {number} is longer than {format_bytes(MAX_LINE)}",
                "give a file with one request per line",
            )
        if not line:
            return
        yield number, line


def _checked(row: _Row, last: int | None) -> _Row:
    """Raises ValueError."""
    if row.num_prompt < 1 or row.num_output < 1:
        lengths = f"{format_tokens(row.num_prompt)} prompt and {format_tokens(row.num_output)} output tokens"
        raise ValueError(f"it has {lengths}, and needs at least 1 of each")
    if row.num_prompt > MAX_TOKENS or row.num_output > MAX_TOKENS:
        raise ValueError(f"it has more than {format_tokens(MAX_TOKENS)} prompt or output tokens")
    if last is not None and row.time < last:
        raise ValueError("it arrives before the line above it")
    return row


_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:\+00:00|Z)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001  (Azure's timestamps are UTC without saying so)


def _azure_row(line: str) -> _Row:
    """Raises ValueError. `datetime` stops at microseconds and Azure counts 100 ns, so the fraction is read apart."""
    cells = line.split(",")
    if len(cells) != len(AZURE_HEADER):
        raise ValueError(f"it has {len(cells)} columns, not {len(AZURE_HEADER)}")
    match = _TIMESTAMP.fullmatch(cells[0])
    if match is None:
        raise ValueError(f"{reprlib.repr(cells[0])} is no timestamp")
    since = datetime.fromisoformat(match[1]) - _EPOCH
    seconds = since.days * 86_400 + since.seconds
    return _Row(seconds * 10**9 + int((match[2] or "0").ljust(9, "0")), int(cells[1]), int(cells[2]))


def _mooncake_row(line: str) -> _Row:
    """Raises ValueError; RecursionError where lists are nested too deeply."""
    record: Any = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004
    num_prompt = _whole(record, "input_length")
    keys = record.get("hash_ids")
    if not isinstance(keys, list) or not all(isinstance(key, int) for key in keys):
        raise ValueError("hash_ids is not a list of whole numbers")
    if len(keys) != -(-num_prompt // MOONCAKE_BLOCK):
        raise ValueError(f"{len(keys)} hash_ids do not cover {num_prompt} tokens in blocks of {MOONCAKE_BLOCK}")
    time = record.get("timestamp")
    if not isinstance(time, int | float) or isinstance(time, bool) or not abs(time) <= MAX_SECONDS * 1e3:
        raise ValueError(f"timestamp is {reprlib.repr(time)}, not milliseconds within {MAX_SECONDS:g} s of 0")
    return _Row(round(time * 10**6), num_prompt, _whole(record, "output_length"), tuple(keys), MOONCAKE_BLOCK)


def _whole(record: dict[str, Any], key: str) -> int:
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key} is {reprlib.repr(value)}")  # noqa: TRY004
    return value
