"""The same requests under every batching strategy, on one engine: what batching does on this machine and model.

Two scenes: all requests at once, which shows throughput, and requests that arrive over time, which shows latency.
Every strategy runs the same prompts with the same kernels over the same pages, and executes what it wastes; only
the scheduler differs. Shares of the roofline are useful FLOPs (prefill included) over what this machine's matrix
products were measured to do in the same time.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Protocol

import msgspec
import torch

from batchwright import __version__
from batchwright.bench.summary import summarize
from batchwright.errors import ConfigError, RequestError
from batchwright.facts.hardware import Hardware
from batchwright.facts.shape import ModelShape
from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.dynamic import DynamicSettings, dynamic
from batchwright.policy.pages import Memory
from batchwright.policy.static import one_by_one, static
from batchwright.policy.types import Refused, Request, Scheduler
from batchwright.records import Recorder, RequestRecord
from batchwright.serve.engine import Engine, default_memory
from batchwright.serve.loading.weights import LoadedModel, load
from batchwright.serve.sampling.params import SamplingParams
from batchwright.studies.comparison import (
    CompareSettings,
    Comparison,
    Recorded,
    SceneResult,
    Strategy,
    StrategyRun,
    run_name,
)
from batchwright.studies.drive import drive
from batchwright.studies.roofline import measure_hardware
from batchwright.studies.workload import VARIATION, Work, Workload, make_requests, read_requests, replay_trace
from batchwright.traffic import poisson
from batchwright.units import format_bytes

_WARM_UP_LENGTHS = (150, 40, 9, 3)
_WARM_UP_ROWS = 32
_DEFAULT_LOAD = 0.7


class Watcher(Protocol):
    """Told how a study goes on."""

    def begin(self, what: str, total: int) -> None:
        """`what` begins; it has `total` parts, 0 if unknown."""
        ...

    def advance(self, num_done: int) -> None:
        """That many parts of it are done in all."""
        ...


def compare(
    settings: CompareSettings, watcher: Watcher, hardware: Hardware | None = None
) -> tuple[Comparison, list[Recorded]]:
    """Run both scenes under every strategy. `hardware` is measured unless given.

    Raises BatchwrightError before any of it where something cannot run.
    """
    began = time.perf_counter()
    watcher.begin(f"loading {settings.model}", 0)
    model = load(settings.model, getattr(torch, settings.dtype), settings.device)
    memory = _memory(settings, model)
    workload = _workload(settings, model)
    work = _admitted(workload.work, model, memory, settings)
    _check_rate(settings, workload.arrivals)
    if hardware is None:
        watcher.begin("measuring the machine's roofline", 0)
        hardware = measure_hardware(settings.device, settings.dtype)
    _check_pool(model, memory, hardware)
    bench = _Bench(settings, model, memory, hardware, watcher)
    bench.warm_up()
    at_once = bench.scene("all at once", _ALL_AT_ONCE, work, [0.0] * len(work), _Offer())
    arrivals, offer = _arrivals(settings, workload, at_once)
    over_time = bench.scene("arriving over time", _OVER_TIME, work, arrivals, offer)
    comparison = Comparison(
        settings=msgspec.to_builtins(settings, enc_hook=str),
        hardware=hardware,
        model=model.name,
        dtype=settings.dtype,
        source=_source(settings),
        num_requests=len(work),
        num_prompt_tokens=sum(len(one.prompt) for one in work),
        num_output_tokens=sum(one.params.max_tokens for one in work),
        longest_prompt=max(len(one.prompt) for one in work),
        longest_output=max(one.params.max_tokens for one in work),
        are_outputs_forced=all(one.params.ignore_eos for one in work),
        versions=_versions(),
        date=datetime.now(UTC).date().isoformat(),
        seconds=time.perf_counter() - began,
        scenes=(at_once, over_time),
    )
    return comparison, bench.recorded


_ALL_AT_ONCE = (
    "All requests are there from the start, so throughput is the question: how soon is the last one done? "
    "Latencies here are mostly time in the queue. "
    "A static batch pads its prompts and keeps rows alive until its longest request ends; continuous batching "
    "gives a row to the next request at the next step."
)
_OVER_TIME = (
    "Requests come one after another, so latency is the question: how long does each wait, and for whom? "
    "A static batch waits for company, a dynamic one for a bounded delay, and both make newcomers wait for the whole "
    "batch under way."
)


@dataclass(frozen=True, slots=True)
class _Offer:
    """How fast requests come (`SceneResult`); nothing where all are there at once."""

    rate: float | None = None
    load: float | None = None
    words: str = ""


class _Bench:
    """One loaded model, run under each strategy in turn."""

    def __init__(
        self, settings: CompareSettings, model: LoadedModel, memory: Memory, hardware: Hardware, watcher: Watcher
    ) -> None:
        self.recorded: list[Recorded] = []
        self._settings, self._model, self._memory = settings, model, memory
        self._hardware, self._watcher = hardware, watcher

    def warm_up(self) -> None:
        """Kernels choose their code at the first call for a number of rows, which no strategy should pay for another.

        So a few prompts and decode steps of every number of rows run first, from as many as will be used, but at most
        `_WARM_UP_ROWS`, down to one; then two unlike requests under each strategy, whose batches have padding and dead
        rows. Takes about a second.
        """
        self._watcher.begin("warming up", 0)
        num_rows = min(max(self._settings.batch_size, self._settings.max_rows), _WARM_UP_ROWS)
        memory = replace(self._memory, num_pages=min(self._memory.num_pages, 4 * num_rows))  # quickly allocated
        settings = ContinuousSettings(max_rows=num_rows)
        lengths = (*_WARM_UP_LENGTHS, *([1] * num_rows))[:num_rows]
        engine = Engine(self._model, lambda memory: Continuous(memory, settings), memory=memory)
        engine.generate([[1] * length for length in lengths], [_forced(row + 1) for row in range(num_rows)])
        for strategy in self._settings.strategies:
            self._engine(strategy, memory, "warm-up").generate([[1] * 3, [1] * 9], [_forced(3), _forced(1)])

    def scene(
        self, title: str, what: str, work: Sequence[Work], arrivals: Sequence[float], offer: _Offer
    ) -> SceneResult:
        runs = [self._run(strategy, title, work, arrivals) for strategy in self._settings.strategies]
        return SceneResult(
            title=title, what=what, rate=offer.rate, load=offer.load, offered=offer.words, runs=tuple(runs)
        )

    def _run(self, strategy: Strategy, scene: str, work: Sequence[Work], arrivals: Sequence[float]) -> StrategyRun:
        self._watcher.begin(f"{scene}: {strategy}", sum(one.params.max_tokens for one in work))
        engine = self._engine(strategy, self._memory, run_name(scene, strategy))
        drive(engine, work, arrivals, self._watcher.advance)
        requests, steps = engine.recorder.complete()
        self.recorded.append(Recorded(engine.recorder.run, requests, steps))
        summary = summarize(requests, steps)
        flops = sum(_useful_flops(self._model.decoder.shape, request) for request in requests)
        peak = self._hardware.peak(self._settings.dtype)
        share = flops / (peak * summary.makespan) if summary.makespan else None
        return StrategyRun(
            strategy=strategy,
            note=_note(strategy, self._settings),
            summary=summary,
            useful_flops=flops,
            roofline_share=share,
        )

    def _engine(self, strategy: Strategy, memory: Memory, run: str) -> Engine:
        policy = partial(_scheduler, strategy, settings=self._settings)
        return Engine(self._model, policy, memory=memory, recorder=partial(Recorder, run))


def _admitted(work: Sequence[Work], model: LoadedModel, memory: Memory, settings: CompareSettings) -> list[Work]:
    """`work` with the output lengths that context and pool leave it. Raises RequestError for what can never run."""
    num_pages = min(memory.num_pages, memory.pages_for(memory.context))  # more would make no difference to one request
    scheduler = one_by_one(replace(memory, num_pages=num_pages))
    can_scale = settings.trace is not None and not settings.scale_lengths
    admitted = []
    for one in work:
        asked = f"run the request {one.id}, {len(one.prompt):,} tokens long"
        _check_ids(one.prompt, model.decoder.shape.vocab, asked)
        answer = scheduler.add(Request(one.id, len(one.prompt), one.params.max_tokens), now=0.0)
        if isinstance(answer, Refused):
            remedy = f"{answer.remedy}, or scale the trace's lengths (scale_lengths)" if can_scale else answer.remedy
            raise RequestError(asked, answer.fact, remedy)
        scheduler.abort(one.id, now=0.0)
        admitted.append(replace(one, params=replace(one.params, max_tokens=answer.max_tokens)))
    return admitted


def _check_ids(prompt: Sequence[int], vocabulary: int, asked: str) -> None:
    wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
    if wrong is not None:
        fact = f"its prompt holds {wrong}; token ids are integers from 0 to {vocabulary - 1}"
        raise RequestError(asked, fact, "encode the prompt with this model's tokenizer")


def _check_rate(settings: CompareSettings, recorded: Sequence[float] | None) -> None:
    """Recorded arrivals can be stretched to a rate only if they have one."""
    if (settings.rate or settings.load) and recorded is not None and not recorded[-1]:
        asked = f"offer {settings.rate:g} requests/s" if settings.rate else f"offer a load of {settings.load:g}"
        fact = "the source's requests all arrive at the same time, so there is nothing to stretch"
        raise ConfigError(asked, fact, "leave it out, or leave the arrivals out of the requests")


def _check_pool(model: LoadedModel, memory: Memory, hardware: Hardware) -> None:
    needed = memory.num_tokens * model.decoder.shape.kv_bytes_per_token(model.decoder.dtype.itemsize)
    if needed > hardware.memory_bytes():
        asked = f"keep {memory.num_pages:,} pages of {memory.page_size:,} tokens"
        fact = f"they need {format_bytes(needed)}, and {hardware.name} has {format_bytes(hardware.memory_bytes())}"
        raise ConfigError(asked, fact, "use a smaller num_pages or page_size")


def _memory(settings: CompareSettings, model: LoadedModel) -> Memory:
    memory = default_memory(model, settings.page_size)
    return memory if settings.num_pages is None else replace(memory, num_pages=settings.num_pages)


def _scheduler(strategy: Strategy, memory: Memory, settings: CompareSettings) -> Scheduler:
    if strategy == "one-by-one":
        return one_by_one(memory)
    if strategy == "static":
        return static(memory, settings.batch_size)
    if strategy == "dynamic":
        return dynamic(
            memory, DynamicSettings(max_batch_size=settings.batch_size, max_queue_delay=settings.max_queue_delay)
        )
    return Continuous(memory, ContinuousSettings(max_rows=settings.max_rows, token_budget=settings.token_budget))


def _note(strategy: Strategy, settings: CompareSettings) -> str:
    return {
        "one-by-one": "each request alone, from its first token to its last",
        "static": f"fixed groups of {settings.batch_size}, each run to its end",
        "dynamic": f"groups of up to {settings.batch_size}, which leave after {settings.max_queue_delay:g} s at most",
        "continuous": f"up to {settings.max_rows} rows, refilled at every step; {settings.token_budget} tokens a step, "
        "prefixes reused",
    }[strategy]


def _workload(settings: CompareSettings, model: LoadedModel) -> Workload:
    if settings.requests is not None:
        return read_requests(settings.requests, model)
    if settings.trace is not None:
        context = min(model.decoder.shape.context, _SCALED_CONTEXT) if settings.scale_lengths else None
        return replay_trace(settings.trace, model, settings.num_requests, max_context=context, seed=settings.seed)
    made = make_requests(model, settings.num_requests, settings.mean_prompt, settings.mean_output, settings.seed)
    return Workload(made)


_SCALED_CONTEXT = 1024
"""What `scale_lengths` fits a trace's longest request into, or the model's context if that is shorter."""


def _source(settings: CompareSettings) -> str:
    if settings.requests is not None:
        return f"from {settings.requests.name}"
    if settings.trace is not None:
        scaled = ", lengths scaled down to fit" if settings.scale_lengths else ""
        return f"from the trace {settings.trace.name}{scaled}"
    return f"made of Python's help texts, lognormal lengths, coefficient of variation {VARIATION:g}"


def _arrivals(settings: CompareSettings, workload: Workload, at_once: SceneResult) -> tuple[Sequence[float], _Offer]:
    """When requests come in the second scene, and how fast that is.

    Arrivals that the source has stay as they are unless a rate or a load is asked for.
    """
    recorded, num_requests = workload.arrivals, len(workload.work)
    reference, capacity = _reference(at_once)
    asked = (settings.load or _DEFAULT_LOAD) * capacity if settings.rate is None else settings.rate
    why = "" if settings.rate is None else "as asked, "
    if recorded is None:
        return list(islice(poisson(asked, settings.seed), num_requests)), _offer(asked, capacity, reference, why)
    own_rate = (num_requests - 1) / recorded[-1] if recorded[-1] else None
    if own_rate is None:
        return recorded, _Offer(words="all at the same time, as recorded")
    if settings.rate is None and settings.load is None:
        return recorded, _offer(own_rate, capacity, reference, "as recorded, ")
    return [arrival * own_rate / asked for arrival in recorded], _offer(asked, capacity, reference, why)


def _reference(at_once: SceneResult) -> tuple[str, float]:
    """What loads are shares of: continuous batching, else the fastest strategy, and its requests/s."""
    capacities = {run.strategy: run.capacity for run in at_once.runs if run.capacity}
    name = "continuous" if "continuous" in capacities else max(capacities, key=capacities.__getitem__)
    return name, capacities[name]


def _offer(rate: float, capacity: float, reference: str, why: str) -> _Offer:
    manager = {"continuous": "continuous batching", "one-by-one": "running one by one"}.get(
        reference, f"{reference} batching"
    )
    load = rate / capacity
    return _Offer(rate, load, f"{rate:.2f} requests/s, {why}{load:.0%} of what {manager} managed above")


def _forced(num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, ignore_eos=True)


def _useful_flops(shape: ModelShape, request: RequestRecord) -> int:
    return shape.request_flops(request.num_prompt, request.num_output, request.num_cached) if request.num_output else 0


def _versions() -> dict[str, str]:
    return {"batchwright": __version__, "torch": str(torch.__version__)}
