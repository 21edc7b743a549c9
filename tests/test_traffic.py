"""Laws of arrivals, lengths and scaling, then the traces we read and the files we refuse."""

import itertools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright import traffic
from batchwright.errors import ConfigError, InputError
from batchwright.traffic import TrafficRequest

DATA = Path(__file__).parent / "data"
TRACES = sorted(path.name for path in DATA.iterdir() if path.suffix in (".csv", ".jsonl"))

ARRIVALS: dict[str, Callable[[float, int], Iterator[float]]] = {
    "uniform": lambda rate, seed: traffic.uniform(rate),
    "poisson": traffic.poisson,
    "gamma, bursty": lambda rate, seed: traffic.gamma(rate, 2.0, seed),
    "gamma, regular": lambda rate, seed: traffic.gamma(rate, 0.5, seed),
}
SAMPLERS: dict[str, Callable[[int], Iterator[Any]]] = {
    "poisson": lambda seed: traffic.poisson(3.0, seed),
    "gamma": lambda seed: traffic.gamma(3.0, 2.0, seed),
    "ramp": lambda seed: traffic.ramp(1.0, 9.0, 60.0, seed),
    "uniform lengths": lambda seed: traffic.uniform_lengths(1, 1000, seed),
    "lognormal lengths": lambda seed: traffic.lognormal_lengths(200, 1.0, 1, 5000, seed),
    "sampled lengths": lambda seed: traffic.sampled_lengths(range(1000), seed),
}

rates = st.floats(0.01, 1000)
seeds = st.integers(0, 2**32)


