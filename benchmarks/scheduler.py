"""Milliseconds that one plan + commit takes, by the number of running requests; the machine's work is not in it.

Every running request decodes; in 16 consecutive steps each takes one new page. Repeats are taken in turn over all
sizes, so that a slow moment of the machine meets them alike. Prints a table and writes a dated file to results/.

    python benchmarks/scheduler.py [--repeats 10] [--no-file]
"""

import argparse
import gc
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import dated

from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.pages import Memory
from batchwright.policy.static import static
from batchwright.policy.types import ItemOutcome, Request, Scheduler, StepOutcome, StepPlan

SIZES = (64, 256, 1024)
PAGE_SIZE = 16
MEMORY = Memory(num_pages=40_000, page_size=PAGE_SIZE, context=4096)
STEPS_PER_REPEAT = 2 * PAGE_SIZE

SCHEDULERS: dict[str, Callable[[int], Scheduler]] = {
    "continuous": lambda num: Continuous(MEMORY, ContinuousSettings(max_rows=num, token_budget=100_000)),
    "continuous, no prefix cache": lambda num: Continuous(
        MEMORY, ContinuousSettings(max_rows=num, token_budget=100_000, prefix_caching=False)
    ),
    "static": lambda num: static(MEMORY, num),
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-file", action="store_true")
    arguments = parser.parse_args()
    results = measure(arguments.repeats)
    print_table(results)
    if not arguments.no_file:
        print(f"\nwritten to {write(results, arguments.repeats)}")


def measure(repeats: int) -> dict[str, dict[int, list[float]]]:
    """Per scheduler and size: the median step (ms) of every repeat."""
    results: dict[str, dict[int, list[float]]] = {name: {num: [] for num in SIZES} for name in SCHEDULERS}
    for _ in range(repeats):
        for name, make in SCHEDULERS.items():
            for num in SIZES:
                results[name][num].append(median_step(decoding(make(num), num)))
    return results


def decoding(scheduler: Scheduler, num_running: int) -> Scheduler:
    """`scheduler` with `num_running` prompts of one to two pages computed."""
    for index in range(num_running):
        keys = ((index, 0),)
        scheduler.add(Request(str(index), PAGE_SIZE + index % PAGE_SIZE, 500, keys=keys), 0.0)
    plan = scheduler.plan(0.0)
    assert plan and len(plan.chunks) == num_running
    scheduler.commit(plan.id, 0.0, outcome(plan))
    return scheduler


def outcome(plan: StepPlan) -> StepOutcome:
    """Every row gained a token; pages that it filled have keys."""
    return StepOutcome(
        tuple(
            ItemOutcome(chunk.request_id or "", 1, keys=() if end % PAGE_SIZE else ((chunk.request_id, end),))
            for chunk in plan.chunks
            for end in (chunk.start + chunk.num_tokens + 1,)
        )
    )


def median_step(scheduler: Scheduler) -> float:
    """Milliseconds of plan + commit; making the outcome is the executor's work and isn't counted."""
    times = []
    gc.collect()
    for _ in range(STEPS_PER_REPEAT):
        start = perf_counter()
        plan = scheduler.plan(0.0)
        planned = perf_counter()
        assert plan
        result = outcome(plan)
        commit = perf_counter()
        scheduler.commit(plan.id, 0.0, result)
        times.append(planned - start + perf_counter() - commit)
    return 1e3 * statistics.median(times)


def print_table(results: dict[str, dict[int, list[float]]]) -> None:
    """Medians over the repeats, lowest and highest beside them."""
    print(f"{'plan + commit, ms':30}" + "".join(f"{f'{num} running':>24}" for num in SIZES))
    for name, by_size in results.items():
        cells = (f"{statistics.median(ms):.3f} ({min(ms):.3f}..{max(ms):.3f})" for ms in by_size.values())
        print(f"{name:30}" + "".join(f"{cell:>24}" for cell in cells))


def write(results: dict[str, dict[int, list[float]]], repeats: int) -> Path:
    """The dated file."""
    return dated.write(
        "scheduler",
        "milliseconds per plan + commit: median step of every repeat",
        dated.spreads("ms", results),
        repeats=repeats,
        steps_per_repeat=STEPS_PER_REPEAT,
    )


if __name__ == "__main__":
    main()
