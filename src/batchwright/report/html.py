"""The report of a comparison: one HTML file that opens in any browser, without a network.

It takes records and a ready-made table, and decides only how they look. One figure per run (the rows-by-steps
grid over its KV cache and its queue), one pair of latency distributions and one table per scene. A run keeps
its colour and dash through the whole page. Without a script the page is complete; the script only changes
the horizontal axis and shows a tapped row's request. Everything that comes from the caller is escaped.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Final

from batchwright.records import RequestRecord, StepRecord
from batchwright.report import figures
from batchwright.report.figures import Curve, Scales
from batchwright.report.grid import Grid, lay_out
from batchwright.report.table import Metric, Table, Value
from batchwright.units import format_tokens

_NUM_STYLES: Final = 6
_WHOLE: Final = 'width="100%" height="100%"'


@dataclass(frozen=True, slots=True)
class Run:
    """One strategy's records; `note` says in a few words what it does."""

    name: str
    note: str
    requests: Sequence[RequestRecord]
    steps: Sequence[StepRecord]


@dataclass(frozen=True, slots=True)
class Scene:
    """Runs over the same requests. `what` says in plain words what was done and what to look for."""

    title: str
    what: str
    table: Table
    runs: Sequence[Run]


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report. `facts`: what one must know to repeat it (machine, model, versions, seed), label and value.

    `verdict`: what it found, in a sentence or two.
    """

    title: str
    subtitle: str
    facts: Sequence[tuple[str, str]]
    scenes: Sequence[Scene]
    verdict: str = ""


def render(report: Report) -> str:
    """`report` as one self-contained HTML file."""
    styles = _styles(report)
    scenes = "".join(_scene(scene, number, styles) for number, scene in enumerate(report.scenes, start=1))
    return (
        '<!doctype html>\n<html lang="en" data-axis="common">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(report.title)}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n"
        f"{_asset('patterns.svg')}<header>\n<h1>{escape(report.title)}</h1>\n"
        f'{_verdict(report.verdict)}<p class="subtitle">{escape(report.subtitle)}</p>\n{_facts(report.facts)}'
        "</header>\n<main>\n"
        f"{_legend(report.scenes)}{scenes}{_definitions(report.scenes)}</main>\n"
        f"<script>\n{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def _styles(report: Report) -> dict[str, str]:
    """A class per run name, in the order of first appearance; with more names than styles they repeat."""
    names = dict.fromkeys(run.name for scene in report.scenes for run in scene.runs)
    return {name: f"s{index % _NUM_STYLES}" for index, name in enumerate(names)}


def _verdict(verdict: str) -> str:
    return f'<p class="verdict">{escape(verdict)}</p>\n' if verdict else ""


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    pairs = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in facts)
    return f'<dl class="facts">{pairs}</dl>\n' if pairs else ""


def _legend(scenes: Iterable[Scene]) -> str:
    """The grids in plain words; failed steps are explained only where there are any."""
    failed = any(step.failed is not None for scene in scenes for run in scene.runs for step in run.steps)
    return f"{_LEGEND}{_LEGEND_OF_FAILED if failed else ''}{_LEGEND_END}"


def _scene(scene: Scene, number: int, styles: dict[str, str]) -> str:
    grids = [lay_out(run.requests, run.steps) for run in scene.runs]
    scales = figures.scales_of(grids)
    plates = "".join(_plate(run, grid, scales, styles[run.name]) for run, grid in zip(scene.runs, grids, strict=True))
    return (
        f'<section class="scene">\n<h2><span class="number">{number}</span>{escape(scene.title)}</h2>\n'
        f'<p class="what">{escape(scene.what)}</p>\n{_AXIS_CHOICE if scene.runs else ""}'
        f"{plates}{_distributions(scene, styles)}{_table(scene.table, styles)}</section>\n"
    )


def _plate(run: Run, grid: Grid, scales: Scales, style: str) -> str:
    """One run's figures over one axis."""
    caption = (
        f'<figcaption><h3>{_mark(style)}{escape(run.name)}</h3><p class="note">{escape(run.note)}</p>'
        f'<p class="sum">{escape(figures.describe(grid))}</p></figcaption>'
    )
    if not grid.steps:
        return f'<figure class="plate {style}">{caption}</figure>\n'
    own = grid.end / scales.end if scales.end else 1.0
    return (
        f'<figure class="plate {style}" data-own="{own:.6f}" data-steps="{len(grid.steps)}">{caption}\n'
        f"{figures.rows_by_steps(grid, run.requests, scales, run.name)}\n{_kv_strip(run, grid, scales)}"
        f'<p class="strip-name"><b>Requests</b> running <i class="key running"></i> waiting '
        f'<i class="key waiting"></i><span>0 to {scales.queue_top:,}</span></p>'
        f"{figures.queue_over_time(grid, scales, run.name)}\n{figures.axes(grid, scales)}</figure>\n"
    )


