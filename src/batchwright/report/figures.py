"""The figures of the report as SVG text: rows by steps, KV cache and queue over the run, and distributions.

Horizontal positions are percentages and heights are pixels, so a figure fills whatever width it is given while
text, hatching and line widths keep their size, on a phone as on paper. Curves, which can't be written in
percentages, sit in a nested viewport that only stretches. The figures of a run carry three horizontal axes: the
clock that all runs of a scene share (what one sees without a script, and in print), the run's own clock, and
its steps; page.css shows one of them and page.js moves the rectangles. Colours and hatches are in page.css.
Everything that comes from records is escaped.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from batchwright.records import RequestRecord, StepRecord, percentile
from batchwright.report.grid import Cell, Grid, Hold, Kind, Span
from batchwright.units import format_seconds, format_tokens

KIND_CLASS: Final[dict[Kind, str]] = {"prefill": "p", "decode": "d", "padding": "g", "dead": "x", "failed": "f"}
_NEXT_HOLDER: Final = "e"
"""Decode in the tint of every second holder of a row."""

_KV_HEIGHT: Final = 46
_QUEUE_HEIGHT: Final = 34
_CURVE_HEIGHT: Final = 170
_MOST_SLICES: Final = 500
_MOST_CURVE_POINTS: Final = 400
_LOG_FROM_RATIO: Final = 30
_LATEST_END_MARK: Final = 0.7
"""Share of the clock up to which a run says when it ended: the rest holds the words, on a phone too."""
_WIDTH: Final = 1000
_TIME_UNITS: Final = ((1e-3, "ms", 1.0), (1.0, "s", 600.0), (60.0, "min", 6 * 3600.0), (3600.0, "h", math.inf))
"""Seconds, name, and up to how many seconds a run is shown in this unit."""


@dataclass(frozen=True, slots=True)
class Scales:
    """What all runs of a scene share, so that one can compare them by eye: `end` in seconds, tops in their unit."""

    end: float
    kv_top: int
    queue_top: int


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's values of a latency, in seconds, out of `num_requests` (those without a value never arrive)."""

    name: str
    style: str
    values: Sequence[float]
    num_requests: int


def scales_of(grids: Sequence[Grid]) -> Scales:
    """The scales that fit all of `grids`. A KV pool far above its use would flatten the curve and is left out."""
    steps = [step for grid in grids for step in grid.steps]
    held = max((step.pages_held * step.page_size for step in steps), default=0)
    pool = max((_pool(step) for step in steps), default=0)
    return Scales(
        end=max((grid.end for grid in grids), default=0.0),
        kv_top=max(pool, held) if pool <= 1.6 * held else held,
        queue_top=max((max(step.num_live, step.num_waiting) for step in steps), default=0),
    )


def rows_by_steps(grid: Grid, requests: Sequence[RequestRecord], scales: Scales, name: str) -> str:
    """The main figure: one line per row of the batch, coloured by what was executed in it and for whom."""
    pitch = _row_pitch(grid.num_rows)
    height = max(1.0, grid.num_rows * pitch)
    by_id = {request.id: request for request in requests}
    holders = [0] * grid.num_rows
    groups = []
    for hold in sorted(grid.holds, key=lambda hold: hold.cells[0].span.first_step):
        second = holders[hold.row] % 2 == 1
        groups.append(_hold(hold, by_id.get(hold.request_id or ""), pitch, second=second, end=scales.end))
        holders[hold.row] += 1
    ground = "".join(_rect("n", burst, 0, height, scales.end) for burst in grid.bursts)
    body = f"{ground}{''.join(groups)}{_end_mark(grid, scales, height)}"
    return _svg("grid", height, f"Rows by steps: {name}", describe(grid), body)


