"""The same requests under every batching strategy, on one engine: what batching does on this machine and model.

Two scenes: all requests at once, which shows throughput, and requests that arrive over time, which shows latency.
Every strategy runs the same prompts with the same kernels over the same pages, and executes what it wastes; only
the scheduler differs. Shares of the roofline are useful FLOPs (prefill included) over what this machine's matrix
products were measured to do in the same time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from batchwright.policy.types import Scheduler, StepPlan
from batchwright.records import RequestRecord
from batchwright.serve.engine import Engine, default_memory
from batchwright.serve.executor import RowResult
from batchwright.serve.sampling import SamplingParams
from batchwright.serve.weights import LoadedModel, load
from batchwright.studies.comparison import (
    CompareSettings,
    Comparison,
    Recorded,
    SceneResult,
    Strategy,
    StrategyRun,
)
from batchwright.studies.roofline import measure_hardware
from batchwright.studies.workload import Work, arriving, make_requests, read_requests, replay_trace
from batchwright.traffic import poisson
from batchwright.units import format_bytes

_WARM_UP_LENGTHS = (1, 3, 9, 40, 150)


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
    work = _admitted(_work(settings, model), model, memory, settings)
    _check_rate(settings, work)
    if hardware is None:
        watcher.begin("measuring the machine's roofline", 0)
        hardware = measure_hardware(settings.device, settings.dtype)
    _check_pool(model, memory, hardware)
    bench = _Bench(settings, model, memory, hardware, watcher)
    bench.warm_up()
    scenes = [bench.scene("all at once", _ALL_AT_ONCE, arriving(work, [0.0] * len(work)), None)]
    rate = _offered_rate(settings, work, scenes[0])
    scenes.append(bench.scene("arriving over time", _OVER_TIME, *_arrivals(settings, work, rate)))
    comparison = Comparison(
        settings=msgspec.to_builtins(settings, enc_hook=str),
        hardware=hardware,
        model=model.name,
        dtype=settings.dtype,
        num_requests=len(work),
        num_prompt_tokens=sum(len(one.prompt) for one in work),
        num_output_tokens=sum(one.params.max_tokens for one in work),
        versions=_versions(),
        seconds=time.perf_counter() - began,
        scenes=tuple(scenes),
    )
    return comparison, bench.recorded


_ALL_AT_ONCE = (
    "All requests are there from the start, so only throughput counts: how soon is the last one done? "
    "A static batch pads its prompts and keeps rows alive until its longest request ends; continuous batching "
    "gives a row to the next request at the next step."
)
_OVER_TIME = (
    "Requests come one after another, so latency counts: how long does each wait, and for whom? A static batch waits "
    "for company, a dynamic one for a bounded delay, and both make newcomers wait for the whole batch under way."
)


class _Bench:
    """One loaded model, run under each strategy in turn."""

    def __init__(
        self, settings: CompareSettings, model: LoadedModel, memory: Memory, hardware: Hardware, watcher: Watcher
    ) -> None:
        self.recorded: list[Recorded] = []
        self._settings, self._model, self._memory = settings, model, memory
        self._hardware, self._watcher = hardware, watcher

    def warm_up(self) -> None:
        """Kernels choose their code on the first call for a shape; no strategy should pay for another."""
        self._watcher.begin("warming up", 0)
        prompts = [[1] * length for length in _WARM_UP_LENGTHS for _ in range(4)]
        self._engine("continuous", "warm-up").generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))

    def scene(self, title: str, what: str, work: Sequence[Work], rate: float | None) -> SceneResult:
        runs = [self._run(strategy, title, work) for strategy in self._settings.strategies]
        return SceneResult(title=title, what=what, rate=rate, runs=tuple(runs))

    def _run(self, strategy: Strategy, title: str, work: Sequence[Work]) -> StrategyRun:
        self._watcher.begin(f"{title}: {strategy}", sum(one.params.max_tokens for one in work))
        engine = self._engine(strategy, f"{title}/{strategy}")
        drive(engine, work, self._watcher.advance)
        requests, steps = engine.recorder.requests, engine.recorder.steps
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

    def _engine(self, strategy: Strategy, run: str) -> Engine:
        return Engine(
            self._model, lambda memory: _scheduler(strategy, memory, self._settings), memory=self._memory, run=run
        )


def drive(engine: Engine, work: Sequence[Work], on_tokens: Callable[[int], None]) -> None:
    """Submit each request when it arrives, in real time, and run until all have ended. `work` is sorted by arrival.

    `on_tokens` is told how many output tokens there are so far.
    """
    waiting = list(reversed(work))
    origin, num_tokens = engine.recorder.restart(engine.now()), 0
    while waiting or engine.num_live:
        while waiting and origin + (waiting[-1].arrival or 0.0) <= engine.now():
            one = waiting.pop()
            engine.submit(one.prompt, one.params, request_id=one.id, arrival=origin + (one.arrival or 0.0))
            if not waiting:
                engine.flush()
        outputs = engine.step()
        if outputs is None:
            _sleep_until(engine, origin + (waiting[-1].arrival or 0.0) if waiting else None)
        else:
            num_tokens += sum(output.token is not None for output in outputs)
            on_tokens(num_tokens)


def _sleep_until(engine: Engine, next_arrival: float | None) -> None:
    times = [moment for moment in (next_arrival, engine.wakeup()) if moment is not None]
    assert times, "nothing can run, and nothing is awaited"
    time.sleep(max(0.0, min(times) - engine.now()))


class _Unused:
    """An executor for an engine that only says what it would admit: no pages are allocated for it."""

    def add(self, request_id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        pass

    def remove(self, request_id: str) -> None:
        pass

    def execute(self, plan: StepPlan) -> list[RowResult]:
        raise AssertionError(plan)


def _admitted(work: Sequence[Work], model: LoadedModel, memory: Memory, settings: CompareSettings) -> list[Work]:
    """`work` with the output lengths that context and pool leave it. Raises RequestError for what can never run."""
    num_pages = min(memory.num_pages, memory.pages_for(memory.context))  # more would make no difference to one request
    memory = Memory(num_pages, memory.page_size, memory.context)
    engine = Engine(model, one_by_one, memory=memory, executor=lambda _decoder, _memory: _Unused(), run="check")
    for one in work:
        try:
            engine.abort(engine.submit(one.prompt, one.params))
        except RequestError as error:
            asked = f"run the request {one.id}, {len(one.prompt):,} tokens long"
            can_scale = settings.trace is not None and not settings.scale_lengths
            remedy = f"{error.remedy}, or scale the trace's lengths (scale_lengths)" if can_scale else error.remedy
            raise RequestError(asked, error.fact, remedy) from error
    limits = (record.max_tokens for record in engine.recorder.requests)
    return [replace(one, params=replace(one.params, max_tokens=limit)) for one, limit in zip(work, limits, strict=True)]


def _check_rate(settings: CompareSettings, work: Sequence[Work]) -> None:
    """Recorded arrivals can be stretched to a rate only if they have one."""
    if (settings.rate or settings.load) and work[0].arrival is not None and not work[-1].arrival:
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
        "continuous": f"up to {settings.max_rows} rows, refilled at every step; {settings.token_budget} tokens a step",
    }[strategy]


def _work(settings: CompareSettings, model: LoadedModel) -> list[Work]:
    if settings.requests is not None:
        return read_requests(settings.requests, model)
    if settings.trace is not None:
        context = min(model.decoder.shape.context, _SCALED_CONTEXT) if settings.scale_lengths else None
        return replay_trace(settings.trace, model, settings.num_requests, max_context=context, seed=settings.seed)
    return make_requests(model, settings.num_requests, settings.mean_prompt, settings.mean_output, settings.seed)


_SCALED_CONTEXT = 1024
"""What `scale_lengths` fits a trace's longest request into, or the model's context if that is shorter."""


def _offered_rate(settings: CompareSettings, work: Sequence[Work], measured: SceneResult) -> float | None:
    """Requests/s to offer in the second scene; None for the source's own arrivals, as they are."""
    if settings.rate is not None:
        return settings.rate
    if settings.load is None and work[0].arrival is not None:
        return None
    spans = {run.strategy: run.summary.makespan for run in measured.runs if run.summary.makespan}
    span = spans.get("continuous") or min(spans.values())
    return (settings.load or 0.7) * len(work) / span


def _arrivals(settings: CompareSettings, work: Sequence[Work], rate: float | None) -> tuple[list[Work], float | None]:
    """`work` as it arrives, and the rate at which it does."""
    if work[0].arrival is None:
        assert rate is not None
        return arriving(work, poisson(rate, settings.seed)), rate
    recorded = [one.arrival or 0.0 for one in work]
    own_rate = (len(work) - 1) / recorded[-1] if recorded[-1] else None
    if rate is None or own_rate is None:
        return list(work), own_rate
    return arriving(work, [arrival * own_rate / rate for arrival in recorded]), rate


def _useful_flops(shape: ModelShape, request: RequestRecord) -> int:
    return shape.request_flops(request.num_prompt, request.num_output, request.num_cached) if request.num_output else 0


def _versions() -> dict[str, str]:
    return {"batchwright": __version__, "torch": str(torch.__version__)}
