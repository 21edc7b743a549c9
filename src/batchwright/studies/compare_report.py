"""How a comparison is shown: one list of metrics, printed as a terminal table and as the report's."""

from collections.abc import Callable, Mapping, Sequence

from batchwright.bench.summary import Spread
from batchwright.report.html import Report, Run, Scene
from batchwright.report.table import Metric, Table, Value
from batchwright.studies.comparison import Comparison, Recorded, SceneResult, StrategyRun, run_name
from batchwright.units import format_bandwidth, format_flops_per_second


def table(scene: SceneResult) -> Table:
    """The scene's numbers, a line per metric."""
    lines = [(metric, [value_of(run) for run in scene.runs]) for metric, value_of in METRICS]
    return Table([run.strategy for run in scene.runs], lines)


def report(comparison: Comparison, recorded: Sequence[Recorded]) -> Report:
    """The whole report. `recorded` holds the records of every run of `comparison`, in any order."""
    records = {its.run: its for its in recorded}
    return Report(
        "What batching does",
        f"{comparison.num_requests} requests to {comparison.model} on {comparison.hardware.name}, "
        "under every strategy, on one engine",
        _facts(comparison),
        [_scene(scene, records) for scene in comparison.scenes],
    )


def _scene(scene: SceneResult, records: Mapping[str, Recorded]) -> Scene:
    title = ": ".join(filter(None, (scene.title[0].upper() + scene.title[1:], scene.offered)))
    runs = []
    for run in scene.runs:
        its = records[run_name(scene.title, run.strategy)]
        runs.append(Run(run.strategy, run.note, its.requests, its.steps))
    return Scene(title, scene.what, table(scene), runs)


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    hardware, settings = comparison.hardware, comparison.settings
    tokens = f"{comparison.num_prompt_tokens:,} prompt + {comparison.num_output_tokens:,} output tokens at most"
    return [
        ("requests", f"{comparison.num_requests}, {tokens}"),
        ("model", f"{comparison.model}, {comparison.dtype}"),
        ("machine", hardware.name),
        ("matrix products", f"{format_flops_per_second(hardware.peak(comparison.dtype))}, measured"),
        ("memory", f"{format_bandwidth(hardware.bytes_per_second())}, measured"),
        ("pages", f"of {settings['page_size']} tokens"),
        ("versions", ", ".join(f"{name} {version}" for name, version in comparison.versions.items())),
        ("seed", str(settings["seed"])),
    ]


def _p50(spread: Spread | None) -> float | None:
    return spread.p50 if spread else None


def _p99(spread: Spread | None) -> float | None:
    return spread.p99 if spread else None


METRICS: tuple[tuple[Metric, Callable[[StrategyRun], Value]], ...] = (
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
    (
        Metric(
            "TTFT p50 (s)", "Time from a request's arrival to its first token, median over requests.", ".3f", "lower"
        ),
        lambda run: _p50(run.summary.ttft),
    ),
    (Metric("TTFT p99 (s)", "The same, 99th percentile.", ".3f", "lower"), lambda run: _p99(run.summary.ttft)),
    (
        Metric("TPOT p50 (ms)", "Time per output token after a request's first, median over requests.", ".1f", "lower"),
        lambda run: None if run.summary.tpot is None else run.summary.tpot.p50 * 1e3,
    ),
    (
        Metric("latency p50 (s)", "Time from a request's arrival to its end, median over requests.", ".2f", "lower"),
        lambda run: _p50(run.summary.latency),
    ),
    (Metric("latency p99 (s)", "The same, 99th percentile.", ".2f", "lower"), lambda run: _p99(run.summary.latency)),
    (
        Metric(
            "padding waste",
            "Dummy positions that fill rows up to the longest of their batch, over all positions executed.",
            ".1%",
            "lower",
        ),
        lambda run: run.summary.padding_waste,
    ),
    (
        Metric(
            "dead-row waste",
            "Rows executed in decode steps for requests that have ended, over all rows executed in them: "
            "what a batch loses by waiting for its longest request.",
            ".1%",
            "lower",
        ),
        lambda run: run.summary.dead_row_waste,
    ),
    (
        Metric("KV reserved", "Tokens that the pages held would store, mean over steps.", ",.0f"),
        lambda run: run.summary.kv_reserved_mean,
    ),
    (Metric("KV stored", "Tokens stored in them, mean over steps.", ",.0f"), lambda run: run.summary.kv_stored_mean),
    (
        Metric(
            "prompt tokens cached",
            "Prompt tokens that were not computed, because the KV cache still held them from a request with the same "
            "beginning. Only continuous batching reuses prefixes: where this is not 0, it gains by more than batching.",
            ",d",
        ),
        lambda run: run.summary.num_cached,
    ),
    (Metric("batch mean", "Live rows per step.", ".1f", "higher"), lambda run: run.summary.batch_mean),
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
"""What is compared, in the order in which it is shown, each with how a run's value is found."""
