"""Our own engine. A new one for every run, so that its prefix cache is empty; the model is loaded once.

Beside the tokens it reports where the time went: the engine's own summary, what a step of 32 decoding rows takes
outside the forward, and what a row takes that decodes alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from protocol import Job, Made, Run, Setup, work

from batchwright import Engine, SamplingParams
from batchwright.bench.summary import summarize
from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.static import one_by_one, static
from batchwright.records import Recorder, StepRecord, row_kinds
from batchwright.serve.decoders.model import Decoder
from batchwright.serve.engine import Policy
from batchwright.serve.loading.weights import LoadedModel, load

ROWS = 32
POLICIES: dict[str, Callable[[int | None], Policy]] = {
    "continuous": lambda rows: (
        lambda memory: Continuous(memory, ContinuousSettings() if rows is None else ContinuousSettings(max_rows=rows))
    ),
    "static": lambda rows: lambda memory: static(memory, rows),
    "one-by-one": lambda rows: one_by_one,
}


class Forwards:
    """Notes when each forward of a model began and ended: hidden states, then the logits of rows that sample."""

    def __init__(self, model: LoadedModel) -> None:
        self.times: list[tuple[float, float]] = []
        self._began = 0.0
        if isinstance(model.decoder, Decoder):  # OpenVINO's threads run theirs while we do other things
            self._of_hidden, self._of_logits = model.decoder.hidden, model.decoder.logits
            model.decoder.hidden, model.decoder.logits = self._hidden, self._logits

    def _hidden(self, *args: Any) -> Any:
        self._began = perf_counter()
        return self._of_hidden(*args)

    def _logits(self, *args: Any) -> Any:
        logits = self._of_logits(*args)
        self.times.append((self._began, perf_counter()))
        return logits


def prepare(setup: Setup, settings: Mapping[str, Any]) -> Run:
    """`settings`: `policy` and its `rows`, and keyword arguments for `load` and for `Engine`."""
    torch.set_num_threads(setup.threads)
    model = load(dtype=setup.dtype, **settings["load"])
    policy = POLICIES[settings["policy"]](settings["rows"])
    forwards = Forwards(model)

    def run(jobs: Sequence[Job]) -> Made:
        forwards.times.clear()
        engine = Engine(model, policy, recorder=partial(Recorder, "ours"), **settings["engine"])
        params = [SamplingParams(max_tokens=job.num_output, ignore_eos=True) for job in jobs]
        completions = engine.generate([job.prompt for job in jobs], params)
        figures = {name: value for name, value in measured(engine, forwards.times) if value is not None}
        return Made([completion.tokens for completion in completions], figures)

    return run


def measured(engine: Engine, forwards: Sequence[tuple[float, float]]) -> Iterator[tuple[str, float | None]]:
    """Name and value of every figure; None where this policy gave no occasion to measure it."""
    requests, steps = engine.recorder.complete()
    summary = summarize(requests, steps)
    yield "kv_waste", summary.kv_waste
    yield "steps", summary.num_steps
    yield "in_steps", summary.time_in_steps
    decoding = [len(kinds) if set(kinds) == {"decode"} else 0 for kinds in row_kinds(requests, steps)]
    yield "outside_forward", outside_forward(forwards, decoding)
    yield "decode_alone", _median(_duration(step) for step, rows in zip(steps, decoding, strict=True) if rows == 1)


def outside_forward(forwards: Sequence[tuple[float, float]], decoding: Sequence[int]) -> float | None:
    """Median seconds from one step's beginning to the next's that are not in its forward; both decode `ROWS` rows."""
    if len(forwards) != len(decoding):
        return None  # a step that failed was run in parts
    pairs = zip(forwards, forwards[1:], decoding, decoding[1:], strict=False)
    return _median(after[0] - this[1] for this, after, *rows in pairs if rows == [ROWS, ROWS])


def _duration(step: StepRecord) -> float:
    return step.finished - step.started


def _median(values: Iterator[float]) -> float | None:
    ordered = list(values)
    return median(ordered) if ordered else None


if __name__ == "__main__":
    work(prepare, ["batchwright", "torch"])
