"""Milliseconds that the engine itself takes per step, beside its executor: plan, commit, text, records, delivery.

The embedded model's tokenizer turns real tokens into text; nothing is computed. All rows decode, each for a stream of
its own, over steps in which every row begins a page and fills one. Repeats are taken in turn over all sizes. Prints a
table and writes a dated file to results/; `--profile` prints where the time goes instead.

    python benchmarks/engine.py [--repeats 10] [--no-file] [--profile]
"""

import argparse
import cProfile
import gc
import pstats
import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import dated

from batchwright.policy.pages import Memory
from batchwright.policy.types import StepPlan
from batchwright.serve.engine import Engine
from batchwright.serve.loading.weights import LoadedModel, load
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sampling.sampler import Sampled
from batchwright.serve.sequences import NO_EXTRAS, Extras, RowResult

SIZES = (32, 64)
NUM_STEPS = 256
MEMORY = Memory(num_pages=4096, page_size=16, context=4096)
TEXT = "The quick brown fox jumps over the lazy dog, and seven wizards box with five dozen jugs of liquor. " * 8


class ScriptedExecutor:
    """Answers at once: the next token of `TEXT`. Counts the time that it takes itself."""

    script: tuple[int, ...] = ()
    expert_tokens = ()

    def __init__(self, decoder: Any, memory: Memory, *, overlaps: bool = False) -> None:
        self.overlaps = overlaps
        self.seconds = 0.0

    def add(self, request_id: str, tokens: Sequence[int], params: SamplingParams, extras: Extras = NO_EXTRAS) -> None:
        pass

    def remove(self, request_id: str) -> None:
        pass

    def start(self, plan: StepPlan) -> "ScriptedExecutor":
        self._plan = plan
        return self

    def result(self) -> list[RowResult]:
        started = perf_counter()
        script, chunks = self.script, self._plan.chunks
        results = [RowResult(chunk.request_id or "", (Sampled(script[chunk.start % len(script)]),)) for chunk in chunks]
        self.seconds += perf_counter() - started
        return results


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-file", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    model = load()
    assert model.tokenizer
    ScriptedExecutor.script = tuple(model.tokenizer.encode(TEXT))
    if arguments.profile:
        profile(model)
        return
    results = measure(model, arguments.repeats)
    print_table(results)
    if not arguments.no_file:
        print(f"\nwritten to {write(results, arguments.repeats)}")


def measure(model: LoadedModel, repeats: int) -> dict[str, dict[int, list[float]]]:
    """Per way to run and size: the median step (ms) of every repeat."""
    results: dict[str, dict[int, list[float]]] = {way: {num: [] for num in SIZES} for way in ("in turn", "overlapped")}
    for _ in range(repeats):
        for way in results:
            for num in SIZES:
                times = step_times(decoding(model, num, overlaps=way == "overlapped"))
                results[way][num].append(1e3 * statistics.median(times))
    return results


def decoding(model: LoadedModel, num_rows: int, *, overlaps: bool) -> Engine:
    """An engine in the middle of `num_rows` answers."""
    engine = Engine(
        model, memory=MEMORY, executor=lambda decoder, memory: ScriptedExecutor(decoder, memory, overlaps=overlaps)
    )
    inbox: deque[object] = deque(maxlen=1)
    for index in range(num_rows):
        params = SamplingParams(max_tokens=NUM_STEPS + 20, ignore_eos=True)
        engine.submit(list(range(100 + index, 120 + 2 * index)), params, on_output=inbox.append)
    for _ in range(10):
        engine.step()
    return engine


def step_times(engine: Engine) -> list[float]:
    """Seconds of each step that are the engine's own."""
    executor: Any = engine.executor
    times = []
    gc.collect()
    for _ in range(NUM_STEPS):
        before = executor.seconds
        started = perf_counter()
        engine.step()
        times.append(perf_counter() - started - (executor.seconds - before))
    return times


def profile(model: LoadedModel) -> None:
    """Where the time of steps of the first size goes, functions in the order of their own time."""
    engine = decoding(model, SIZES[0], overlaps=True)
    profiler = cProfile.Profile()
    profiler.runcall(step_times, engine)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def print_table(results: dict[str, dict[int, list[float]]]) -> None:
    """Medians over the repeats, lowest and highest beside them."""
    print(f"{'engine, ms per step':22}" + "".join(f"{f'{num} rows':>24}" for num in SIZES))
    for name, by_size in results.items():
        cells = (f"{statistics.median(ms):.3f} ({min(ms):.3f}..{max(ms):.3f})" for ms in by_size.values())
        print(f"{name:22}" + "".join(f"{cell:>24}" for cell in cells))


def write(results: dict[str, dict[int, list[float]]], repeats: int) -> Path:
    """The dated file."""
    return dated.write(
        "engine",
        "milliseconds per step outside the executor: median step of every repeat",
        dated.spreads("ms", results),
        repeats=repeats,
        steps_per_repeat=NUM_STEPS,
    )


if __name__ == "__main__":
    main()
