"""Continuous batching: every step takes whatever can run, under one token budget.

There is no prefill or decode mode: each request has `done < length` and a step narrows the gap. Decodes go
first, then prompts under way (in chunks), then new requests, in order of rank; guesses take what is left.
A request is admitted only when pages for its whole prompt can be set aside, so that prompts never take each other's
pages, and nobody ahead is computing them for it (`upcoming`). When a decode finds no page, those ranked behind it give
theirs back and are computed again later (recompute; Kwon et al., 2023, arXiv 2309.06180), in other batch shapes, so to
logits that are equal up to rounding. The first in rank always proceeds, so the pool cannot deadlock. Plan and commit
are O(rows).
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from batchwright.errors import ConfigError
from batchwright.policy.ledger import Ledger
from batchwright.policy.order import Queueing, RankedQueue
from batchwright.policy.pages import Memory
from batchwright.policy.progress import Flight, Progress, Share
from batchwright.policy.speculation import Speculation, allot
from batchwright.policy.types import Admitted, Chunk, Dropped, Load, Refused, Request, StepOutcome, StepPlan


@dataclass(frozen=True, slots=True)
class ContinuousSettings:
    """`max_rows` requests run at once; a step computes at most `token_budget` positions, `chunk_cap` for one prompt.

    vLLM calls these max_num_seqs, max_num_batched_tokens and long_prefill_token_threshold.

    `capacity`: "utilization" (TensorRT-LLM: MAX_UTILIZATION) admits when the prompt fits and preempts when outputs
    outgrow the pool; "guaranteed" (GUARANTEED_NO_EVICT) admits only what fits at its longest, and never preempts for
    memory. `watermark`: fraction of pages left free when admitting beside running requests ("utilization" only;
    default 0.01). `speculation`: rows may carry guesses that the executor offers; None: they never do.
    """

    max_rows: int = 256
    token_budget: int = 2048
    chunk_cap: int | None = None
    capacity: Literal["utilization", "guaranteed"] = "utilization"
    watermark: float | None = None
    prefix_caching: bool = True
    speculation: Speculation | None = None
    queueing: Queueing = field(default_factory=Queueing)

    def __post_init__(self) -> None:
        for name in ("max_rows", "token_budget", "chunk_cap"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"use {name}={value}", "it must be at least 1", f"raise {name}")
        if self.capacity not in ("utilization", "guaranteed"):
            raise ConfigError(
                f"use capacity={self.capacity!r}", "there is no such rule", "use utilization or guaranteed"
            )
        if self.watermark is None:
            return
        if self.capacity == "guaranteed":
            raise ConfigError("set a watermark", "capacity='guaranteed' never needs one", "leave it out")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"use watermark={self.watermark}", "it is a fraction of the pool", "use 0 to below 1")


class _Budget:
    """Positions that a step may compute: `limit`, which is `most` until a step runs out of memory.

    It then falls to half the size that failed, and grows by a sixteenth with each step that succeeds, but stays a
    sixteenth below the failed size until `PATIENCE` steps have succeeded. So a lasting shortage of memory fails one
    step in about `PATIENCE`, and a passing one is forgotten in time.
    """

    PATIENCE = 1000

    def __init__(self, most: int) -> None:
        self.limit = most
        self._most = most
        self._ceiling = most
        self._num_successes = 0  # since the last failure

    def succeed(self) -> None:
        """A step was executed."""
        if self.limit == self._most:
            return
        self._num_successes += 1
        if self._num_successes >= self.PATIENCE:
            self._ceiling = self._most
        self.limit = min(self._ceiling, self.limit + self.limit // 16 + 1)

    def fail(self, num_tokens: int, *, is_retry: bool) -> None:
        """A step of `num_tokens` ran out of memory. A retry of it lowers the limit, but not what it may grow to."""
        self.limit = max(1, min(self.limit, num_tokens // 2))
        self._num_successes = 0
        if not is_retry:
            self._ceiling = max(1, num_tokens - num_tokens // 16 - 1)


class _Outline:
    """A plan being made."""

    __slots__ = ("budget", "chunks", "flight", "guessers", "num_decodes", "plan_id")

    def __init__(self, plan_id: int, budget: int) -> None:
        self.plan_id = plan_id
        self.budget = budget  # positions left
        self.chunks: list[Chunk] = []
        self.flight: Flight = {}
        self.num_decodes = 0
        self.guessers: list[tuple[int, Progress]] = []  # rows that guesses were offered for, with their chunks' places


class Continuous:
    """The continuous batching scheduler."""

    def __init__(self, memory: Memory, settings: ContinuousSettings | None = None) -> None:
        self.settings = settings or ContinuousSettings()
        self._ledger = Ledger(memory, self.settings.queueing, prefix_caching=self.settings.prefix_caching)
        self._running: RankedQueue[Progress] = RankedQueue()
        self._reserved = 0  # pages set aside for running requests and not yet granted
        self._budget = _Budget(self.settings.token_budget)
        self._num_rows: dict[int, int] = {}  # of each plan in flight
        self._preempted: list[str] = []  # since the last plan
        self._retries: deque[list[Progress]] = deque()  # parts of failed steps
        self._is_retrying = False  # such parts run alone, and nothing else until all have
        watermark = 0.01 if self.settings.watermark is None else self.settings.watermark
        self._watermark = int(watermark * memory.num_pages) if self.settings.capacity == "utilization" else 0

    # ---- events

    def add(self, request: Request, now: float) -> Admitted | Refused:
        return self._ledger.enter(request, now)

    def abort(self, request_id: str, now: float) -> None:
        progress = self._ledger.live.get(request_id)
        if progress is not None:
            self._end(progress)

    def flush(self, now: float) -> None:
        """Nothing to do: continuous batching never waits for company."""

    def advance(self, now: float) -> tuple[Dropped, ...]:
        dropped = []
        for progress in self._ledger.expire(now):
            self._end(progress)
            dropped.append(progress.expired(now))
        return tuple(dropped)

    def commit(self, plan_id: int, now: float, outcome: StepOutcome) -> tuple[Dropped, ...]:
        num_rows = self._num_rows.pop(plan_id)
        ended, failed = self._ledger.settle(plan_id, outcome)
        for progress in ended:
            self._end(progress)
        if outcome.failed is None:
            self._budget.succeed()
        elif outcome.failed != "void":
            return self._recover(failed, outcome, is_alone=num_rows == 1)
        return ()

    def wakeup(self, now: float) -> float | None:
        return self._ledger.next_expiry()

    @property
    def memory(self) -> Memory:
        return self._ledger.memory

    @property
    def max_drafts(self) -> int:
        return self.settings.speculation.max_drafts if self.settings.speculation else 0

    @property
    def load(self) -> Load:
        return self._ledger.load(len(self._running))

    # ---- planning

    def plan(self, now: float) -> StepPlan | None:
        if self._is_retrying:
            if self._ledger.num_in_flight:
                return None
            retry = self._plan_retry()
            if retry is not None:
                return retry
            self._is_retrying = False
        self._displace()
        outline = _Outline(self._ledger.next_plan_id, self._budget.limit)
        self._continue_running(outline, list(self._running))
        self._admit_waiting(outline)
        full = outline.budget == 0 or len(self._running) == self.settings.max_rows
        self._add_drafts(outline)
        return self._launch(outline, "full" if full else "idle")

    def _plan_retry(self) -> StepPlan | None:
        """The next part of a failed step, unless all its rows have ended."""
        while self._retries:
            outline = _Outline(self._ledger.next_plan_id, self._budget.limit)
            self._continue_running(outline, self._retries.popleft())
            if outline.chunks:
                return self._launch(outline, "retry")
        return None

    def _launch(self, outline: _Outline, reason: Literal["full", "idle", "retry"]) -> StepPlan | None:
        if not outline.chunks:
            return None
        preempted, self._preempted = self._preempted, []
        plan = self._ledger.launch(reason, outline.chunks, outline.flight, preempted)
        self._num_rows[plan.id] = len(outline.chunks)
        return plan

    def _continue_running(self, outline: _Outline, rows: list[Progress]) -> None:
        """Decodes first, then prompts under way, both in order of rank."""
        plan_id, chunks, flight = outline.plan_id, outline.chunks, outline.flight
        prefills = []
        for row in rows:
            if row.length - row.done != 1:
                prefills.append(row)
                continue
            if not row.running or (row.paused and not self._try_resuming(row)):
                continue
            if not outline.budget:
                break
            num_granted = 0
            if row.done == row.capacity:
                if not self._make_room(row):
                    continue
                num_granted = self._grant(row, 1)
            outline.budget -= 1
            row.last_plan = plan_id
            if row.num_offered:
                outline.guessers.append((len(chunks), row))
            start = row.done
            request_id = row.request.id
            flight[request_id] = Share(row, 1)
            chunks.append(Chunk(request_id, start, 1, 0, row.promise(1), num_granted, row.pages))
        outline.num_decodes = len(chunks)
        for row in prefills:
            if outline.budget and row.running and row.done < row.length and self._try_resuming(row):
                self._add_chunk(outline, row)

    def _try_resuming(self, row: Progress) -> bool:
        """End the pause of `row` if its last plan has landed; whether it takes part now."""
        row.paused = row.paused and self._ledger.in_flight(row)
        return not row.paused

    def _admit_waiting(self, outline: _Outline) -> None:
        """New and preempted requests in order of rank, up to the first that does not fit.

        Those whose prefix somebody ahead is computing step out of the queue until it can be shared.
        """
        waiting = self._ledger.waiting
        while outline.budget and len(waiting) and len(self._running) < self.settings.max_rows:
            row = waiting[0]
            shared = self._ledger.find_prefix(row)
            if self._ledger.hold_back(row, len(shared)):
                continue
            if not self._fits(row, shared):
                return
            waiting.remove(row.rank)
            self._running.add(row.rank, row)
            row.running = True
            self._ledger.share(row, shared)
            row.reserved = self._goal_pages(row) - len(shared)
            self._reserved += row.reserved
            self._add_chunk(outline, row)

    def _add_chunk(self, outline: _Outline, row: Progress) -> None:
        """As much of `row` as budget and cap allow; its pages are set aside already."""
        num_tokens = min(row.length - row.done, outline.budget, self.settings.chunk_cap or outline.budget)
        num_granted = self._grant(row, num_tokens)
        outline.budget -= num_tokens
        row.last_plan = outline.plan_id
        start = row.done
        outline.flight[row.request.id] = Share(row, num_tokens)
        outline.chunks.append(
            Chunk(row.request.id, start, num_tokens, 0, row.promise(num_tokens), num_granted, row.pages)
        )

    # ---- guesses

    def _add_drafts(self, outline: _Outline) -> None:
        """Guesses for decodes where they pay, out of the budget and the pages that nobody else takes."""
        speculation = self.settings.speculation
        if speculation is None or not outline.guessers:
            return
        offers = [
            (row.acceptance.rate(row.accepted), min(row.num_offered, speculation.max_drafts, row.limit - row.outputs))
            for _, row in outline.guessers
        ]
        must_skip = self._ledger.num_in_flight > 0
        counts = allot(offers, outline.num_decodes, speculation.position_cost, must_skip=must_skip)
        for (index, row), count in zip(outline.guessers, counts, strict=True):
            num_pages = row.reserved + max(0, self._available - self._watermark)
            room = row.capacity - row.done + num_pages * self._ledger.memory.page_size
            num_drafts = min(count, room, outline.budget)
            if num_drafts:
                self._extend(outline, index, row, num_drafts)

    def _extend(self, outline: _Outline, index: int, row: Progress, num_drafts: int) -> None:
        """Let the chunk of a decode carry guesses. Its row sits out until it is known how many were right."""
        chunk = outline.chunks[index]
        num_granted = chunk.num_granted + self._grant(row, num_drafts)
        row.promise_drafts(num_drafts)
        row.paused = True
        outline.budget -= num_drafts
        outline.flight[row.request.id] = Share(row, 1 + num_drafts, num_drafts)
        outline.chunks[index] = chunk._replace(
            num_tokens=1 + num_drafts, num_granted=num_granted, pages=row.pages, num_drafts=num_drafts
        )

    # ---- pages

    @property
    def _available(self) -> int:
        """Pages free and not set aside."""
        return self._ledger.pool.num_free - self._reserved

    def _goal_pages(self, row: Progress) -> int:
        """Pages set aside at admission: what is known of it, or all that it may become."""
        longest = row.request.num_prompt + row.limit - 1
        return self._ledger.memory.pages_for(row.length if self.settings.capacity == "utilization" else longest)

    def _fits(self, row: Progress, shared: tuple[int, ...]) -> bool:
        """Whether there is a row for it, and the pages that it needs beside those it shares."""
        if len(self._running) >= self.settings.max_rows:
            return False
        pool = self._ledger.pool
        revived = sum(not pool.is_held(page) for page in shared)
        margin = self._watermark if len(self._running) else 0
        return self._goal_pages(row) - len(shared) + revived + margin <= self._available

    def _grant(self, row: Progress, num_tokens: int) -> int:
        num_granted = self._ledger.grant(row, num_tokens)
        drawn = min(num_granted, row.reserved)
        row.reserved -= drawn
        self._reserved -= drawn
        return num_granted

    def _make_room(self, row: Progress) -> bool:
        """Whether a page can be had for `row`, taking it from those ranked behind if need be."""
        while not row.reserved and self._available < 1:
            victim = self._running[-1]
            if victim is row or not self._preempt(victim):
                return False
        return True

    def _displace(self) -> None:
        """Running requests of lower priority make way for the first that waits, as many as it takes."""
        waiting, running = self._ledger.waiting, self._running
        while len(waiting) and len(running):
            row, victim = waiting[0], running[-1]
            outranked = victim.request.priority > row.request.priority and victim.rank > row.rank
            if not outranked:
                return
            shared = self._ledger.find_prefix(row)
            if self._ledger.hold_back(row, len(shared)):
                continue
            if self._fits(row, shared) or not self._preempt(victim):
                return

    def _preempt(self, victim: Progress) -> bool:
        """Take `victim` out. One with a step in flight is paused instead, and can be taken out when it has landed."""
        assert victim.last_plan != self._ledger.next_plan_id, f"{victim.request.id} is in the plan being made"
        if self._ledger.in_flight(victim):
            victim.paused = True
            return False
        self._leave(victim)
        self._ledger.requeue(victim)
        self._preempted.append(victim.request.id)
        return True

    # ---- endings

    def _leave(self, row: Progress) -> None:
        self._running.remove(row.rank)
        row.running = row.paused = False
        self._reserved -= row.reserved
        row.reserved = 0

    def _end(self, row: Progress) -> None:
        if row.running:
            self._leave(row)
        self._ledger.end(row)

    def _recover(self, failed: Flight, outcome: StepOutcome, *, is_alone: bool) -> tuple[Dropped, ...]:
        """Run a failed step again in halves, so that one bad row costs at most 2 log2(rows) extra steps.

        `is_alone`: the step had no other row, not even a late one, which is not in `failed`.
        """
        if not failed:
            return ()
        rows = [share.row for share in failed.values()]
        num_tokens = sum(share.num_tokens for share in failed.values())
        ran_out_of_memory = outcome.failed == "oom"
        if ran_out_of_memory:
            self._budget.fail(num_tokens, is_retry=self._is_retrying)
        if is_alone and (num_tokens == 1 or not ran_out_of_memory):
            self._end(rows[0])
            return (Dropped(rows[0].request.id, "out_of_memory" if ran_out_of_memory else "exception"),)
        half = (len(rows) + 1) // 2
        self._retries.extendleft(part for part in (rows[half:], rows[:half]) if part)
        self._is_retrying = True
        return ()
