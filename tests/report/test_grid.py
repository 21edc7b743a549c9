"""Laws of the layout: areas are what the records hold, and no two cells share a place."""

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.records import RequestRecord, RowRecord, StepRecord
from batchwright.report.grid import Grid, Kind, lay_out
from tests.report.synthetic import runs

KINDS: tuple[Kind, ...] = ("prefill", "decode", "padding", "dead", "failed")


def step(id: int, *rows: RowRecord, at: float | None = None, seconds: float = 1.0, **changed: object) -> StepRecord:
    started = float(id) if at is None else at
    facts: dict[str, object] = {
        "run": "r",
        "id": id,
        "reason": "next",
        "started": started,
        "finished": started + seconds,
        "rows": rows,
        "pages_held": len(rows),
        "pages_total": 64,
        "page_size": 4,
        "tokens_stored": len(rows),
        "num_waiting": 0,
    }
    return StepRecord(**(facts | changed))


def request(id: str, num_prompt: int = 4, finished: float = 1.0) -> RequestRecord:
    return RequestRecord(
        run="r",
        id=id,
        arrival=0.0,
        num_prompt=num_prompt,
        num_output=0,
        max_tokens=8,
        finished=finished,
        finish_reason="length",
    )


def prefill(id: str, num_tokens: int = 4, padding: int = 0) -> RowRecord:
    return RowRecord(id, 0, num_tokens, padding, True)


def decode(id: str, start: int = 4) -> RowRecord:
    return RowRecord(id, start, 1, 0, True)


def dead(id: str | None) -> RowRecord:
    return RowRecord(id, 0, 0, 1, False)


def looks(grid: Grid) -> dict[str | None, list[tuple[int, Kind, float, float]]]:
    """Per request: row, kind, first step and number of steps of each of its cells."""
    seen = defaultdict(list)
    for hold in grid.holds:
        for cell in hold.cells:
            seen[hold.request_id].append((hold.row, cell.kind, cell.span.first_step, cell.span.num_steps))
    return dict(seen)


