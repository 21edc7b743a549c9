"""What happened, as JSON lines: one `RequestRecord` per request, one `StepRecord` per step.

Engine and simulator write the same records, so whoever reads them (report, summary, calibration) cannot tell
which made them. Times are seconds on the run's clock, zero at the run's start; lengths are tokens. What tables and
figures must say alike of records is defined here too: the kinds of rows, and percentiles.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from batchwright.errors import ConfigError, InputError
from batchwright.policy.types import Chunk, Load, StepPlan

FinishReason = Literal["stop", "length", "abort", "deadline", "queue_timeout", "refused", "error"]
RowKind = Literal["prefill", "decode", "dead", "failed"]


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, tag="request", tag_field="type"):
    """One request from arrival to its end. `token_times[i]`: when output token i was available."""

    run: str
    id: str
    arrival: float
    num_prompt: int
    num_output: int
    max_tokens: int
    num_cached: int = 0
    num_preempted: int = 0
    started: float | None = None
    finished: float
    finish_reason: FinishReason
    error: str | None = None
    token_times: tuple[float, ...] = ()

    @property
    def is_completed(self) -> bool:
        """Whether it ended as its client wanted, with `stop` or `length`; any other end is a request lost."""
        return self.finish_reason in ("stop", "length")

    @property
    def ttft(self) -> float | None:
        """From its arrival to its first token, however it ended; None without a token."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def latency(self) -> float | None:
        """From its arrival to its end; None for a request lost."""
        return self.finished - self.arrival if self.is_completed else None


class RowRecord(msgspec.Struct, frozen=True, array_like=True):
    """One row of a step. `request_id` None or `num_tokens` 0: a dead row. `start` is the first position computed."""

    request_id: str | None
    start: int
    num_tokens: int
    padding: int
    samples: bool


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="type"):
    """One step as planned and as it went. Pages are those held while it ran, tokens those stored when it ended.

    `num_drafts`: guesses that it checked, of which `num_right` were right (speculation). `expert_tokens[i][j]`:
    positions that layer i routed to its expert j; empty for models without experts.
    """

    run: str
    id: int
    reason: str
    started: float
    finished: float
    rows: tuple[RowRecord, ...]
    preempted: tuple[str, ...] = ()
    pages_held: int
    pages_total: int
    page_size: int
    tokens_stored: int
    num_waiting: int
    failed: str | None = None
    num_drafts: int = 0
    num_right: int = 0
    expert_tokens: tuple[tuple[int, ...], ...] = ()

    @property
    def num_live(self) -> int:
        """Rows that computed something."""
        return sum(1 for row in self.rows if row.num_tokens)