def describe(grid: Grid) -> str:
    """The grid in one sentence, for who can't see it and as its caption."""
    if not grid.steps:
        return "No step was recorded."
    shares = shares_of(grid)
    parts = ", ".join(f"{share:.1%} {kind}" for kind, share in shares.items() if share > 0)
    return (
        f"{_num(grid.num_rows, 'row')}, {_num(len(grid.steps), 'step')}, ended at {_time(grid.end)}; "
        f"of rows × time: {parts}."
    )


def shares_of(grid: Grid) -> dict[Kind, float]:
    """What was executed, by kind, as fractions of rows x time. Rows that nobody held cost nothing and don't count."""
    seconds = {kind: grid.row_seconds(kind) for kind in KIND_CLASS}
    total = sum(seconds.values())
    return {kind: part / total if total else 0.0 for kind, part in seconds.items()}


def kv_over_time(grid: Grid, scales: Scales, name: str) -> str:
    """Tokens that fit into the pages held, tokens stored in them, and the pool where it's near enough to draw."""
    held = [step.pages_held * step.page_size for step in grid.steps]
    stored = [step.tokens_stored for step in grid.steps]
    pool = max((_pool(step) for step in grid.steps), default=0)
    description = (
        f"At most {format_tokens(max(held, default=0))} tokens reserved and {format_tokens(max(stored, default=0))} "
        f"stored, of {format_tokens(pool)}."
    )
    rise = _riser(scales.kv_top, _KV_HEIGHT)
    body = _both_axes(
        grid,
        scales.end,
        lambda stretches: (
            _area("held", _slices(held, stretches), rise, _KV_HEIGHT)
            + _area("stored", _slices(stored, stretches), rise, _KV_HEIGHT)
        ),
    )
    limit = f'<path class="pool" d="M0 {rise(pool)}H{_WIDTH}"/>' if pool <= scales.kv_top else ""
    return _stretched("strip", _KV_HEIGHT, f"KV cache: {name}", description, body + limit)


def queue_over_time(grid: Grid, scales: Scales, name: str) -> str:
    """Requests running (live rows) and waiting, step by step."""
    running = [step.num_live for step in grid.steps]
    waiting = [step.num_waiting for step in grid.steps]
    description = f"At most {max(running, default=0)} running and {max(waiting, default=0)} waiting."
    rise = _riser(scales.queue_top, _QUEUE_HEIGHT)
    body = _both_axes(
        grid,
        scales.end,
        lambda stretches: (
            _area("running", _slices(running, stretches), rise, _QUEUE_HEIGHT)
            + _line("waiting", _slices(waiting, stretches), rise)
        ),
    )
    return _stretched("strip", _QUEUE_HEIGHT, f"Running and waiting: {name}", description, body)


def axes(grid: Grid, scales: Scales) -> str:
    """The three axes under a run's figures; page.css shows one of them."""
    num_steps = len(grid.steps)
    shown = (
        ("on-common", _time_ticks(scales.end), scales.end),
        ("on-own", _time_ticks(grid.end), grid.end),
        ("on-steps", [(step, f"{step:,.0f}") for step in _round_numbers(num_steps, whole=True)], num_steps),
    )
    body = "".join(f'<g class="{name}">{_ticks(ticks, end)}</g>' for name, ticks, end in shown)
    return f'<svg class="axis" width="100%" height="20" aria-hidden="true">{body}</svg>'