rows = st.lists(
    st.builds(
        RowRecord,
        st.sampled_from(["a", "b", "c", "d", None]),
        st.integers(0, 8),
        st.integers(0, 4),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_size=6,
)
step_records = st.lists(
    st.tuples(
        rows,
        st.floats(0.0, 3.0),
        st.floats(0.0, 2.0),
        st.sampled_from([None, None, None, "oom"]),
        st.sets(st.sampled_from("abcd"), max_size=1),
    ),
    max_size=12,
).map(
    lambda drawn: [
        step(index, *rows, at=index * 0.7 + at, seconds=seconds, failed=failed, preempted=tuple(preempted))
        for index, (rows, at, seconds, failed, preempted) in enumerate(drawn)
    ]
)


@given(step_records)
def test_the_areas_of_a_step_s_rows_add_up_to_its_rows(steps: list[StepRecord]) -> None:
    """Every row-step is drawn once, under one kind or split in two, whatever was merged."""
    grid = lay_out([*map(request, "abc")], steps)
    total = sum(grid.row_steps(kind) for kind in KINDS)
    assert total == pytest.approx(sum(len(step.rows) for step in steps))


@given(step_records)
def test_each_kind_s_area_is_what_the_records_hold(steps: list[StepRecord]) -> None:
    """Dead and failed rows count whole, padding by its share of the row's positions."""
    grid = lay_out([*map(request, "abc")], steps)
    done = [row for step in steps if step.failed is None for row in step.rows]
    assert grid.row_steps("dead") == pytest.approx(sum(1 for row in done if not row.num_tokens))
    assert grid.row_steps("failed") == pytest.approx(sum(len(step.rows) for step in steps if step.failed))
    shares = [row.padding / (row.num_tokens + row.padding) for row in done if row.num_tokens]
    assert grid.row_steps("padding") == pytest.approx(sum(shares))


@given(step_records)
def test_no_two_cells_of_a_row_overlap_in_steps_or_in_time(steps: list[StepRecord]) -> None:
    """Also when steps in flight overlap on the clock, or several rows belong to one request."""
    grid = lay_out([*map(request, "abc")], steps)
    by_row = defaultdict(list)
    for hold in grid.holds:
        by_row[hold.row] += [cell.span for cell in hold.cells]
    for spans in by_row.values():
        spans.sort(key=lambda span: span.first_step)
        for earlier, later in pairwise(spans):
            assert earlier.first_step + earlier.num_steps <= later.first_step + 1e-9
            assert earlier.end <= later.start + 1e-9


@given(step_records)
def test_no_more_rows_are_drawn_than_requests_were_under_way(steps: list[StepRecord]) -> None:
    """A row is reused as soon as its holder has had its last step."""
    grid = lay_out([], steps)
    assert grid.num_rows >= max((len(step.rows) for step in steps), default=0)
    present = Counter(
        index for hold in grid.holds for index in range(int(hold.cells[0].span.first_step), last_step(hold) + 1)
    )
    assert grid.num_rows == max(present.values(), default=0)


def last_step(hold) -> int:
    span = hold.cells[-1].span
    return round(span.first_step + span.num_steps) - 1


def test_a_request_takes_the_lowest_free_row_and_keeps_it() -> None:
    """`c` takes over the row of `a`, which ended, though `b` went on below."""
    steps = [step(0, prefill("a"), prefill("b")), step(1, decode("b")), step(2, decode("b", 5), prefill("c"))]
    seen = looks(lay_out([*map(request, "abc")], steps))
    assert seen["a"] == [(0, "prefill", 0, 1)]
    assert seen["b"] == [(1, "prefill", 0, 1), (1, "decode", 1, 2)]
    assert seen["c"] == [(0, "prefill", 2, 1)]


def test_a_dead_row_stays_in_the_row_of_its_ended_request() -> None:
    """Nobody else gets it before the batch is over."""
    steps = [step(0, prefill("a"), prefill("b")), step(1, dead("a"), decode("b")), step(2, dead("a"), decode("b", 5))]
    assert looks(lay_out([request("a"), request("b")], steps))["a"] == [(0, "prefill", 0, 1), (0, "dead", 1, 2)]


def test_filler_rows_get_rows_of_their_own() -> None:
    """Two of them for two steps, then one: each is one hold without a request."""
    steps = [step(0, prefill("a"), dead(None), dead(None)), step(1, decode("a"), dead(None), dead(None))]
    steps.append(step(2, decode("a", 5), dead(None)))
    assert looks(lay_out([request("a")], steps))[None] == [(1, "dead", 0, 3), (2, "dead", 0, 2)]


def test_a_padded_cell_is_split_where_its_padding_begins() -> None:
    """Three useful of four positions are three quarters of the step, in steps and in time."""
    grid = lay_out([request("a", num_prompt=3)], [step(0, prefill("a", 3, padding=1), at=2.0, seconds=4.0)])
    useful, padding = grid.holds[0].cells
    assert (useful.kind, useful.span.num_steps, useful.span.start, useful.span.end) == ("prefill", 0.75, 2.0, 5.0)
    assert (padding.kind, padding.span.num_steps, padding.span.end) == ("padding", 0.25, 6.0)


def test_what_a_preemption_took_is_prefill_until_a_token_is_sampled_again() -> None:
    """Computing prompt and answer once more is no decoding, even in chunks that start beyond the prompt."""
    steps = [
        step(0, prefill("a")),
        step(1, decode("a")),
        step(2, prefill("b"), preempted=("a",)),
        step(3, RowRecord("a", 0, 5, 0, False)),
        step(4, RowRecord("a", 5, 1, 0, True)),
        step(5, decode("a", 6)),
    ]
    seen = looks(lay_out([request("a"), request("b")], steps))
    assert seen["a"] == [(0, "prefill", 0, 1), (0, "decode", 1, 1), (0, "prefill", 3, 2), (0, "decode", 5, 1)]
    assert seen["b"] == [(1, "prefill", 2, 1)]


def test_a_pause_that_one_could_see_parts_cells_and_bursts() -> None:
    """A pause of half the run is drawn, one of a thousandth is not."""
    grid = lay_out([request("a")], [step(0, prefill("a")), step(1, decode("a")), step(2, decode("a", 5), at=4.0)])
    assert [(burst.first_step, burst.num_steps) for burst in grid.bursts] == [(0, 2), (2, 1)]
    assert [cell.span.num_steps for cell in grid.holds[0].cells] == [1, 1, 1]
    close = lay_out([request("a")], [step(0, decode("a")), step(1, decode("a", 5), at=1.002)])
    assert len(close.bursts) == len(close.holds[0].cells) == 1


def test_records_may_come_in_any_order() -> None:
    """The layout follows the clock."""
    steps = [step(0, prefill("a"), prefill("b")), step(1, decode("a"), dead("b")), step(2, decode("a", 5))]
    assert lay_out([request("a"), request("b")], steps) == lay_out([request("b"), request("a")], steps[::-1])


def test_nothing_recorded_is_an_empty_grid() -> None:
    """No rows, no steps, no length."""
    assert lay_out([], []) == Grid(num_rows=0, end=0.0, steps=(), times=(), bursts=(), holds=())


@pytest.mark.parametrize("run", list(runs(64)), ids=lambda run: run.name)
def test_a_real_run_needs_few_rectangles(run) -> None:
    """Thousands of steps merge into a handful of cells per request."""
    grid = lay_out(run.requests, run.steps)
    assert sum(len(hold.cells) for hold in grid.holds) <= 4 * len(run.requests)
    assert grid.num_rows == max(len(step.rows) for step in run.steps)