@st.composite
def workloads(draw: st.DrawFn) -> list[TrafficRequest]:
    """Some requests in order, with keys that cover their prompts."""
    rows = draw(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5000), st.integers(1, 900)), max_size=20))
    arrivals = itertools.accumulate(row[0] for row in rows)
    return [
        TrafficRequest(str(index), arrival, num_prompt, num_output, tuple(range(-(-num_prompt // 512))), 512)
        for index, (arrival, (_, num_prompt, num_output)) in enumerate(zip(arrivals, rows, strict=True))
    ]


@pytest.mark.parametrize("process", ARRIVALS)
def test_the_rate_converges_to_what_was_asked(process: str) -> None:
    """Over many arrivals the mean gap is 1 / rate, within four standard errors of the burstiest process."""
    times = list(itertools.islice(ARRIVALS[process](5.0, 0), 40_000))
    assert len(times) / times[-1] == pytest.approx(5.0, rel=4 * 2.0 / 40_000**0.5)


@pytest.mark.parametrize(("cv", "process"), [(1.0, traffic.poisson(5.0, 1)), (2.0, traffic.gamma(5.0, 2.0, 1))])
def test_gaps_vary_as_much_as_asked(cv: float, process: Iterator[float]) -> None:
    """Poisson gaps have a coefficient of variation of 1, gamma gaps the one asked for."""
    gaps = [after - before for before, after in itertools.pairwise(itertools.islice(process, 40_000))]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize("process", ARRIVALS)
@given(rate=rates, seed=seeds)
def test_arrivals_are_sorted_and_start_no_earlier_than_zero(process: str, rate: float, seed: int) -> None:
    """Time never runs backwards."""
    times = list(itertools.islice(ARRIVALS[process](rate, seed), 100))
    assert times == sorted(times)
    assert times[0] >= 0


@given(start=st.floats(0, 50), end=st.floats(0, 50), duration=st.floats(0.1, 100), seed=seeds)
def test_a_ramp_is_sorted_and_ends_in_time(start: float, end: float, duration: float, seed: int) -> None:
    """All arrivals of a ramp lie within its duration, up or down."""
    if start + end == 0:
        return
    times = list(itertools.islice(traffic.ramp(start, end, duration, seed), 500))
    assert times == sorted(times)
    assert all(0 <= time <= duration for time in times)


def test_a_ramp_arrives_as_its_rate_says() -> None:
    """From 0 to 200 per second over 100 s: 10,000 expected, a quarter of them in the first half."""
    times = list(traffic.ramp(0.0, 200.0, 100.0, 0))
    assert len(times) == pytest.approx(10_000, abs=4 * 100)
    assert sum(time < 50 for time in times) / len(times) == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("sampler", SAMPLERS)
@given(seed=seeds)
def test_a_seed_reproduces_its_stream(sampler: str, seed: int) -> None:
    """The same seed gives the same values, another seed gives others."""
    first, again, other = (list(itertools.islice(SAMPLERS[sampler](value), 20)) for value in (seed, seed, seed + 1))
    assert first == again
    assert first != other


def test_streams_of_two_kinds_do_not_move_together_under_one_seed() -> None:
    """Gaps and lengths drawn under seed 0 are uncorrelated."""
    times = list(itertools.islice(traffic.poisson(1.0, 0), 5001))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    lengths = list(itertools.islice(traffic.uniform_lengths(1, 1000, 0), 5000))
    assert abs(statistics.correlation(gaps, lengths)) < 0.06


@given(low=st.integers(1, 500), width=st.integers(0, 500), seed=seeds)
def test_lengths_stay_in_their_range(low: int, width: int, seed: int) -> None:
    """Uniform and log-normal lengths are whole numbers from low to high."""
    high = low + width
    for lengths in (
        traffic.uniform_lengths(low, high, seed),
        traffic.lognormal_lengths((low + high) / 2, 1.5, low, high, seed),
    ):
        assert all(low <= length <= high for length in itertools.islice(lengths, 50))


def test_lognormal_lengths_have_the_mean_and_spread_asked_for() -> None:
    """Mean and coefficient of variation are those of the lengths, not of their logarithms."""
    lengths = list(itertools.islice(traffic.lognormal_lengths(400, 0.8, 1, 10**6, 0), 40_000))
    assert statistics.mean(lengths) == pytest.approx(400, rel=0.02)
    assert statistics.stdev(lengths) / statistics.mean(lengths) == pytest.approx(0.8, rel=0.05)


def test_sampled_pairs_stay_together() -> None:
    """Prompt and output lengths drawn as pairs keep their correlation."""
    pairs = [(10, 1), (2000, 300)]
    assert set(itertools.islice(traffic.sampled_lengths(pairs, 0), 50)) == set(pairs)


def test_generate_joins_times_and_lengths() -> None:
    """Requests are named in order and end with the shorter stream."""
    lengths = zip(traffic.fixed_lengths(7), [1, 2, 3], strict=False)
    assert list(traffic.generate(traffic.uniform(2.0), lengths)) == [
        TrafficRequest("0", 0.0, 7, 1),
        TrafficRequest("1", 0.5, 7, 2),
        TrafficRequest("2", 1.0, 7, 3),
    ]


def test_limit_ends_an_endless_stream() -> None:
    """Offline traffic is everything at time 0, as many as asked."""
    assert list(traffic.limit(traffic.all_at_once(), 3)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("how", ["scale", "clip"])
@given(requests=workloads(), max_context=st.integers(2, 6000))
def test_scaled_lengths_fit(how: Any, requests: list[TrafficRequest], max_context: int) -> None:
    """Every request fits, keeps at least one token each way, and keys never outnumber the prompt's blocks."""
    scaled = traffic.scale_lengths(requests, max_context, how)
    assert [request.arrival for request in scaled] == [request.arrival for request in requests]
    for before, after in zip(requests, scaled, strict=True):
        assert after.num_prompt + after.num_output <= max_context
        assert 1 <= after.num_prompt <= before.num_prompt
        assert 1 <= after.num_output <= before.num_output
        assert (len(after.keys) - 1) * after.key_block < after.num_prompt
        assert after.keys == before.keys[: len(after.keys)]


@given(requests=workloads())
def test_what_fits_is_left_alone(requests: list[TrafficRequest]) -> None:
    """Scaling never stretches."""
    assert traffic.scale_lengths(requests, 6000) == requests


@given(requests=workloads(), max_context=st.integers(100, 6000))
def test_scaling_preserves_proportions(requests: list[TrafficRequest], max_context: int) -> None:
    """One factor for all: each length is the floor of its share, or 1."""
    longest = max((request.num_prompt + request.num_output for request in requests), default=1)
    factor = min(1, max_context / longest)
    for before, after in zip(requests, traffic.scale_lengths(requests, max_context), strict=True):
        assert after.num_prompt == pytest.approx(before.num_prompt * factor, abs=1)
        assert after.num_output == pytest.approx(before.num_output * factor, abs=1)


@given(requests=workloads(), rate=rates)
def test_scaled_rate_is_the_rate_asked_and_keeps_the_shape(requests: list[TrafficRequest], rate: float) -> None:
    """The mean rate is exact and every gap is stretched by the same factor."""
    if len(requests) < 2 or requests[-1].arrival - requests[0].arrival < 1e-3:
        return
    scaled = traffic.scale_rate(requests, rate)
    assert scaled[0].arrival == 0
    assert (len(scaled) - 1) / scaled[-1].arrival == pytest.approx(rate)
    span = requests[-1].arrival - requests[0].arrival
    for before, after in zip(requests, scaled, strict=True):
        share = (before.arrival - requests[0].arrival) / span
        assert after.arrival / scaled[-1].arrival == pytest.approx(share, abs=1e-9)


@given(
    shared=st.integers(0, 3),
    tails=st.tuples(st.integers(1, 700), st.integers(1, 700)),
    page_size=st.integers(1, 600),
)
def test_pages_are_shared_where_blocks_are(shared: int, tails: tuple[int, int], page_size: int) -> None:
    """Two prompts share just the pages that end within their common blocks; partial pages have no key."""
    one, two = (
        TrafficRequest(name, 0.0, shared * 512 + tail, 1, (*range(shared), name, f"{name}'")[: shared + 2], 512)
        for name, tail in zip("ab", tails, strict=True)
    )
    assert len(one.page_keys(page_size)) == one.num_prompt // page_size
    common = set(one.page_keys(page_size)) & set(two.page_keys(page_size))
    assert len(common) == shared * 512 // page_size
    assert len(set(one.page_keys(page_size))) == len(one.page_keys(page_size))


def test_a_request_without_keys_shares_nothing() -> None:
    """No keys, no page keys."""
    assert TrafficRequest("a", 0.0, 100, 1).page_keys(16) == ()


@pytest.mark.parametrize("name", TRACES)
def test_recorded_traces_are_in_order_with_new_ids(name: str) -> None:
    """An excerpt starts at 0, never goes back, and numbers its requests by line."""
    requests = list(traffic.read_trace(DATA / name))
    arrivals = [request.arrival for request in requests]
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)
    assert len({request.id for request in requests}) == len(requests)
    assert len(requests) == (199 if name.endswith(".csv") else 200)


def test_azure_times_are_exact_to_100_ns() -> None:
    """18:15:46.6805900 to 18:15:50.9951690 is 4.314579 s; `datetime` would lose the last digit."""
    first, second = itertools.islice(traffic.read_trace(DATA / "azure_conv.csv"), 2)
    assert (first.id, first.num_prompt, first.num_output) == ("2", 374, 44)
    assert second.arrival == 4.314579


def test_a_tenth_of_a_microsecond_counts(tmp_path: Path) -> None:
    """Two arrivals 100 ns apart are apart."""
    path = tmp_path / "trace.csv"
    row = "2023-11-16 18:15:46.000000{},10,2\r\n"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + row.format(1) + row.format(2))
    assert [request.arrival for request in traffic.read_trace(path)] == [0.0, 1e-7]


def test_mooncake_blocks_become_keys() -> None:
    """A hash id per 512 tokens, times in milliseconds."""
    requests = list(traffic.read_trace(DATA / "mooncake_synthetic.jsonl"))
    assert (requests[0].num_prompt, requests[0].num_output, requests[0].key_block) == (40160, 6, 512)
    assert requests[0].keys == tuple(range(79))
    assert requests[2].arrival == 0.04
    assert len(requests[0].page_keys(16)) == 40160 // 16


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,10,2\n"
MOONCAKE = '{"timestamp": 5, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (AZURE + "2023-11-16 18:15:47,10\n", "line 3 .*2 columns"),
        (AZURE + "2023-11-16 18:15:47,ten,2\n", "line 3 .*'ten'"),
        (AZURE + "16/11/2023,10,2\n", "line 3 .*timestamp"),
        (AZURE + "2023-13-16 18:15:47,10,2\n", "line 3 "),
        (AZURE + "\n2023-11-16 18:15:45,10,2\n", "line 4 .*before the line above"),
        (AZURE + "2023-11-16 18:15:47,0,2\n", "line 3 .*at least 1"),
        (MOONCAKE + "{\n", "line 2 "),
        (MOONCAKE + "[]\n", "line 2 .*object"),
        (MOONCAKE + MOONCAKE.replace("[1, 2]", "[1]"), "line 2 .*do not cover 600"),
        (MOONCAKE + MOONCAKE.replace("[1, 2]", "null"), "line 2 .*hash_ids"),
        (MOONCAKE + MOONCAKE.replace("600", '"600"'), "line 2 .*input_length"),
        (MOONCAKE + MOONCAKE.replace(": 5", ": NaN"), "line 2 .*timestamp"),
        (MOONCAKE + MOONCAKE.replace(": 5", ": 4"), "line 2 .*before the line above"),
        (AZURE + "2023-11-16 18:15:47,1000000001,2\n", "line 3 .*more than 1,000,000,000"),
        (AZURE + "2023-11-16 18:15:47,10,1000000001\n", "line 3 .*more than 1,000,000,000"),
        (AZURE + f"2023-11-16 18:15:47,10,{'9' * 5000}\n", "line 3 .*digits"),
        (MOONCAKE + MOONCAKE.replace('h": 2', 'h": 1000000001'), "line 2 .*more than 1,000,000,000"),
        (MOONCAKE + MOONCAKE.replace(": 5", ": 1.1e15"), "line 2 .*timestamp is 1100000000000000.0, not"),
        (MOONCAKE + MOONCAKE.replace(": 5", ": -1.1e15"), "line 2 .*timestamp is -1100000000000000.0, not"),
        (MOONCAKE + MOONCAKE.replace(": 5", ": 1e999"), "line 2 .*timestamp is inf"),
        ("time,prompt\n1,2\n", "line 1 .*neither"),
        ("", "line 1 .*neither"),
    ],
)
def test_a_broken_trace_names_the_line(tmp_path: Path, text: str, complaint: str) -> None:
    """Bad input is refused with the number of the line at fault."""
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(InputError, match=complaint):
        list(traffic.read_trace(path))


@pytest.mark.parametrize("time", ["1e308", "1" + "0" * 400])
def test_a_timestamp_too_large_for_a_float_is_no_overflow_error(tmp_path: Path, time: str) -> None:
    """Rounding the one to nanoseconds overflowed, and so did asking whether the other is finite."""
    path = tmp_path / "trace"
    path.write_text(MOONCAKE + MOONCAKE.replace(": 5", f": {time}"))
    with pytest.raises(InputError, match=r"line 2 .*timestamp is 1"):
        list(traffic.read_trace(path))


def test_a_deeply_nested_line_is_no_recursion_error(tmp_path: Path) -> None:
    """Hash ids that open a hundred thousand lists."""
    path = tmp_path / "trace"
    path.write_text(MOONCAKE + MOONCAKE.replace("[1, 2]", "[" * 100_000 + "]" * 100_000))
    with pytest.raises(InputError, match=r"line 2 .*recursion"):
        list(traffic.read_trace(path))


def test_a_line_without_an_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    """Only a line's length above the limit is ever held, also of a file that goes on for ever."""
    path = tmp_path / "trace"
    path.write_text(AZURE + "2" * 2_000_000)
    with pytest.raises(InputError, match="line 3 is longer than 1 MiB; give a file with one request per line"):
        list(traffic.read_trace(path))
    endless = Path("/dev/zero")
    if endless.exists():
        with pytest.raises(InputError, match="line 1 is longer than 1 MiB"):
            traffic.read_trace(endless)


def test_what_is_wrong_with_a_long_line_is_told_in_short(tmp_path: Path) -> None:
    """A million characters in the wrong place do not become a million in the message."""
    path = tmp_path / "trace"
    for text in (AZURE + "2" * 10**6 + ",10,2\n", MOONCAKE + MOONCAKE.replace(": 600", f': "{"6" * 10**6}"')):
        path.write_text(text)
        with pytest.raises(InputError) as refusal:
            list(traffic.read_trace(path))
        assert len(refusal.value.fact) < 400


def test_a_missing_trace_is_refused_at_once(tmp_path: Path) -> None:
    """The error does not wait for the first request to be drawn."""
    with pytest.raises(InputError, match="No such file"):
        traffic.read_trace(tmp_path / "absent.csv")


def test_a_binary_file_is_no_trace(tmp_path: Path) -> None:
    """Bytes that are no text are refused like any other format, also behind a good header."""
    path = tmp_path / "trace"
    path.write_bytes(AZURE.encode() + b"\xff\xfe\x00,1,2\n")
    with pytest.raises(InputError, match="line 3"):
        list(traffic.read_trace(path))


@pytest.mark.parametrize(
    "ask",
    [
        lambda: traffic.uniform(0),
        lambda: traffic.poisson(-1, 0),
        lambda: traffic.poisson(float("nan"), 0),
        lambda: traffic.gamma(1, 0, 0),
        lambda: traffic.ramp(0, 0, 10, 0),
        lambda: traffic.ramp(1, 2, 0, 0),
        lambda: traffic.ramp(1, 1e308, 10, 0),
        lambda: traffic.ramp(float("nan"), 1, 10, 0),
        lambda: traffic.ramp(1, 2, float("inf"), 0),
        lambda: traffic.uniform(float("inf")),
        lambda: traffic.uniform(1e-320),
        lambda: traffic.gamma(float("inf"), 1, 0),
        lambda: traffic.gamma(1, 1e200, 0),
        lambda: traffic.gamma(1, 1e-200, 0),
        lambda: traffic.lognormal_lengths(50, 1e200, 1, 100, 0),
        lambda: traffic.lognormal_lengths(50, float("nan"), 1, 100, 0),
        lambda: traffic.uniform_lengths(1, 10**9 + 1, 0),
        lambda: traffic.fixed_lengths(0),
        lambda: traffic.uniform_lengths(5, 4, 0),
        lambda: traffic.lognormal_lengths(50, 1, 100, 200, 0),
        lambda: traffic.sampled_lengths([], 0),
        lambda: traffic.limit([], 0),
        lambda: traffic.scale_lengths([], 1),
        lambda: traffic.scale_rate([], 1),
        lambda: traffic.scale_rate([TrafficRequest("a", 0.0, 1, 1), TrafficRequest("b", 1.0, 1, 1)], float("nan")),
        lambda: traffic.scale_rate([TrafficRequest("a", 0.0, 1, 1), TrafficRequest("b", 1.0, 1, 1)], float("inf")),
        lambda: traffic.scale_rate([TrafficRequest("a", 0.0, 1, 1), TrafficRequest("b", float("inf"), 1, 1)], 1),
        lambda: traffic.scale_rate([TrafficRequest("a", 0.0, 1, 1), TrafficRequest("b", 1e-320, 1, 1)], 1),
        lambda: traffic.scale_rate([TrafficRequest("a", 0.0, 1, 1), TrafficRequest("b", 0.0, 1, 1)], 1),
    ],
)
def test_settings_out_of_range_are_refused_at_once(ask: Callable[[], object]) -> None:
    """No stream is handed out that would fail when drawn from."""
    with pytest.raises(ConfigError):
        ask()
