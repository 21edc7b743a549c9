"""Who held which row of the batch at which step: the layout behind the rows-by-steps figure, without any drawing.

    row 0  |PPdddddddddd|PPdddd......     P prefill   d decode   p padding   x dead   . nobody
    row 1  |Pppddxxxxxxx|                 one column per step; a request keeps its row from its first
    row 2  |PPPdddddxxxx|                 step to its last, dead rows included

A request takes the lowest free row when it first appears; a filler row (no request) is an occupant of its own.
Cells that say the same in neighbouring steps are merged into one. In a step with padding a cell is split into its
useful and its padded share. Whatever is merged or split, the areas stay exact: for every kind, the lengths of its
cells add up to the row-steps that the records hold. No two cells overlap, neither in steps nor in time.
Costs one pass over the rows of all steps.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from batchwright.records import RequestRecord, RowKind, RowRecord, StepRecord, row_kinds

Kind = RowKind | Literal["padding"]

_SMALLEST_PAUSE: Final = 1 / 400
"""A pause between steps shorter than this share of the run is narrower than a line on screen, and isn't drawn."""

_Occupant = tuple[str | None, int, int]
"""Request id, number of its rows that come before in the step, and, for filler rows, since which step."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a run, in steps (`first_step` + `num_steps`, fractions where a cell is split) and in seconds."""

    first_step: float
    num_steps: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One rectangle: what a row did over a span."""

    kind: Kind
    span: Span


@dataclass(frozen=True, slots=True)
class Hold:
    """One occupant's stay in one row. `request_id` None: a row that filled the batch up."""

    request_id: str | None
    row: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """A run laid out, its `steps` in order of start.

    `times[i]`: when step i held the machine alone. `bursts`: the stretches of steps without a pause that one could
    see. `end`: when the run's last request or step ended, in seconds.
    """

    num_rows: int
    end: float
    steps: tuple[StepRecord, ...]
    times: tuple[tuple[float, float], ...]
    bursts: tuple[Span, ...]
    holds: tuple[Hold, ...]

    def row_steps(self, kind: Kind) -> float:
        """The area of one kind, in rows x steps."""
        return sum(cell.span.num_steps for hold in self.holds for cell in hold.cells if cell.kind == kind)

    def row_seconds(self, kind: Kind) -> float:
        """The area of one kind, in rows x seconds."""
        return sum(cell.span.end - cell.span.start for hold in self.holds for cell in hold.cells if cell.kind == kind)


def lay_out(requests: Sequence[RequestRecord], steps: Sequence[StepRecord]) -> Grid:
    """The grid of one run, whose records may come in any order."""
    ordered = tuple(sorted(steps, key=lambda step: (step.started, step.id)))
    times = tuple(_one_after_the_other(ordered))
    end = max([end for _, end in times[-1:]] + [request.finished for request in requests], default=0.0)
    bursts = tuple(_bursts(times, end * _SMALLEST_PAUSE))
    occupants = _occupants(ordered)
    row_of = _assign_rows(occupants)
    cells = _cells(requests, ordered, times, occupants, {int(burst.first_step) for burst in bursts})
    return Grid(
        num_rows=max(row_of.values(), default=-1) + 1,
        end=end,
        steps=ordered,
        times=times,
        bursts=bursts,
        holds=tuple(
            Hold(request_id=occupant[0], row=row, cells=tuple(cells[occupant])) for occupant, row in row_of.items()
        ),
    )


def _one_after_the_other(steps: Sequence[StepRecord]) -> Iterator[tuple[float, float]]:
    """Steps in flight overlap on the clock, but the machine runs them in turn: each starts when the last has ended."""
    free = 0.0
    for step in steps:
        start = max(step.started, free)
        free = max(step.finished, start)
        yield start, free


def _bursts(times: Sequence[tuple[float, float]], pause: float) -> Iterator[Span]:
    first = 0
    for index in range(1, len(times) + 1):
        if index == len(times) or times[index][0] - times[index - 1][1] > pause:
            yield Span(first, index - first, times[first][0], times[index - 1][1])
            first = index


def _occupants(steps: Sequence[StepRecord]) -> list[list[_Occupant]]:
    """Who is in each step, in the order of its rows. A filler lasts for as long as steps keep that many of them."""
    named: list[list[_Occupant]] = []
    fillers: list[_Occupant] = []
    for index, step in enumerate(steps):
        seen: dict[str | None, int] = {}
        present: list[_Occupant] = []
        for row in step.rows:
            nth = seen.get(row.request_id, 0)
            seen[row.request_id] = nth + 1
            if row.request_id is not None:
                present.append((row.request_id, nth, 0))
                continue
            if nth == len(fillers):
                fillers.append((None, nth, index))
            present.append(fillers[nth])
        del fillers[seen.get(None, 0) :]
        named.append(present)
    return named


def _assign_rows(occupants: Sequence[Sequence[_Occupant]]) -> dict[_Occupant, int]:
    last = {occupant: index for index, present in enumerate(occupants) for occupant in present}
    row_of: dict[_Occupant, int] = {}
    free: list[int] = []
    num_rows = 0
    for index, present in enumerate(occupants):
        for occupant in present:
            if occupant not in row_of:
                if not free:
                    free, num_rows = [num_rows], num_rows + 1
                row_of[occupant] = heapq.heappop(free)
        for occupant in present:
            if last[occupant] == index:
                heapq.heappush(free, row_of[occupant])
    return row_of


def _cells(
    requests: Sequence[RequestRecord],
    steps: Sequence[StepRecord],
    times: Sequence[tuple[float, float]],
    occupants: Sequence[Sequence[_Occupant]],
    breaks: set[int],
) -> Mapping[_Occupant, list[Cell]]:
    """Each occupant's cells in order; cells never reach across one of the `breaks`, steps that follow a pause."""
    cells: dict[_Occupant, list[Cell]] = {}
    for index, (step, (start, end), kinds) in enumerate(zip(steps, times, row_kinds(requests, steps), strict=True)):
        for row, kind, occupant in zip(step.rows, kinds, occupants[index], strict=True):
            stay = cells.setdefault(occupant, [])
            for cell in _split(kind, row, Span(index, 1, start, end)):
                if stay and index not in breaks and _continues(stay[-1], cell):
                    span = stay[-1].span
                    num_steps = cell.span.first_step + cell.span.num_steps - span.first_step
                    stay[-1] = replace(stay[-1], span=Span(span.first_step, num_steps, span.start, cell.span.end))
                else:
                    stay.append(cell)
    return cells


def _split(kind: RowKind, row: RowRecord, span: Span) -> Iterator[Cell]:
    """The useful share of a cell, then its padded share."""
    if kind in ("dead", "failed") or not row.padding:
        yield Cell(kind, span)
        return
    share = row.num_tokens / (row.num_tokens + row.padding)
    middle = span.start + share * (span.end - span.start)
    yield Cell(kind, Span(span.first_step, share, span.start, middle))
    yield Cell("padding", Span(span.first_step + share, 1 - share, middle, span.end))


def _continues(earlier: Cell, later: Cell) -> bool:
    """Whether both are whole cells of one kind in neighbouring steps; split cells stay apart."""
    reached = earlier.span.first_step + earlier.span.num_steps
    whole = earlier.span.first_step % 1 == 0 and later.span.num_steps == 1
    return earlier.kind == later.kind and whole and reached == later.span.first_step
