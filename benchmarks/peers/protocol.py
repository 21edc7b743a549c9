"""The worker's side of the contest: a process that loads once, warms up, and runs the requests whenever it is told.

One JSON object a line. First `Setup` comes in, and {"ready": true, ...} goes out; then every {"run": true} is answered
with {"seconds": ..., "outputs": [[token, ...], ...], "figures": {...}}; the end of input ends the worker. Its clock
starts and stops beside the work, so the pipe is in nobody's time. Whatever a library prints goes to standard error.
Needs nothing but Python, because every peer's own environment imports it.
"""

import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TextIO

PR_SET_PDEATHSIG = 1


class Job(NamedTuple):
    """One request: token ids, and how many to make."""

    prompt: list[int]
    num_output: int


class Setup(NamedTuple):
    """What a worker is told at its start. `tries`: settings of the library, of which the fastest is kept."""

    jobs: list[Job]
    model: Path
    dtype: str
    threads: int
    tries: list[dict[str, Any]]


class Made(NamedTuple):
    """The tokens of each job, in the order of the jobs, and other figures of the run."""

    outputs: Sequence[Sequence[int]]
    figures: Mapping[str, float] = {}


Run = Callable[[Sequence[Job]], Made]
Prepare = Callable[[Setup, Mapping[str, Any]], Run]
"""Loads the model with one of the tries; what it returns runs jobs, with nothing kept from one call to the next."""


def work(prepare: Prepare, libraries: Sequence[str]) -> None:
    """Be a worker until the input ends. `libraries`: distributions whose versions belong to the result."""
    with answers() as out:
        first = json.loads(sys.stdin.readline())
        setup = Setup(
            [Job(*job) for job in first["jobs"]],
            Path(first["model"]),
            first["dtype"],
            first["threads"],
            first["tries"],
        )
        run, tried = _fastest(prepare, setup)
        versions = {name: version(name) for name in libraries}
        say(out, {"ready": True, "versions": versions, "tried": tried})
        for line in sys.stdin:
            assert json.loads(line) == {"run": True}
            seconds, made = _timed(run, setup.jobs)
            outputs = [[int(token) for token in output] for output in made.outputs]
            say(out, {"seconds": seconds, "outputs": outputs, "figures": dict(made.figures)})


def _die_with_parent() -> None:
    """A worker stands still while it waits, so it would not notice that its driver is gone; Linux can end it then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def answers() -> Iterator[TextIO]:
    """The pipe to whoever started us, out of the reach of what libraries print."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        _die_with_parent()
        yield out


def _fastest(prepare: Prepare, setup: Setup) -> tuple[Run, list[dict[str, Any]]]:
    """The run of the fastest try, which is the warm-up as well: all jobs, twice with each where there are several."""
    if len(setup.tries) == 1:
        run = prepare(setup, setup.tries[0])
        return run, [{"settings": setup.tries[0], "seconds": _timed(run, setup.jobs)[0]}]
    tried = []
    for settings in setup.tries:
        run = prepare(setup, settings)
        tried.append({"settings": settings, "seconds": min(_timed(run, setup.jobs)[0] for _ in range(2))})
        del run  # before the next is loaded
    best = min(tried, key=lambda one: one["seconds"])
    run = prepare(setup, best["settings"])
    _timed(run, setup.jobs)
    return run, sorted(tried, key=lambda one: one["seconds"])


def _timed(run: Run, jobs: Sequence[Job]) -> tuple[float, Made]:
    began = perf_counter()
    made = run(jobs)
    seconds = perf_counter() - began
    gc.collect()  # what the run left in cycles, such as a cache of keys and values, is not held while others run
    return seconds, made


def say(out: TextIO, what: Mapping[str, Any]) -> None:
    """One line to the driver."""
    out.write(json.dumps(what) + "\n")
    out.flush()
