"""How a comparison is shown: one list of metrics, printed as a terminal table and as the report's.

Of fewer than a hundred requests the 99th percentile is little but the maximum, which is shown instead.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence

import msgspec

from batchwright.bench.summary import Spread
from batchwright.report.html import Report, Run, Scene
from batchwright.report.table import Metric, Table, Value
from batchwright.studies.comparison import CompareSettings, Comparison, Recorded, SceneResult, StrategyRun, run_name
from batchwright.studies.findings import keeping_up, same_steps, verdict
from batchwright.units import format_bandwidth, format_flops_per_second

_Line = tuple[Metric, Callable[[StrategyRun], Value]]
_FEWEST_FOR_P99 = 100


def table(scene: SceneResult) -> Table:
    """The scene's numbers, a line per metric."""
    lines = [(metric, [value_of(run) for run in scene.runs]) for metric, value_of in metrics(_num_requests(scene))]
    return Table([run.strategy for run in scene.runs], lines)


def report(comparison: Comparison, recorded: Sequence[Recorded]) -> Report:
    """The whole report. `recorded` holds the records of every run of `comparison`, in any order."""
    records = {its.run: its for its in recorded}
    return Report(
        "What batching does",
        f"{comparison.num_requests} requests to {comparison.model} on {comparison.hardware.name}, "
        "under every strategy, on one engine",
        _facts(comparison),
        [
            _scene(scene, found, records)
            for scene, found in zip(comparison.scenes, _found(comparison, records), strict=True)
        ],
        verdict(comparison, records),
    )


def metrics(num_requests: int) -> tuple[_Line, ...]:
    """What is compared, in the order in which it is shown, each with how a run's value is found."""
    ttft_tail, latency_tail = _TAILS if num_requests >= _FEWEST_FOR_P99 else _MAXIMA
    return (*_RATES, _TTFT, ttft_tail, _TPOT, _LATENCY, latency_tail, *_WORK)


def _num_requests(scene: SceneResult) -> int:
    return scene.runs[0].summary.num_requests


def _found(comparison: Comparison, records: Mapping[str, Recorded]) -> tuple[str, str]:
    """What is worth saying of either scene beyond its `what`."""
    at_once, over_time = comparison.scenes
    return same_steps(at_once, records), keeping_up(at_once, over_time.rate)


def _scene(scene: SceneResult, found: str, records: Mapping[str, Recorded]) -> Scene:
    title = ": ".join(filter(None, (scene.title[0].upper() + scene.title[1:], scene.offered)))
    runs = []
    for run in scene.runs:
        its = records[run_name(scene.title, run.strategy)]
        runs.append(Run(run.strategy, run.note, its.requests, its.steps))
    return Scene(title, " ".join(filter(None, (scene.what, found))), table(scene), runs)


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    hardware, settings = comparison.hardware, comparison.settings
    at_most = "" if comparison.are_outputs_forced else "at most "
    num_prompt, num_output = comparison.num_prompt_tokens, comparison.num_output_tokens
    tokens = f"{num_prompt:,} prompt tokens, {at_most}{num_output:,} output tokens"
    longest = f"longest prompt {comparison.longest_prompt:,}, longest output {at_most}{comparison.longest_output:,}"
    return [
        ("requests", f"{comparison.num_requests:,}; {tokens}"),
        ("lengths", f"{comparison.source}; {longest}"),
        ("runs", "one of each strategy in each scene"),
        ("model", f"{comparison.model}, {comparison.dtype}"),
        ("machine", hardware.name),
        ("matrix products", f"{format_flops_per_second(hardware.peak(comparison.dtype))}, measured"),
        ("memory", f"{format_bandwidth(hardware.bytes_per_second())}, measured"),
        ("pages", f"of {settings['page_size']} tokens"),
        ("versions", ", ".join(f"{name} {version}" for name, version in comparison.versions.items())),
        ("seed", str(settings["seed"])),
        ("date", comparison.date),
        ("command", _command(settings)),
    ]


def _command(settings: Mapping[str, object]) -> str:
    """The command line that asks for `settings`: those that are not the defaults."""
    words = ["batchwright", "compare"]
    for name, default in msgspec.to_builtins(CompareSettings()).items():
        typed = _typed(settings[name])
        if typed != _typed(default):
            words += [f"--{name.replace('_', '-')}", *typed]
    return shlex.join(words)


