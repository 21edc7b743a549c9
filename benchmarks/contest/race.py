"""The contest itself: everyone is prepared, then in every repeat all run in turn, one at a time.

So a slow moment of the machine meets all alike, and ratios are taken within a repeat. A contestant that cannot be
prepared, dies, or makes another number of tokens than was asked is absent, with the reason, and the others go on.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from .contestants import Contestant
from .environments import interpreter
from .models import model
from .places import PEERS, Absent
from .worker import Worker

Job = tuple[list[int], int]
"""Prompt, and the number of tokens to make."""


@dataclass(slots=True)
class Race:
    """What came of it. `entries`: what a worker said of itself; `outputs`: the distinct ones of all its runs."""

    entries: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def leave(self, name: str, reason: str) -> None:
        """`name` is out, its runs too."""
        print(f"{name} is absent: {reason}", flush=True)
        self.absent[name] = reason
        for kept in (self.entries, self.runs, self.outputs):
            kept.pop(name, None)


def race(contestants: Mapping[str, Contestant], jobs: Sequence[Job], *, dtype: str, threads: int, repeats: int) -> Race:
    """Prepare all, then run all in turn, `repeats` times over."""
    result = Race()
    workers: dict[str, Worker] = {}
    with ExitStack() as stack:
        for name, contestant in contestants.items():
            try:
                worker, result.entries[name] = _prepared(name, contestant, jobs, dtype, threads, stack)
            except Absent as reason:
                result.leave(name, str(reason))
            else:
                workers[name], result.runs[name], result.outputs[name] = worker, [], []
                best = result.entries[name]["tried"][0]
                print(f"{name} is ready: {best['settings']}, {best['seconds']:.1f} s", flush=True)
        for repeat in range(repeats):
            for name in list(result.runs):
                _run(name, workers[name], jobs, result, f"repeat {repeat + 1}, ")
    return result


def _prepared(
    name: str, contestant: Contestant, jobs: Sequence[Job], dtype: str, threads: int, stack: ExitStack
) -> tuple[Worker, Any]:
    python = interpreter(contestant.environment)
    path = model(contestant.form, dtype)
    worker = Worker(name, [str(python), str(PEERS / contestant.worker)], threads)
    stack.callback(worker.close)
    setup = {"jobs": jobs, "model": str(path), "dtype": dtype, "threads": threads, "tries": contestant.tries}
    return worker, worker.ask(setup)


def _run(name: str, worker: Worker, jobs: Sequence[Job], result: Race, prefix: str) -> None:
    """One run, added to the result."""
    try:
        answer = worker.ask({"run": True})
        _check(answer["outputs"], jobs)
    except Absent as reason:
        result.leave(name, str(reason))
        return
    speed = sum(num_output for _, num_output in jobs) / answer["seconds"]
    result.runs[name].append({"seconds": answer["seconds"], "tokens_per_second": speed, **answer["figures"]})
    if answer["outputs"] not in result.outputs[name]:
        result.outputs[name].append(answer["outputs"])
    print(f"{prefix}{name}: {speed:.1f} tok/s", flush=True)


def _check(outputs: Sequence[Sequence[int]], jobs: Sequence[Job]) -> None:
    """Everyone makes exactly what was asked."""
    if len(outputs) != len(jobs):
        raise Absent(f"it answered {len(outputs)} of {len(jobs)} requests")
    for index, (output, (_, num_output)) in enumerate(zip(outputs, jobs, strict=True)):
        if len(output) != num_output:
            raise Absent(f"it made {len(output)} tokens for request {index}, which was to get {num_output}")
