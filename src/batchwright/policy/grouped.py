"""Batches that run together from their first step to their last: the machinery of static and dynamic batching.

A `Former` decides when queued requests become a batch; this file runs it as such systems do. Prompts are padded
to the longest, pages for the longest possible row are held by every row until the whole batch ends, and a row
whose request has ended is executed all the same. What that wastes is in the plans, so it is really executed.
"""

from collections import deque
from itertools import islice
from typing import NamedTuple, Protocol

from batchwright.policy.ledger import Ledger
from batchwright.policy.order import Queueing, RankedQueue
from batchwright.policy.pages import Memory
from batchwright.policy.progress import Flight, Progress, Share
from batchwright.policy.types import Admitted, Chunk, Dropped, Load, Reason, Refused, Request, StepOutcome, StepPlan


class Release(NamedTuple):
    """The first `num_requests` in the queue leave as one batch."""

    num_requests: int
    reason: Reason


class Former(Protocol):
    """Decides when the queue becomes a batch."""

    def release(self, waiting: RankedQueue[Progress], now: float) -> Release | None:
        """What may leave now; `waiting` is not empty."""
        ...

    def wakeup(self, waiting: RankedQueue[Progress]) -> float | None:
        """When `release` may say something new though nobody arrives; `waiting` is not empty."""
        ...

    def padded_size(self, num_rows: int) -> int:
        """How many rows are executed for a batch of `num_rows`."""
        ...


_FIRST_DECODE = 2
"""A batch counts its rounds from 1. The first computes the prompts; from this one on, each row computes one token."""


class _Batch:
    """Rows that run together, and the pages they hold until the last has ended.

    A row is a request's `Progress`, also after the request has ended, or None: a filler, which holds no pages.
    """

    def __init__(self, rows: list[Progress], num_fillers: int) -> None:
        self.rows: list[Progress | None] = [*rows, *[None] * num_fillers]
        self.width = max(row.request.num_prompt for row in rows)
        self.num_tokens_per_row = _num_tokens_per_row(rows)
        self.round_number = 0  # the last step that its rows began to take, all at once or in parts; 0 before any
        self.part_size = len(self.rows)  # most rows in one plan; fewer than all after a step ran out of memory
        self.tables: dict[str, tuple[int, ...]] = {}

    @property
    def has_work(self) -> bool:
        return any(row and not row.ended and row.done < row.length for row in self.rows)

    @property
    def is_over(self) -> bool:
        return all(row is None or row.ended for row in self.rows)

    def next_chunk(self, row: Progress | None, round_number: int) -> Chunk:
        """What `row` executes next, useful or not. Counts it as done: ask once for each plan."""
        if row is None:
            position = 0 if round_number < _FIRST_DECODE else self.width + round_number - _FIRST_DECODE
            return self._dead_chunk(None, position, ())
        table = self.tables[row.request.id]
        if row.ended or row.done == row.length:
            chunk = self._dead_chunk(row.request.id, row.done, table)
            if row.ended:
                row.done += 1  # its dead row moves on with the batch
            return chunk
        start, num_tokens = row.done, row.length - row.done
        padding = 0 if start else self.width - num_tokens
        num_granted = 0 if row.started else len(table)
        return Chunk(row.request.id, start, num_tokens, padding, row.promise(num_tokens), num_granted, table)

    def _dead_chunk(self, request_id: str | None, position: int, table: tuple[int, ...]) -> Chunk:
        """A row executed for nothing: as wide as the batch at its start, then one position at a time, to the last."""
        start = min(position, self.num_tokens_per_row - 1)
        return Chunk(request_id, start, 0, 1 if start else self.width, False, 0, table)


def _num_tokens_per_row(rows: list[Progress]) -> int:
    """Positions for which each row of a batch holds pages: the longest prompt, and all outputs but the last."""
    return max(row.request.num_prompt for row in rows) + max(row.limit for row in rows) - 1


class _Part(NamedTuple):
    """Rows of the batch that take the step of one round together: all of them, unless a step failed."""

    reason: Reason
    rows: list[Progress | None]
    round_number: int

    def split(self, reason: Reason, size: int) -> "list[_Part]":
        """Parts of at most `size` rows."""
        return [self._replace(reason=reason, rows=self.rows[i : i + size]) for i in range(0, len(self.rows), size)]