def distribution(title: str, curves: Sequence[Curve]) -> str:
    """The share of requests that were at most so slow, one curve per run; a dot marks the median."""
    pooled = [value for curve in curves for value in curve.values]
    if not pooled:
        return '<p class="none">No request got that far.</p>'
    low, high = min(pooled), max(pooled)
    logarithmic = low > 0 and high / low > _LOG_FROM_RATIO
    place = _logarithmic(low, high) if logarithmic else _linear(high)
    ticks = _log_ticks(low, high) if logarithmic else _time_ticks(high)
    grid_lines = "".join(
        f'<line class="rule" x1="0" x2="100%" y1="{y}" y2="{y}"/><text class="y" x="0" y="{y - 3}">{label}</text>'
        for y, label in ((_curve_y(1), "100%"), (_curve_y(0.5), "50%"), (_curve_y(0), ""))
    )
    lines = "".join(_curve(curve, place) for curve in curves if curve.values)
    plot = (
        f'<svg y="0" width="100%" height="{_CURVE_HEIGHT}" viewBox="0 0 {_WIDTH} {_CURVE_HEIGHT}" '
        f'preserveAspectRatio="none">{lines}</svg>'
    )
    medians = [(curve, median) for curve in curves if (median := percentile(curve.values, 0.5)) is not None]
    dots = "".join(_median_dot(curve, median, place) for curve, median in medians)
    marks = "".join(_tick(place(value), label, _CURVE_HEIGHT, odd=odd) for value, label, odd in _odd(ticks))
    scale = "logarithmic" if logarithmic else "linear"
    said = "; ".join(f"{curve.name} median {_time(median)}" for curve, median in medians)
    description = f"Share of requests, over a {scale} time axis. {said}."
    return _svg("curves", _CURVE_HEIGHT + 20, title, description, grid_lines + plot + dots + marks)


def _row_pitch(num_rows: int) -> float:
    """Few rows are drawn high, many low; beyond the figure's full height they get as thin as need be."""
    return round(min(22 * num_rows**-0.35, 400 / num_rows), 2) if num_rows else 0.0


def _hold(hold: Hold, request: RequestRecord | None, pitch: float, *, second: bool, end: float) -> str:
    height = round(pitch - 1 if pitch >= 3.5 else pitch, 2)
    rects = "".join(_cell(cell, height, end, second=second) for cell in hold.cells)
    title = f"<title>{escape(_account(hold, request))}</title>"
    return f'<g transform="translate(0,{_trim(hold.row * pitch)})">{title}{rects}</g>'


def _cell(cell: Cell, height: float, end: float, *, second: bool) -> str:
    name = _NEXT_HOLDER if second and cell.kind == "decode" else KIND_CLASS[cell.kind]
    return _rect(name, cell.span, None, height, end)


def _rect(name: str, span: Span, y: float | None, height: float, end: float) -> str:
    top = "" if y is None else f' y="{_trim(y)}"'
    return (
        f'<rect class="{name}" x="{_percent(span.start, end)}" width="{_percent(span.end - span.start, end)}"{top} '
        f'height="{_trim(height)}" data-s="{_trim(span.first_step, 4)} {_trim(span.num_steps, 4)}"/>'
    )


def _account(hold: Hold, request: RequestRecord | None) -> str:
    """Whose hold it is, for how many steps, and how the request went."""
    first, last = hold.cells[0].span, hold.cells[-1].span
    where = f"row {hold.row + 1}, steps {int(first.first_step) + 1} to {round(last.first_step + last.num_steps)}"
    if hold.request_id is None:
        return f"nobody: fills the batch up; {where}"
    if request is None:
        return f"{hold.request_id}; {where}"
    first_token = f", first token {_time(request.token_times[0])}" if request.token_times else ""
    num_dead = round(sum(cell.span.num_steps for cell in hold.cells if cell.kind == "dead"))
    dead = f"; its row ran dead for {_num(num_dead, 'step')}" if num_dead else ""
    return (
        f"{hold.request_id}: prompt {format_tokens(request.num_prompt)}, output {format_tokens(request.num_output)} "
        f"tokens; arrived {_time(request.arrival)}{first_token}, ended {_time(request.finished)} "
        f"({request.finish_reason}){dead}; {where}"
    )


def _end_mark(grid: Grid, scales: Scales, height: float) -> str:
    """On the common clock, a run that ends well before the others says when, in the space that it leaves."""
    if not grid.steps or grid.end > _LATEST_END_MARK * scales.end:
        return ""
    x = _percent(grid.end, scales.end)
    text = f"ended at {_time(grid.end)}"
    return f'<text class="end on-common" x="{x}" dx="9" y="{_trim(height / 2)}" dy=".35em">{text}</text>'


