"""What a comparison found, in plain sentences that follow from its numbers alone.

They hold for any strategies in any order. Times that print alike are a tie, and are said in one breath.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

from batchwright.records import StepRecord
from batchwright.report.figures import shares_of
from batchwright.report.grid import lay_out
from batchwright.studies.comparison import Comparison, Recorded, SceneResult, StrategyRun, run_name
from batchwright.units import format_seconds


def verdict(comparison: Comparison, records: Mapping[str, Recorded]) -> str:
    """Who was done first, the others' times, and what the most wasteful strategy spent on waste, all at once."""
    at_once, size = comparison.scenes[0], comparison.settings["batch_size"]
    names = {
        "one-by-one": "requests one by one",
        "static": f"static batches of {size}",
        "dynamic": f"dynamic batches of up to {size}",
        "continuous": "continuous batching",
    }
    ranked = sorted((run.summary.makespan or 0.0, names[run.strategy]) for run in at_once.runs)
    (first, fastest), *later = (
        (time, [name for _, name in tied]) for time, tied in groupby(ranked, lambda one: _time(one[0]))
    )
    num_requests = comparison.num_requests
    given = f"Given {num_requests:,} requests at once, " if num_requests > 1 else "Given one request, "
    found = f"{given}{listed(fastest)} finished in {first}{_each(fastest)}"
    if later:
        found += "; " + listed([f"{listed(tied)} took {time}{_each(tied)}" for time, tied in later])
    return f"{found}.{_waste(at_once, records)}"


def same_steps(at_once: SceneResult, records: Mapping[str, Recorded]) -> str:
    """Which strategies executed the same rows in the same steps, so that only noise tells their times apart."""
    groups: list[tuple[list[object], list[StrategyRun]]] = []
    for run in at_once.runs:
        rows = _rows(records[run_name(at_once.title, run.strategy)].steps)
        alike = next((runs for other, runs in groups if other == rows), None)
        if alike is None:
            groups.append((rows, [run]))
        else:
            alike.append(run)
    return " ".join(_noise(runs) for _, runs in groups if len(runs) > 1)


def keeping_up(at_once: SceneResult, rate: float | None) -> str:
    """Which strategies were slower, given all requests at once, than `rate` requests/s come."""
    if rate is None or at_once.runs[0].summary.num_requests < 2:
        return ""
    slow = [(run, capacity) for run in at_once.runs if (capacity := run.capacity) is not None and capacity < rate]
    if not slow:
        return "As measured above, all strategies keep up with that." if len(at_once.runs) > 1 else ""
    named = listed([f"{run.strategy} ({capacity:.3g}/s)" for run, capacity in slow])
    one = len(slow) == 1
    return (
        f"As measured above, {named} cannot keep up with that, so "
        f"{'its' if one else 'their'} waits grow as long as requests keep coming."
    )


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, or `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _time(seconds: float) -> str:
    """With a space at which no line breaks."""
    return format_seconds(seconds).replace(" ", "\N{NO-BREAK SPACE}")


def _each(names: Sequence[str]) -> str:
    return " each" if len(names) > 1 else ""


def _waste(scene: SceneResult, records: Mapping[str, Recorded]) -> str:
    """The sentence on the strategy that spent the most on waste, if any spent a hundredth."""
    wastes = []
    for run in scene.runs:
        its = records[run_name(scene.title, run.strategy)]
        shares = shares_of(lay_out(its.requests, its.steps))
        wastes.append((run.strategy, {"padding": shares["padding"], "dead rows": shares["dead"]}))
    strategy, waste = max(wastes, key=lambda one: round(sum(one[1].values()), 2))
    total = sum(waste.values())
    if total < 0.01:
        return ""
    spent_on = listed([kind for kind, share in waste.items() if share > 0])
    return f" {strategy.capitalize()} batches spent {total:.0%} of their row-time on {spent_on}."


def _rows(steps: Sequence[StepRecord]) -> list[object]:
    return [step.rows for step in sorted(steps, key=lambda step: (step.started, step.id))]


def _noise(runs: Sequence[StrategyRun]) -> str:
    times = [run.summary.makespan or 0.0 for run in runs]
    apart = f"{max(times) / min(times) - 1:.1%}" if min(times) else "nothing"
    difference = "the difference" if len(runs) == 2 else "the largest difference"
    names = listed([run.strategy for run in runs]).capitalize()
    return f"{names} executed the same steps here: {difference} between their times, {apart}, is this machine's noise."