def _kv_strip(run: Run, grid: Grid, scales: Scales) -> str:
    if not any(step.pages_held for step in grid.steps):
        return ""
    pool = max(step.pages_total * step.page_size for step in grid.steps)
    top = format_tokens(scales.kv_top)
    extent = f"0 to {top}" if pool <= scales.kv_top else f"0 to {top} of {format_tokens(pool)}"
    return (
        '<p class="strip-name"><b>KV cache, tokens</b> stored <i class="key stored"></i> held '
        f'<i class="key held"></i><span>{extent}</span></p>{figures.kv_over_time(grid, scales, run.name)}\n'
    )


def _distributions(scene: Scene, styles: dict[str, str]) -> str:
    if not any(run.requests for run in scene.runs):
        return ""
    keys = "".join(f"<li>{_mark(styles[run.name])}{escape(run.name)}</li>" for run in scene.runs)
    first, whole = "Time to first token", "Time to last token"
    ttft = figures.distribution(first, _curves(scene, styles, lambda request: request.ttft))
    latency = figures.distribution(whole, _curves(scene, styles, lambda request: request.latency))
    return (
        '<figure class="distributions"><figcaption><h3>How long requests took</h3><p class="note">The share of '
        "requests that were at most so slow, from arrival; further left is faster. A dot marks the median of those "
        f'that got so far. A curve that ends below 100% lost requests.</p><ul class="keys">{keys}</ul></figcaption>\n'
        '<div class="pair">'
        f"<div><h4>{first}</h4>{ttft}</div>\n<div><h4>{whole}</h4>{latency}</div></div></figure>\n"
    )


def _curves(scene: Scene, styles: dict[str, str], measure: Callable[[RequestRecord], float | None]) -> list[Curve]:
    return [
        Curve(
            name=run.name,
            style=styles[run.name],
            values=[value for request in run.requests if (value := measure(request)) is not None],
            num_requests=len(run.requests),
        )
        for run in scene.runs
    ]


def _table(table: Table, styles: dict[str, str]) -> str:
    if not table.runs or not table.lines:
        return ""
    heads = "".join(f'<th scope="col">{_mark(styles.get(name, "none"))}{escape(name)}</th>' for name in table.runs)
    lines = "".join(_line(metric, values) for metric, values in table.lines)
    return (
        f'<div class="table"><table><thead><tr><td></td>{heads}</tr></thead>\n<tbody>{lines}</tbody></table></div>\n'
        '<p class="under">Best values are bold. What each line means is defined at the end.</p>\n'
    )


def _line(metric: Metric, values: Sequence[Value]) -> str:
    cells = "".join(
        f"<td>{f'<b>{escape(text)}</b>' if is_best else escape(text)}</td>" for text, is_best in metric.printed(values)
    )
    return f'<tr><th scope="row" title="{escape(metric.definition)}">{escape(metric.label)}</th>{cells}</tr>\n'


def _definitions(scenes: Iterable[Scene]) -> str:
    defined = {metric.label: metric.definition for scene in scenes for metric, _ in scene.table.lines}
    pairs = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(definition)}</dd></div>" for label, definition in defined.items()
    )
    return f'<section class="definitions"><h2>What the numbers mean</h2><dl>{pairs}</dl></section>\n' if pairs else ""


def _mark(style: str) -> str:
    """A short piece of the run's line, in its colour and dash."""
    return (
        f'<svg class="mark" width="24" height="10" aria-hidden="true"><path class="curve {style}" d="M1 5H23"/></svg>'
        if style != "none"
        else ""
    )


def _named(kind: str, name: str, *, strong: bool = True) -> str:
    """A kind's look and its name, which no line break parts."""
    swatch = f'<svg class="swatch" width="22" height="11" aria-hidden="true"><rect class="{kind}" {_WHOLE}/></svg>'
    return f'<span class="named">{swatch} {f"<b>{name}</b>" if strong else name}</span>'


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


_LEGEND: Final = (
    '<section class="legend"><h2>How to read the grids</h2>\n<p>Each line is one row of the batch, and time runs to '
    f"the right. {_named('p', 'Prefill')} reads a request’s prompt. {_named('d', 'Decode')} writes its answer, one "
    f"token per step; {_named('e', 'a second', strong=False)} tint tells where the next request has taken the row "
    f"over. {_named('g', 'Padding')} is dummy work that makes short prompts as long as the longest of their batch. A "
    f"{_named('x', 'dead')} row’s request has ended, but the row is executed on because others of its batch aren’t "
    f"done. An {_named('n', 'empty')} row is held by nobody while a step runs and costs nothing; where nothing "
    "is drawn, no step runs. The shares above a grid are of all that was executed, in rows × time. Below it, on the "
    "same axis: how much of the KV cache is held and how much of that stores tokens, and how many requests run "
    "and wait. "
)
_LEGEND_OF_FAILED: Final = f"In a {_named('f', 'failed')} step nothing that was computed counts. "
_LEGEND_END: Final = '<span class="hover">Point at a row, or tap it, to see whose it is.</span></p></section>\n'

_AXIS_CHOICE: Final = (
    '<div class="axis-choice" role="group" aria-label="Horizontal axis" hidden><span>Horizontal axis</span>'
    '<button type="button" value="common" aria-pressed="true">one clock for all</button>'
    '<button type="button" value="own" aria-pressed="false">each its own clock</button>'
    '<button type="button" value="steps" aria-pressed="false">steps</button></div>\n'
)