def _both_axes(grid: Grid, end: float, draw: Callable[[list[list[tuple[float, float]]]], str]) -> str:
    """The same curves over time, broken where no step runs, and over steps."""
    num_steps = len(grid.steps)
    over_time = [
        [
            (_WIDTH * start / end if end else 0, _WIDTH * stop / end if end else 0)
            for start, stop in grid.times[int(burst.first_step) : int(burst.first_step + burst.num_steps)]
        ]
        for burst in grid.bursts
    ]
    over_steps = [[(_WIDTH * step / num_steps, _WIDTH * (step + 1) / num_steps) for step in range(num_steps)]]
    reach = _WIDTH * grid.end / end if end else 0
    return (
        f'<g class="on-time"><rect class="backdrop" width="{_trim(reach, 1)}" height="100%"/>{draw(over_time)}</g>'
        f'<g class="on-steps"><rect class="backdrop" width="{_WIDTH}" height="100%"/>{draw(over_steps)}</g>'
    )


@dataclass(frozen=True, slots=True)
class _Slice:
    left: float
    right: float
    value: float


def _slices(values: Sequence[int], stretches: Iterable[Sequence[tuple[float, float]]]) -> list[list[_Slice]]:
    """One value per step as few slices: equal neighbours are joined, those too narrow to see at their maximum."""
    remaining = iter(values)
    sliced = []
    for stretch in stretches:
        slices: list[_Slice] = []
        for (left, right), value in zip(stretch, remaining, strict=False):
            last = slices[-1] if slices else None
            if last and (last.value == value or _slot(last.left) == _slot(left)):
                slices[-1] = _Slice(last.left, right, max(last.value, value))
            else:
                slices.append(_Slice(left if last is None else last.right, right, value))
        sliced.append(slices)
    return sliced


def _slot(x: float) -> int:
    return int(x * _MOST_SLICES / _WIDTH)


def _area(name: str, sliced: Iterable[Sequence[_Slice]], rise: Callable[[float], str], height: int) -> str:
    path = "".join(
        f"M{_trim(slices[0].left, 1)} {height}{_steps(slices, rise)}V{height}Z" for slices in sliced if slices
    )
    return f'<path class="{name}" d="{path}"/>'


def _line(name: str, sliced: Iterable[Sequence[_Slice]], rise: Callable[[float], str]) -> str:
    path = "".join(
        f"M{_trim(slices[0].left, 1)} {rise(slices[0].value)}{_steps(slices, rise)}" for slices in sliced if slices
    )
    return f'<path class="{name}" d="{path}"/>'


def _steps(slices: Iterable[_Slice], rise: Callable[[float], str]) -> str:
    return "".join(f"V{rise(part.value)}H{_trim(part.right, 1)}" for part in slices)


def _riser(top: float, height: int) -> Callable[[float], str]:
    """Values to vertical positions; a line at the top or bottom stays inside."""
    return lambda value: _trim(height - 1 - (height - 2) * value / top if top else height - 1, 1)


def _linear(high: float) -> Callable[[float], float]:
    return lambda value: value / high if high else 0.0


def _logarithmic(low: float, high: float) -> Callable[[float], float]:
    start, width = math.log(low), math.log(high) - math.log(low)
    return lambda value: (math.log(value) - start) / width


