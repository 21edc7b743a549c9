"""What is said of a comparison in words, against hand-made numbers: any strategies, any order, ties included."""

from typing import Any

import msgspec
import pytest

from batchwright.bench.summary import summarize
from batchwright.facts.hardware import Fact, Hardware
from batchwright.records import RequestRecord, RowRecord, StepRecord
from batchwright.studies.comparison import Comparison, Recorded, SceneResult, StrategyRun, run_name
from batchwright.studies.findings import keeping_up, same_steps, verdict

SCENE = "all at once"
USEFUL = (RowRecord("0", 0, 4, 0, True), RowRecord("1", 0, 4, 0, True))
PADDED = (RowRecord("0", 0, 4, 0, True), RowRecord("1", 0, 2, 2, True))
DEAD = (RowRecord("0", 4, 1, 0, True), RowRecord("1", 2, 0, 1, False))
Rows = tuple[RowRecord, ...]


def run_of(strategy: str, time: float, *steps: Rows, num_requests: int = 2) -> tuple[StrategyRun, Recorded]:
    """A run of equally long steps that ends after `time` seconds."""
    run, width = run_name(SCENE, strategy), time / max(1, len(steps))
    requests = [
        RequestRecord(
            run=run,
            id=f"{index}",
            arrival=0.0,
            num_prompt=4,
            num_output=1,
            max_tokens=1,
            started=0.0,
            finished=time,
            finish_reason="length",
            token_times=(time,),
        )
        for index in range(num_requests)
    ]
    recorded = [
        StepRecord(
            run=run,
            id=index,
            reason="next",
            started=index * width,
            finished=(index + 1) * width,
            rows=rows,
            pages_held=2,
            pages_total=4,
            page_size=16,
            tokens_stored=8,
            num_waiting=0,
        )
        for index, rows in enumerate(steps)
    ]
    summary = summarize(requests, recorded)
    done = StrategyRun(strategy=strategy, note="", summary=summary, useful_flops=1, roofline_share=None)
    return done, Recorded(run, requests, recorded)


def scene_of(*runs: tuple[StrategyRun, Recorded]) -> tuple[SceneResult, dict[str, Recorded]]:
    scene = SceneResult(title=SCENE, what="", rate=None, load=None, offered="", runs=tuple(run for run, _ in runs))
    return scene, {its.run: its for _, its in runs}


def verdict_of(*runs: tuple[StrategyRun, Recorded]) -> str:
    scene, records = scene_of(*runs)
    facts: dict[str, Any] = {
        "settings": {"batch_size": 8},
        "hardware": Hardware(name="x", bandwidth=Fact(1.0, "given")),
        "model": "m",
        "dtype": "float32",
        "source": "",
        "num_requests": runs[0][0].summary.num_requests,
        "num_prompt_tokens": 1,
        "num_output_tokens": 1,
        "longest_prompt": 1,
        "longest_output": 1,
        "are_outputs_forced": True,
        "versions": {},
        "date": "",
        "seconds": 1.0,
        "scenes": (scene, scene),
    }
    return verdict(Comparison(**facts), records).replace("\N{NO-BREAK SPACE}", " ")


# ---- the verdict


@pytest.mark.parametrize("order", [1, -1])
def test_the_verdict_ranks_all_strategies_by_their_time(order: int) -> None:
    """In whatever order they ran, with the waste of the most wasteful."""
    runs = [
        run_of("one-by-one", 10.3, USEFUL),
        run_of("static", 7.9, PADDED, DEAD),
        run_of("dynamic", 7.8, PADDED),
        run_of("continuous", 3.1, USEFUL),
    ]
    assert verdict_of(*runs[::order]) == (
        "Given 2 requests at once, continuous batching finished in 3.1 s; dynamic batches of up to 8 took 7.8 s, "
        "static batches of 8 took 7.9 s and requests one by one took 10.3 s. "
        "Static batches spent 38% of their row-time on padding and dead rows."
    )


def test_the_verdict_of_one_strategy_is_its_time() -> None:
    """With nothing to hold it against, and no waste to speak of."""
    assert verdict_of(run_of("continuous", 3.1, USEFUL)) == (
        "Given 2 requests at once, continuous batching finished in 3.1 s."
    )


def test_the_verdict_says_who_was_faster_than_continuous() -> None:
    """Whoever was first is named first."""
    found = verdict_of(run_of("continuous", 4.0, USEFUL), run_of("static", 3.0, USEFUL))
    assert found == ("Given 2 requests at once, static batches of 8 finished in 3 s; continuous batching took 4 s.")


