"""What the summary of a run says, against hand-made records whose numbers can be checked on paper."""

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.bench.summary import Slo, goodput, summarize
from batchwright.records import FinishReason, RequestRecord, RowRecord, StepRecord, percentile


def request(
    id: str,
    *,
    arrival: float = 0.0,
    num_prompt: int = 4,
    token_times: tuple[float, ...] = (),
    started: float | None = None,
    finished: float | None = None,
    finish_reason: FinishReason = "length",
    num_cached: int = 0,
    num_preempted: int = 0,
) -> RequestRecord:
    """A request whose answer came at `token_times`, ended by its last token unless `finished` says otherwise."""
    return RequestRecord(
        run="r",
        id=id,
        arrival=arrival,
        num_prompt=num_prompt,
        num_output=len(token_times),
        max_tokens=16,
        token_times=token_times,
        started=started,
        finished=finished if finished is not None else token_times[-1],
        finish_reason=finish_reason,
        num_cached=num_cached,
        num_preempted=num_preempted,
    )


def step(
    id: int,
    started: float,
    finished: float,
    *rows: RowRecord,
    held: int = 0,
    stored: int = 0,
    failed: str | None = None,
) -> StepRecord:
    """A step over pages of eight tokens."""
    return StepRecord(
        run="r",
        id=id,
        reason="next",
        started=started,
        finished=finished,
        rows=rows,
        pages_held=held,
        pages_total=16,
        page_size=8,
        tokens_stored=stored,
        num_waiting=0,
        failed=failed,
    )


def prefill(id: str, num_tokens: int, padding: int = 0) -> RowRecord:
    return RowRecord(id, 0, num_tokens, padding, True)


def decode(id: str, start: int) -> RowRecord:
    return RowRecord(id, start, 1, 0, True)


def dead(id: str | None) -> RowRecord:
    return RowRecord(id, 0, 0, 1, False)


A = request("a", num_prompt=4, token_times=(1.0, 2.0), started=0.0, num_cached=3, num_preempted=2)
B = request("b", num_prompt=2, token_times=(1.0, 2.0, 3.0, 5.0), started=0.5)
STEPS = [
    step(0, 0.0, 1.0, prefill("a", 4), prefill("b", 2, padding=2), held=2, stored=6),
    step(1, 1.0, 2.0, decode("a", 4), decode("b", 2), held=2, stored=8),
    step(2, 2.0, 3.0, dead("a"), decode("b", 3), held=2, stored=9),
    step(3, 4.0, 5.0, dead("a"), decode("b", 4), held=2, stored=10),
]


def test_rates_divide_the_tokens_of_completed_requests_by_first_arrival_to_last_end() -> None:
    """Six output and six prompt tokens over five seconds."""
    summary = summarize([A, B], STEPS)
    assert summary.makespan == 5.0
    assert summary.output_rate == pytest.approx(6 / 5)
    assert summary.total_rate == pytest.approx(12 / 5)


def test_the_makespan_starts_with_the_first_arrival_not_with_the_clock() -> None:
    """A run whose first request comes late isn't charged for the wait."""
    assert summarize([request("a", arrival=7.0, token_times=(8.0,))], []).makespan == 1.0


def test_latencies_follow_their_definitions() -> None:
    """TPOT is per request, ITL pools all gaps, and queue time ends with the first step."""
    summary = summarize([A, B], STEPS)
    assert summary.ttft is not None and summary.ttft.p50 == 1.0
    assert summary.tpot is not None and summary.tpot.p50 == pytest.approx((1.0 + 4 / 3) / 2)
    assert summary.itl is not None and (summary.itl.num, summary.itl.p50, summary.itl.max) == (4, 1.0, 2.0)
    assert summary.latency is not None and summary.latency.p99 == pytest.approx(2 + 3 * 0.99)
    assert summary.queue_time is not None and summary.queue_time.mean == 0.25


def test_wastes_count_padding_in_live_rows_and_dead_rows_in_decode_steps() -> None:
    """Two padded of fourteen positions; two dead of six decode rows; four dummies of fourteen positions."""
    summary = summarize([A, B], STEPS)
    assert summary.padding_waste == pytest.approx(2 / 14)
    assert summary.dead_row_waste == pytest.approx(2 / 6)
    assert summary.position_waste == pytest.approx(4 / 14)


def test_a_filler_row_in_a_prompt_step_is_no_decode_row() -> None:
    """Filling up a prompt step wastes positions, yet says nothing of head-of-line loss in decoding."""
    summary = summarize([A], [step(0, 0.0, 1.0, prefill("a", 4), RowRecord(None, 0, 0, 4, False))])
    assert summary.dead_row_waste is None
    assert summary.position_waste == 0.5


def test_batch_size_is_the_mean_over_steps_and_also_over_time() -> None:
    """A long step of one row pulls only the mean in time."""
    steps = [step(0, 0.0, 1.0, decode("a", 4), decode("b", 4)), step(1, 1.0, 4.0, decode("a", 5))]
    summary = summarize([A, B], steps)
    assert (summary.batch_mean, summary.batch_max, summary.batch_mean_in_time) == (1.5, 2, 1.25)


def test_kv_waste_is_what_the_held_pages_do_not_store() -> None:
    """Sixteen tokens are reserved throughout; six to ten of them are used."""
    summary = summarize([A, B], STEPS)
    assert (summary.kv_reserved_mean, summary.kv_reserved_peak) == (16.0, 16)
    assert summary.kv_stored_mean == 33 / 4
    assert summary.kv_waste == pytest.approx(1 - 33 / 64)