Record = RequestRecord | StepRecord

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write `records` to `path`, one JSON object per line."""
    with path.open("wb") as file:
        for record in records:
            file.write(_encoder.encode(record) + b"\n")


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file that `write_records` made. Raises InputError with the line number."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise InputError(
                    f"read records from {path}", f"line {number} is not a record ({error})", "remove or repair the line"
                ) from error


def row_kinds(requests: Iterable[RequestRecord], steps: Iterable[StepRecord]) -> Iterator[tuple[RowKind, ...]]:
    """For each of `steps`, which are in order of start, what each of its rows did.

    A row decodes if it samples and starts beyond its prompt, and does not compute again what a preemption took; any
    other live row is prefill. Where no record tells the prompt's length, a live row of one token starts beyond it.
    """
    num_prompt = {request.id: request.num_prompt for request in requests}
    recomputing: set[str | None] = set()
    for step in steps:
        recomputing.update(step.preempted)
        yield tuple(
            _kind(row, step, num_prompt.get(row.request_id or ""), recomputing=row.request_id in recomputing)
            for row in step.rows
        )
        if step.failed is None:
            recomputing.difference_update(row.request_id for row in step.rows if row.samples)


def _kind(row: RowRecord, step: StepRecord, num_prompt: int | None, *, recomputing: bool) -> RowKind:
    if step.failed is not None:
        return "failed"
    if not row.num_tokens:
        return "dead"
    beyond_prompt = row.num_tokens == 1 if num_prompt is None else row.start >= num_prompt
    return "decode" if row.samples and beyond_prompt and not recomputing else "prefill"


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` (0 to 1) of `values` lies; None if there are none.

    Linear between the two closest ranks (numpy's default, Hyndman-Fan type 7): the median of two is their mean.
    """
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = min(int(position), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


class Recorder:
    """Turns what a driver (engine or simulator) sees into records; holds one small object per live request.

    The driver calls `arrived`, then `planned`, `began` and `committed` for every step, `token` for every output token,
    and `ended` exactly once per request. Times are the driver's clock; they are stored relative to `origin`.

    `requests` and `steps` are the newest `keep` records of each, in the order in which they ended. None keeps all, and
    memory then grows with every step, by some 100 bytes per row.
    """

    def __init__(self, run: str, page_size: int, origin: float = 0.0, *, keep: int | None = None) -> None:
        if keep is not None and keep < 0:
            raise ConfigError(f"keep {keep} records", "it is less than none", "give 0 or more, or None for all")
        self.run = run
        self.requests: list[RequestRecord] = []
        self.steps: list[StepRecord] = []
        self._keep = keep
        self._page_size = page_size
        self._origin = origin
        self._live: dict[str, _LiveRequest] = {}
        self._planned: dict[int, _PlannedStep] = {}
        self._untold: tuple[str, ...] = ()  # whom plans that were not run preempted
        self._num_forgotten = 0

    def restart(self, origin: float) -> float:
        """Times count from `origin` from here on; returns it. Only before the first request."""
        assert not self._live
        assert not self.requests
        self._origin = origin
        return origin

    def complete(self) -> tuple[list[RequestRecord], list[StepRecord]]:
        """`requests` and `steps` of the whole run. Raises ConfigError if not all were kept."""
        if self._num_forgotten:
            fact = f"it keeps the newest {self._keep}, and has forgotten {self._num_forgotten}"
            remedy = 'measure with partial(Recorder, "my run"), which keeps all'
            raise ConfigError(f"use all records of run {self.run!r}", fact, remedy)
        return self.requests, self.steps

    def arrived(self, request_id: str, now: float, num_prompt: int, max_tokens: int) -> None:
        self._live[request_id] = _LiveRequest(now - self._origin, num_prompt, max_tokens)

    def planned(self, plan: StepPlan, load: Load) -> None:
        """`load` is the scheduler's with `plan` just made."""
        self._planned[plan.id] = _PlannedStep(plan, load)
        for request_id in plan.preempted:
            if request_id in self._live:
                self._live[request_id].num_preempted += 1

    def began(self, plan_id: int, now: float) -> None:
        """The step runs from `now` on."""
        step = self._planned[plan_id]
        step.started = now - self._origin
        for chunk in step.plan.chunks:
            live = self._live.get(chunk.request_id) if chunk.num_tokens and chunk.request_id is not None else None
            if live is not None and live.started is None:
                live.started, live.num_cached = step.started, chunk.start

    def token(self, request_id: str, now: float) -> None:
        self._live[request_id].token_times.append(now - self._origin)

    def committed(
        self, plan_id: int, now: float, failed: str | None = None, late: Collection[str] = frozenset(), *,
        num_right: int = 0, expert_tokens: tuple[tuple[int, ...], ...] = (),
    ) -> None:  # fmt: skip
        """The step ended at `now`. Rows of `late` requests, which had ended before it did, are recorded as dead.

        A step that never began leaves no record, but that the next one tells whom it preempted.
        """
        step = self._planned.pop(plan_id)
        plan, load = step.plan, step.load
        preempted, self._untold = self._untold + plan.preempted, ()
        if step.started is None:
            self._untold = preempted
            return
        rows = tuple(_row(chunk, is_late=chunk.request_id in late) for chunk in plan.chunks)
        self.steps.append(
            StepRecord(
                run=self.run,
                id=plan.id,
                reason=plan.reason,
                started=step.started,
                finished=now - self._origin,
                rows=rows,
                preempted=preempted,
                pages_held=load.pages_held,
                pages_total=load.pages_total,
                page_size=self._page_size,
                tokens_stored=load.tokens_stored + sum(row.num_tokens for row in rows),
                num_waiting=load.num_waiting,
                failed=failed,
                num_drafts=sum(chunk.num_drafts for chunk in plan.chunks if chunk.request_id not in late),
                num_right=num_right,
                expert_tokens=expert_tokens,
            )
        )
        self._shorten(self.steps)

    def ended(self, request_id: str, now: float, reason: FinishReason, error: str | None = None) -> RequestRecord:
        live = self._live.pop(request_id)
        record = RequestRecord(
            run=self.run,
            id=request_id,
            arrival=live.arrival,
            num_prompt=live.num_prompt,
            num_output=len(live.token_times),
            max_tokens=live.max_tokens,
            num_cached=live.num_cached,
            num_preempted=live.num_preempted,
            started=live.started,
            finished=now - self._origin,
            finish_reason=reason,
            error=error,
            token_times=tuple(live.token_times),
        )
        self.requests.append(record)
        self._shorten(self.requests)
        return record

    def _shorten(self, records: list[RequestRecord] | list[StepRecord]) -> None:
        if self._keep is not None and len(records) > self._keep:
            del records[0]
            self._num_forgotten += 1


class _LiveRequest:
    """What is known so far of a request that has not ended."""

    def __init__(self, arrival: float, num_prompt: int, max_tokens: int) -> None:
        self.arrival, self.num_prompt, self.max_tokens = arrival, num_prompt, max_tokens
        self.started: float | None = None
        self.num_cached = self.num_preempted = 0
        self.token_times: list[float] = []


class _PlannedStep:
    """What is known of a step before it ends."""

    def __init__(self, plan: StepPlan, load: Load) -> None:
        self.plan, self.load = plan, load
        self.started: float | None = None


def _row(chunk: Chunk, *, is_late: bool) -> RowRecord:
    """A late row computed what a dead row computes: nothing that anybody gets."""
    if is_late:
        return RowRecord(chunk.request_id, chunk.start, 0, chunk.num_tokens + chunk.padding, False)
    return RowRecord(chunk.request_id, chunk.start, chunk.num_tokens, chunk.padding, chunk.samples)
