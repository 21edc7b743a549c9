"""Scales, axes and curves of the report's figures."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.records import percentile
from batchwright.report import figures
from batchwright.report.figures import Curve
from batchwright.report.grid import lay_out
from tests.report.synthetic import PAGE as PAGE_SIZE
from tests.report.synthetic import POOL, runs


@pytest.fixture(scope="module")
def grids():
    return {run.name: lay_out(run.requests, run.steps) for run in runs(24)}


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_scales_fit_every_run_of_a_scene(grids) -> None:
    """The longest run, the fullest cache and the longest queue set them."""
    scales = figures.scales_of(list(grids.values()))
    assert scales.end == max(grid.end for grid in grids.values())
    held = max(step.pages_held * PAGE_SIZE for grid in grids.values() for step in grid.steps)
    assert held <= scales.kv_top <= POOL * PAGE_SIZE
    assert scales.queue_top >= 20


def test_shares_of_what_was_executed_add_up(grids) -> None:
    """Static runs padding and dead rows, continuous neither, and the rest is prefill and decode."""
    shares = {name: figures.shares_of(grid) for name, grid in grids.items()}
    assert all(sum(share.values()) == pytest.approx(1.0) for share in shares.values())
    assert min(shares["static"]["padding"], shares["static"]["dead"]) > 0.05
    assert shares["continuous"]["padding"] == shares["continuous"]["dead"] == 0.0


def test_a_run_that_ends_early_says_when(grids) -> None:
    """The space that it leaves on the common clock holds the words; the longest run has none."""
    scales = figures.scales_of(list(grids.values()))
    longest = max(grids, key=lambda name: grids[name].end)
    marked = {
        name: "ended at" in figures.rows_by_steps(grid, [], scales, "").split("</desc>")[1]
        for name, grid in grids.items()
    }
    assert marked["continuous"]
    assert not marked[longest]


@pytest.mark.parametrize(("share", "marked"), [(0.69, True), (0.71, False)])
def test_a_run_says_when_it_ended_only_where_a_phone_has_room_for_it(grids, share: float, marked: bool) -> None:
    """Thirty percent of its clock, which is what the longest words take on 375 pixels."""
    grid = grids["static"]
    scales = replace(figures.scales_of([grid]), end=grid.end / share)
    assert (f'class="end on-common" x="{100 * share:g}%"' in figures.rows_by_steps(grid, [], scales, "")) == marked


def test_curves_over_thousands_of_steps_stay_short(grids) -> None:
    """What is too narrow to see is joined at its maximum."""
    scales = figures.scales_of(list(grids.values()))
    assert len(grids["one-by-one"].steps) > 1000
    assert len(figures.kv_over_time(grids["one-by-one"], scales, "")) < 40_000


@given(st.floats(1e-4, 1e6))
def test_a_time_axis_has_a_few_ticks_and_none_beyond_its_end(end: float) -> None:
    """Two to eight labels in one unit, starting at zero."""
    ticks = figures._time_ticks(end)
    assert 2 <= len(ticks) <= 8
    assert ticks[0] == (0.0, "0")
    assert all(value <= end * 1.000001 for value, _ in ticks)
    assert len({label.split()[1] for _, label in ticks[1:]}) == 1


def test_a_run_of_two_minutes_is_counted_in_seconds() -> None:
    """Fractions of minutes are hard to read."""
    assert [label for _, label in figures._time_ticks(132.3)] == ["0", "20 s", "40 s", "60 s", "80 s", "100 s", "120 s"]


def test_steps_are_counted_in_whole_numbers() -> None:
    """Three steps have no tick at a half."""
    assert figures._round_numbers(3, whole=True) == [0, 1, 2, 3]


def test_a_wide_range_of_latencies_gets_a_logarithmic_axis() -> None:
    """Beyond a factor of thirty; below, the axis is linear and starts at zero."""
    narrow = figures.distribution("t", [Curve("a", "s0", [1.0, 2.0, 3.0], 3)])
    wide = figures.distribution("t", [Curve("a", "s0", [0.01, 0.2, 3.0], 3)])
    assert "linear" in narrow and "0" in texts(narrow)
    assert "logarithmic" in wide and {"10 ms", "100 ms", "1 s"} <= set(texts(wide))


def test_lost_requests_keep_a_curve_below_the_top() -> None:
    """Two of four got an answer: the curve ends at one half, and its dot is at half of that."""
    svg = figures.distribution("t", [Curve("a", "s0", [1.0, 2.0], 4)])
    assert f"V{figures._curve_y(0.5)}H1000" in svg
    assert re.search(f'<circle [^>]*cy="{figures._curve_y(0.25)}"', svg)


@pytest.mark.parametrize(("values", "median"), [([3.0], "3 s"), ([1.0, 2.0], "1.5 s"), ([1.0, 2.0, 4.0], "2 s")])
def test_the_dot_is_the_median_that_tables_print(values: list[float], median: str) -> None:
    """Between the middle two of an even number, where the curve is level."""
    svg = figures.distribution("t", [Curve("a", "s0", values, len(values))])
    assert f"<title>a: median {median}</title>" in svg
    assert f'cx="{figures._percent(percentile(values, 0.5), values[-1])}" cy="{figures._curve_y(0.5)}"' in svg