def _curve(curve: Curve, place: Callable[[float], float]) -> str:
    ordered = sorted(curve.values)
    stride = max(1, len(ordered) // _MOST_CURVE_POINTS)
    ranks = [*range(0, len(ordered), stride), len(ordered) - 1]
    path = f"M{_trim(_WIDTH * place(ordered[0]), 1)} {_curve_y(0)}" + "".join(
        f"H{_trim(_WIDTH * place(ordered[rank]), 1)}V{_curve_y((rank + 1) / curve.num_requests)}" for rank in ranks
    )
    return f'<path class="curve {curve.style}" d="{path}H{_WIDTH}"/>'


def _curve_y(share: float) -> float:
    return round(_CURVE_HEIGHT - 1 - (_CURVE_HEIGHT - 16) * share, 1)


def _median_dot(curve: Curve, median: float, place: Callable[[float], float]) -> str:
    """On the curve, at half of the height that it reaches."""
    y = _curve_y(0.5 * len(curve.values) / curve.num_requests)
    return (
        f'<circle class="dot {curve.style}" cx="{_percent(place(median), 1)}" cy="{y}" r="3.5">'
        f"<title>{escape(curve.name)}: median {_time(median)}</title></circle>"
    )


def _time_ticks(end: float) -> list[tuple[float, str]]:
    """Round numbers of one unit: a run of two minutes is counted in seconds, one of two hours in minutes."""
    unit, name = next((unit, name) for unit, name, most in _TIME_UNITS if end <= most)
    return [(value * unit, f"{value:,g} {name}" if value else "0") for value in _round_numbers(end / unit)]


def _round_numbers(end: float, *, whole: bool = False) -> list[float]:
    """Zero and up to seven multiples of 1, 2 or 5 times a power of ten, none beyond `end`."""
    if end <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(end / 7))
    width = next(power * factor for factor in (1, 2, 5, 10) if end / (power * factor) <= 7)
    width = max(1.0, width) if whole else width
    return [round(index * width, 12) for index in range(int(end / width * (1 + 1e-9)) + 1)]


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Powers of ten, and 3 times each where there are few of them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 3) if len(powers) < 5 else (1,)
    values = [factor * 10.0**power for power in powers for factor in factors]
    return [
        (value, f"{value:,g} s" if value >= 1 else f"{value * 1e3:g} ms") for value in values if low <= value <= high
    ]


def _ticks(ticks: Sequence[tuple[float, str]], end: float) -> str:
    return "".join(_tick(value / end if end else 0.0, label, 0, odd=odd) for value, label, odd in _odd(ticks))


def _odd(ticks: Sequence[tuple[float, str]]) -> Iterator[tuple[float, str, bool]]:
    """Every second tick is marked: narrow screens leave its label out."""
    for index, (value, label) in enumerate(ticks):
        yield value, label, index % 2 == 1


def _tick(place: float, label: str, top: int, *, odd: bool) -> str:
    x = _percent(place, 1)
    anchor = "start" if place < 0.05 else "end" if place > 0.95 else "middle"
    kind = "tick odd" if odd else "tick"
    return (
        f'<line class="tick" x1="{x}" x2="{x}" y1="{top}" y2="{top + 4}"/>'
        f'<text class="{kind}" x="{x}" y="{top + 16}" text-anchor="{anchor}">{escape(label)}</text>'
    )


def _svg(name: str, height: float, title: str, description: str, body: str) -> str:
    return (
        f'<svg class="{name}" width="100%" height="{_trim(height)}" role="img">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{body}</svg>"
    )


def _stretched(name: str, height: int, title: str, description: str, body: str) -> str:
    return (
        f'<svg class="{name}" width="100%" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        f'preserveAspectRatio="none" role="img">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{body}</svg>"
    )


def _time(seconds: float) -> str:
    """Three digits, and seconds up to ten minutes, as on the axes."""
    if 1 <= seconds <= 600:
        return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
    return format_seconds(seconds) if seconds else "0 s"


def _pool(step: StepRecord) -> int:
    return step.pages_total * step.page_size


def _num(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _percent(part: float, whole: float) -> str:
    return f"{_trim(100 * part / whole if whole else 0.0, 3)}%"


def _trim(value: float, digits: int = 2) -> str:
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