def _typed(value: object) -> list[str]:
    """A setting's value as the words that follow its option; a flag has none."""
    if isinstance(value, list | tuple):
        return [str(one) for one in value]
    return [] if value is True else [str(value)]


def _p50(spread: Spread | None) -> float | None:
    return spread.p50 if spread else None


def _p99(spread: Spread | None) -> float | None:
    return spread.p99 if spread else None


def _max(spread: Spread | None) -> float | None:
    return spread.max if spread else None


_RATES: tuple[_Line, ...] = (
    (
        Metric(
            "output tok/s",
            "Output tokens of completed requests over the time from the first arrival to the last end.",
            ",.0f",
            "higher",
        ),
        lambda run: run.summary.output_rate,
    ),
    (
        Metric("time (s)", "From the first arrival to the end of the last request.", ".2f", "lower"),
        lambda run: run.summary.makespan,
    ),
)
_TTFT: _Line = (
    Metric("TTFT p50 (s)", "Time from a request's arrival to its first token, median over requests.", ".3f", "lower"),
    lambda run: _p50(run.summary.ttft),
)
_TPOT: _Line = (
    Metric("TPOT p50 (ms)", "Time per output token after a request's first, median over requests.", ".1f", "lower"),
    lambda run: None if run.summary.tpot is None else run.summary.tpot.p50 * 1e3,
)
_LATENCY: _Line = (
    Metric("latency p50 (s)", "Time from a request's arrival to its end, median over requests.", ".2f", "lower"),
    lambda run: _p50(run.summary.latency),
)
_TAILS: tuple[_Line, _Line] = (
    (
        Metric("TTFT p99 (s)", "TTFT of the request that 99 of 100 are faster than.", ".3f", "lower"),
        lambda run: _p99(run.summary.ttft),
    ),
    (
        Metric("latency p99 (s)", "Latency of the request that 99 of 100 are faster than.", ".2f", "lower"),
        lambda run: _p99(run.summary.latency),
    ),
)
_MAXIMA: tuple[_Line, _Line] = (
    (Metric("TTFT max (s)", "The longest TTFT of a request.", ".3f", "lower"), lambda run: _max(run.summary.ttft)),
    (
        Metric("latency max (s)", "The longest latency of a request.", ".2f", "lower"),
        lambda run: _max(run.summary.latency),
    ),
)
_WORK: tuple[_Line, ...] = (
    (
        Metric(
            "padding, of positions",
            "Dummy positions that fill rows up to the longest of their batch, over all positions executed. "
            "The captions' padding is a share of rows × time instead.",
            ".1%",
            "lower",
        ),
        lambda run: run.summary.padding_waste,
    ),
    (
        Metric(
            "dead rows, of decode rows",
            "Rows executed in decode steps for requests that have ended, over all rows executed in them: "
            "what a batch loses by waiting for its longest request. "
            "The captions' dead rows are a share of rows × time instead.",
            ".1%",
            "lower",
        ),
        lambda run: run.summary.dead_row_waste,
    ),
    (
        Metric("KV reserved (tokens)", "Tokens that the pages held would store, mean over steps.", ",.0f"),
        lambda run: run.summary.kv_reserved_mean,
    ),
    (
        Metric("KV stored (tokens)", "Tokens stored in them, mean over steps.", ",.0f"),
        lambda run: run.summary.kv_stored_mean,
    ),
    (
        Metric(
            "prompt tokens cached",
            "Prompt tokens that were not computed, because the KV cache still held them from a request with the same "
            "beginning. Only continuous batching reuses prefixes: where this is not 0, it gains by more than batching.",
            ",d",
        ),
        lambda run: run.summary.num_cached,
    ),
    (Metric("batch mean", "Live rows per step.", ".1f"), lambda run: run.summary.batch_mean),
    (Metric("batch max", "Most live rows in a step.", "d"), lambda run: run.summary.batch_max),
    (
        Metric(
            "roofline share",
            "Useful FLOPs, prefill included, over what the machine's matrix products were measured to do in the "
            "same time.",
            ".1%",
            "higher",
        ),
        lambda run: run.roofline_share,
    ),
)
