"""What a contest's result says, as text.

tok/s count useful output tokens. Spread is (max - min) / median. Ratios to the base are medians of the ratios within
each repeat. The roofline's share is what the useful FLOPs, prefill included, would take at the machine's measured
peak in this dtype, over the median time.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from .contestants import BASE

COLUMNS = f"{'':26}{'tok/s':>9}{'min':>9}{'max':>9}{'spread':>9}{'x static-32':>13}{'roofline':>10}"


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """Line by line: the contestants, the engine's own figures, who is absent and why."""
    runs, nll = result["runs"], result.get("nll", {})
    yield COLUMNS + (f"{'NLL':>9}" if nll else "")
    base = [run["seconds"] for run in runs.get(BASE, ())]
    for name, its_runs in runs.items():
        score = f"{nll[name]:9.4f}" if name in nll else ""
        note = "".join(f"  {remark}" for remark in _remarks(result, name))
        line = f"{name:26}{_speeds(its_runs)}{_ratio(base, its_runs):>13}{_roofline(result, its_runs):10.1%}"
        yield f"{line}{score}{note}"
    yield from _own_figures(result)
    for name, reason in result["absent"].items():
        yield f"{name} is absent: {reason}"


def _remarks(result: Mapping[str, Any], name: str) -> Iterator[str]:
    """What a reader must know, and which of several settings was the fastest."""
    if note := result["notes"].get(name):
        yield note
    tried = result["contestants"][name]["tried"]
    if len(tried) > 1:
        settings = tried[0]["settings"]
        yield ", ".join(f"{key}={value}" for key, value in settings.items()) or "the library's defaults"


def _speeds(runs: Sequence[Mapping[str, float]]) -> str:
    speeds = [run["tokens_per_second"] for run in runs]
    middle = median(speeds)
    return f"{middle:9.1f}{min(speeds):9.1f}{max(speeds):9.1f}{(max(speeds) - min(speeds)) / middle:9.1%}"


def _ratio(base: Sequence[float], runs: Sequence[Mapping[str, float]]) -> str:
    """How many times as fast as the base."""
    ratios = [other / run["seconds"] for other, run in zip(base, runs, strict=False)]
    return f"{median(ratios):.2f}" if ratios else "-"


def _roofline(result: Mapping[str, Any], runs: Sequence[Mapping[str, float]]) -> float:
    return result["useful_flops"] / result["peak_flops"] / median(run["seconds"] for run in runs)


def _own_figures(result: Mapping[str, Any]) -> Iterator[str]:
    """Of those contestants that report them: medians over the runs."""
    for name, runs in result["runs"].items():
        if waste := _middle(runs, "kv_waste"):
            yield f"{name}: {waste:.2%} of the KV pages held is empty"
        if outside := _middle(runs, "outside_forward"):
            yield f"{name}: a step of 32 decoding rows takes {outside * 1e3:.2f} ms outside its forward"
        if seconds := _middle(runs, "decode_alone"):
            yield f"{name}: a row alone decodes {1 / seconds:.1f} tok/s{_bandwidth(result, name, seconds)}"


def _bandwidth(result: Mapping[str, Any], name: str, seconds: float) -> str:
    """What reading all weights once for each token would allow, where the worker reads them in the result's dtype."""
    if name not in result["reads_plain_weights"]:
        return ""
    least = result["weight_bytes"] / result["bandwidth"]
    return (
        f"; {result['weight_bytes'] / 1e6:.1f} MB of weights at {result['bandwidth'] / 1e9:.1f} GB/s, as measured,"
        f" allow {1 / least:.1f}: {least / seconds:.0%}"
    )


def _middle(runs: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [run[name] for run in runs if name in run]
    return median(values) if values else None