class Grouped:
    """The scheduler that forms batches by `former` and runs each to its end before the next."""

    def __init__(
        self, memory: Memory, former: Former, queueing: Queueing | None = None, max_rows_per_request: int = 1
    ) -> None:
        self._former = former
        self._ledger = Ledger(memory, queueing or Queueing(), max_rows_per_request=max_rows_per_request)
        self._batch: _Batch | None = None
        self._round: deque[_Part] = deque()  # what is left of the step that the batch is taking
        self._in_flight: dict[int, _Part] = {}

    # ---- events

    def add(self, request: Request, now: float) -> Admitted | Refused:
        return self._ledger.enter(request, now)

    def abort(self, request_id: str, now: float) -> None:
        progress = self._ledger.live.get(request_id)
        if progress is not None:
            self._ledger.end(progress)
            self._close_batch()

    def flush(self, now: float) -> None:
        self._ledger.flush()

    def advance(self, now: float) -> tuple[Dropped, ...]:
        dropped = []
        for progress in self._ledger.expire(now):
            self._ledger.end(progress)
            dropped.append(progress.expired(now))
        self._close_batch()
        return tuple(dropped)

    def commit(self, plan_id: int, now: float, outcome: StepOutcome) -> tuple[Dropped, ...]:
        part = self._in_flight.pop(plan_id)
        ended, failed = self._ledger.settle(plan_id, outcome)
        for progress in ended:
            self._ledger.end(progress)
        if outcome.failed == "void":
            assert self._batch is not None
            self._round.extend(part.split(part.reason, self._batch.part_size))
        dropped = self._recover(part, outcome) if failed and outcome.failed != "void" else ()
        self._close_batch()
        return dropped

    def wakeup(self, now: float) -> float | None:
        times = [self._ledger.next_expiry()]
        if self._batch is None and len(self._ledger.waiting):
            times.append(self._former.wakeup(self._ledger.waiting))
        return min((time for time in times if time is not None), default=None)

    @property
    def memory(self) -> Memory:
        return self._ledger.memory

    @property
    def max_drafts(self) -> int:
        return 0

    @property
    def load(self) -> Load:
        rows = self._batch.rows if self._batch else ()
        return self._ledger.load(sum(row is not None and not row.ended for row in rows))

    # ---- planning

    def plan(self, now: float) -> StepPlan | None:
        if self._batch is None:
            self._form_batch(now)
        if self._batch is None or self._must_wait():
            return None
        part = self._next_part(self._batch)
        return self._launch(self._batch, part) if part else None

    def _form_batch(self, now: float) -> None:
        waiting = self._ledger.waiting
        release = self._former.release(waiting, now) if len(waiting) else None
        if release is None:
            return
        rows = [waiting[index] for index in range(release.num_requests)]
        while not self._fit(rows):
            rows.pop()
        num_rows = sum(row.request.num_rows for row in rows)
        self._batch = batch = _Batch(rows, self._former.padded_size(num_rows) - num_rows)
        for row in rows:
            waiting.remove(row.rank)
            batch.tables[row.request.id] = self._ledger.pool.take(
                self._ledger.memory.pages_for(batch.num_tokens_per_row)
            )
        self._begin_round(release.reason)

    def _fit(self, rows: list[Progress]) -> bool:
        memory = self._ledger.memory
        return len(rows) * memory.pages_for(_num_tokens_per_row(rows)) <= memory.num_pages

    def _begin_round(self, reason: Reason) -> None:
        """Every row of the batch takes one step, in parts of at most `part_size`."""
        assert self._batch is not None
        batch = self._batch
        batch.round_number += 1
        if batch.round_number == _FIRST_DECODE:  # steps are smaller from here on, so all rows may fit again
            batch.part_size = len(batch.rows)
        self._round.extend(_Part(reason, batch.rows, batch.round_number).split(reason, batch.part_size))

    def _must_wait(self) -> bool:
        """A part of a failed step runs alone, so that the row that breaks it is found."""
        parts = [*self._in_flight.values(), *islice(self._round, 1)]
        return bool(self._in_flight) and any(part.reason == "retry" for part in parts)

    def _next_part(self, batch: _Batch) -> _Part | None:
        """The next rows to run, or None while all that is left of the batch is in flight."""
        while batch.has_work:
            if not self._round:
                self._begin_round("next")
            part = self._round.popleft()
            if any(row and not row.ended and row.done < row.length for row in part.rows):
                return part
        return None

    def _launch(self, batch: _Batch, part: _Part) -> StepPlan:
        flight: Flight = {}
        chunks = []
        for row in part.rows:
            chunks.append(chunk := batch.next_chunk(row, part.round_number))
            if row and chunk.num_tokens:
                row.last_plan = self._ledger.next_plan_id
                flight[row.request.id] = Share(row, chunk.num_tokens)
        plan = self._ledger.launch(part.reason, chunks, flight)
        self._in_flight[plan.id] = part
        return plan

    # ---- endings

    def _close_batch(self) -> None:
        """Give the pages back once every row has ended and no plan names them."""
        if self._batch is None or self._in_flight or not self._batch.is_over:
            return
        for table in self._batch.tables.values():
            self._ledger.pool.release(table)
        self._batch = None
        self._round.clear()

    def _recover(self, part: _Part, outcome: StepOutcome) -> tuple[Dropped, ...]:
        """Run a failed part again in halves, so that one bad row costs at most 2 log2(rows) extra steps."""
        rows = part.rows
        if len(rows) == 1:
            (row,) = rows
            assert row is not None
            self._ledger.end(row)
            return (Dropped(row.request.id, "out_of_memory" if outcome.failed == "oom" else "exception"),)
        half = (len(rows) + 1) // 2
        assert self._batch is not None
        is_old = part.round_number < _FIRST_DECODE <= self._batch.round_number  # later steps are smaller anyway
        if outcome.failed == "oom" and not is_old:
            self._batch.part_size = half
        self._round.extendleft(reversed(part.split("retry", half)))
        return ()