def test_times_that_print_alike_are_a_tie() -> None:
    """First together, or later together."""
    first = verdict_of(run_of("continuous", 3.0001, USEFUL), run_of("static", 3.0, USEFUL), run_of("dynamic", 5.0))
    assert "at once, static batches of 8 and continuous batching finished in 3 s each; dynamic" in first
    later = verdict_of(run_of("continuous", 3.0, USEFUL), run_of("static", 5.0), run_of("dynamic", 5.0001))
    assert later.endswith("; static batches of 8 and dynamic batches of up to 8 took 5 s each.")


@pytest.mark.parametrize(
    ("rows", "spent_on"), [(PADDED, "25% of their row-time on padding"), (DEAD, "50% of their row-time on dead rows")]
)
def test_only_waste_that_there_was_is_named(rows: Rows, spent_on: str) -> None:
    """Padding without dead rows, or dead rows alone."""
    assert verdict_of(run_of("dynamic", 1.0, rows)).endswith(f"Dynamic batches spent {spent_on}.")


def test_one_request_is_in_the_singular() -> None:
    """All of one would read oddly."""
    assert verdict_of(run_of("static", 1.0, USEFUL, num_requests=1)).startswith("Given one request, static batches")


# ---- equal steps


def test_equal_steps_make_their_times_difference_noise() -> None:
    """Those that executed the same rows are named, the others are not."""
    scene, records = scene_of(
        run_of("one-by-one", 9.0, USEFUL, USEFUL),
        run_of("static", 5.0, PADDED, DEAD),
        run_of("dynamic", 5.1, PADDED, DEAD),
    )
    assert same_steps(scene, records) == (
        "Static and dynamic executed the same steps here: "
        "the difference between their times, 2.0%, is this machine's noise."
    )


def test_more_than_two_of_equal_steps_differ_by_the_largest() -> None:
    """As with a single request, which every strategy runs alike."""
    scene, records = scene_of(
        *(run_of(name, time, USEFUL) for name, time in (("static", 1.0), ("dynamic", 1.2), ("continuous", 1.1)))
    )
    found = same_steps(scene, records)
    assert found.startswith("Static, dynamic and continuous executed the same steps here: the largest difference")
    assert "20.0%" in found


def test_unequal_steps_are_not_mentioned() -> None:
    """Another row, or one step more."""
    scene, records = scene_of(
        run_of("static", 1.0, PADDED), run_of("dynamic", 1.0, PADDED, DEAD), run_of("continuous", 1.0, USEFUL)
    )
    assert same_steps(scene, records) == ""


# ---- keeping up


def capacities(*names_and_times: tuple[str, float]) -> SceneResult:
    """Two requests in that time under each strategy."""
    return scene_of(*(run_of(name, time, USEFUL) for name, time in names_and_times))[0]


def test_those_slower_than_the_rate_cannot_keep_up() -> None:
    """By the requests per second that each managed with all at once."""
    at_once = capacities(("one-by-one", 4.0), ("static", 1.0), ("continuous", 0.25))
    assert keeping_up(at_once, 2.5) == (
        "As measured above, one-by-one (0.5/s) and static (2/s) cannot keep up with that, so their waits grow as long "
        "as requests keep coming."
    )
    assert "one-by-one (0.5/s) cannot keep up with that, so its waits grow" in keeping_up(at_once, 1.0)
    assert "one-by-one (0.5/s), static (2/s) and continuous (8/s) cannot" in keeping_up(at_once, 9.0)


def test_it_is_said_if_all_keep_up() -> None:
    """Nothing is missing from the list of those that can't."""
    at_once = capacities(("static", 1.0), ("continuous", 0.5))
    assert keeping_up(at_once, 1.0) == "As measured above, all strategies keep up with that."


@pytest.mark.parametrize("rate", [None, 1.0])
def test_without_a_rate_or_a_choice_nothing_is_said_of_keeping_up(rate: float | None) -> None:
    """All at the same moment, or one strategy that does keep up."""
    assert keeping_up(capacities(("continuous", 1.0)), rate) == ""


def test_capacity_is_in_requests_per_second() -> None:
    """Undefined for a run that took no time."""
    run, _ = run_of("static", 0.5, USEFUL)
    assert run.capacity == 4.0
    assert msgspec.structs.replace(run, summary=summarize([], [])).capacity is None