def test_idle_time_is_what_no_step_covers() -> None:
    """Overlapping steps in flight are counted once."""
    assert (summarize([A, B], STEPS).time_in_steps, summarize([A, B], STEPS).time_idle) == (4.0, 1.0)
    overlapping = [step(0, 0.0, 2.0, prefill("a", 4)), step(1, 1.0, 3.0, decode("a", 4))]
    assert summarize([A, B], overlapping).time_in_steps == 3.0


def test_a_failed_step_costs_time_and_counts_nowhere_else() -> None:
    """Its rows, pages and padding never happened."""
    summary = summarize([A, B], [*STEPS, step(9, 3.0, 3.5, prefill("a", 4, padding=90), held=16, failed="oom")])
    untroubled = summarize([A, B], STEPS)
    assert (summary.num_steps, summary.num_failed_steps) == (5, 1)
    assert summary.time_in_steps == untroubled.time_in_steps + 0.5
    assert summary.padding_waste == untroubled.padding_waste
    assert summary.kv_reserved_peak == untroubled.kv_reserved_peak


def test_lost_requests_are_counted_by_reason_and_have_no_latency() -> None:
    """Their tokens are not useful output; a first token that was seen still has its TTFT."""
    refused = request("x", finished=0.0, finish_reason="refused")
    aborted = request("y", token_times=(4.0,), finish_reason="abort")
    summary = summarize([A, refused, aborted], [])
    assert (summary.num_requests, summary.num_completed, summary.num_lost) == (3, 1, 2)
    assert summary.lost_by_reason == {"abort": 1, "refused": 1}
    assert summary.latency is not None and summary.latency.num == 1
    assert summary.ttft is not None and summary.ttft.num == 2
    assert summary.output_rate == pytest.approx(2 / 4)


def test_cached_tokens_and_preemptions_are_added_up() -> None:
    """Both come from the requests, not from the steps."""
    assert (summarize([A, B], STEPS).num_cached, summarize([A, B], STEPS).num_preempted) == (3, 2)


def test_nothing_recorded_gives_none_not_zero() -> None:
    """What is undefined says so, and only counts are zero."""
    summary = summarize([], [])
    undefined = {name for name, value in msgspec.structs.asdict(summary).items() if value is None}
    assert {"makespan", "output_rate", "ttft", "latency", "padding_waste", "batch_max", "kv_waste"} <= undefined
    assert (summary.num_requests, summary.num_steps, summary.time_in_steps) == (0, 0, 0.0)


def test_a_run_without_duration_has_no_rate() -> None:
    """All requests refused on arrival: nothing per second of nothing."""
    summary = summarize([request("a", finished=0.0, finish_reason="refused")], [])
    assert (summary.makespan, summary.output_rate) == (0.0, None)


def test_a_summary_is_json() -> None:
    """It can be written to a file and read by anything."""
    assert json.loads(msgspec.json.encode(summarize([A, B], STEPS)))["num_steps"] == 4


def test_goodput_counts_requests_that_meet_every_bound() -> None:
    """`a` has TPOT 1 s and latency 2 s, `b` 1.33 s and 5 s; a lost request is never good."""
    lost = request("c", token_times=(0.1,), finish_reason="abort")
    assert goodput([A, B, lost], Slo()).num_good == 2
    assert goodput([A, B, lost], Slo(tpot=1.0)).num_good == 1
    assert goodput([A, B, lost], Slo(ttft=0.5)).num_good == 0
    fast = goodput([A, B, lost], Slo(ttft=1.0, latency=2.0))
    assert (fast.num_good, fast.rate) == (1, 1 / 5)
    assert fast.share == pytest.approx(1 / 3)
    assert goodput([], Slo()).rate is None


def test_an_answer_of_one_token_meets_any_tpot() -> None:
    """It has no gap between tokens that could be too long."""
    assert goodput([request("a", token_times=(1.0,))], Slo(tpot=0.001)).num_good == 1


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_lies_within_its_values_and_hits_the_ends(values: list[float], share: float) -> None:
    """Zero is the smallest, one the largest, and anything between lies between."""
    found = percentile(values, share)
    assert found is not None
    assert percentile(values, 0.0) == min(values) and percentile(values, 1.0) == max(values)
    assert min(values) - 1e-6 <= found <= max(values) + 1e-6


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=40))
def test_a_percentile_interpolates_linearly_between_ranks(values: list[float]) -> None:
    """With an even number of values the median is the mean of the middle two."""
    ordered = sorted(values[: len(values) // 2 * 2])
    middle = len(ordered) // 2
    found = percentile(ordered, 0.5)
    assert found is not None and math.isclose(found, (ordered[middle - 1] + ordered[middle]) / 2, abs_tol=1e-9)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=8),
    st.integers(1, 5),
)
def test_shares_are_shares(shape: list[tuple[int, int]], num_steps: int) -> None:
    """Whatever rows were executed, a waste lies between zero and one, or is undefined."""
    rows = tuple(RowRecord(f"r{i}", 0, num_tokens, padding, True) for i, (num_tokens, padding) in enumerate(shape))
    summary = summarize([], [step(i, i, i + 1.0, *rows, held=2, stored=9) for i in range(num_steps)])
    for share in (summary.padding_waste, summary.dead_row_waste, summary.position_waste, summary.kv_waste):
        assert share is None or 0.0 <= share <= 1.0
