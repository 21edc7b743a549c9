"""The books that every request scheduler keeps: who is live, what was promised, what is in flight, who holds pages.

*Promised* counters move when a plan is made, *committed* ones when it ends, so further plans can be made while
some run. A request ends at once, but its pages return only when the last plan that names them has committed.
Every admitted request ends exactly once, and pages held + free == total after every call.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from batchwright.policy.order import Queueing, RankedQueue
from batchwright.policy.pages import Memory, PagePool
from batchwright.policy.prefix import PrefixIndex
from batchwright.policy.progress import Flight, Progress
from batchwright.policy.types import (
    Admitted,
    Chunk,
    Load,
    Reason,
    RefusalReason,
    Refused,
    Request,
    StepOutcome,
    StepPlan,
)
from batchwright.policy.upcoming import Upcoming


class Ledger:
    """State and arithmetic shared by all schedulers; it decides nothing about batches."""

    def __init__(
        self, memory: Memory, queueing: Queueing, *, prefix_caching: bool = False, max_rows_per_request: int = 1
    ) -> None:
        self.memory = memory
        self.pool = PagePool(memory.num_pages)
        self.prefix = PrefixIndex(self.pool) if prefix_caching else None
        self.upcoming = Upcoming()  # empty without prefix caching
        self.live: dict[str, Progress] = {}
        self.waiting: RankedQueue[Progress] = RankedQueue()
        self._queueing = queueing
        self._max_rows_per_request = max_rows_per_request
        self._num_arrived = 0
        self._num_planned = 0
        self._num_stored = 0  # tokens stored, counting shared pages once per holder
        self._expiries: list[tuple[float, int, Progress, bool]] = []  # time, tie-break, who, only while waiting
        self._flights: dict[int, Flight] = {}
        self._owed: defaultdict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)  # plan -> pages, tokens

    # ---- requests

    def enter(self, request: Request, now: float) -> Admitted | Refused:
        """Queue `request`, or refuse what can never run."""
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        room = min(self.memory.context, self.memory.num_tokens) - request.num_prompt
        self._num_arrived += 1
        rank = (*self._queueing.order(request, now), self._num_arrived)
        progress = Progress(request, rank, now, min(request.max_tokens, room))
        self.live[request.id] = progress
        self.waiting.add(rank, progress)
        self._expect_expiry(progress, now)
        return Admitted(request.id, progress.limit)

    def end(self, progress: Progress) -> None:
        """`progress` takes no further part; its pages return once no plan in flight names them."""
        progress.ended = True
        if progress.rank in self.waiting:
            self.waiting.remove(progress.rank)
        self.upcoming.let_go(progress)
        del self.live[progress.request.id]
        self.return_pages(progress)

    def expire(self, now: float) -> Iterator[Progress]:
        """The requests whose time has run out; the caller ends each before it asks for the next."""
        while self._expiries and self._expiries[0][0] <= now:
            _, _, progress, only_waiting = heappop(self._expiries)
            if progress.ended or (only_waiting and progress.started):
                continue
            if only_waiting and self._queueing.on_timeout == "delay":
                self._move_back(progress)
            else:
                yield progress

    def next_expiry(self) -> float | None:
        """When `expire` next has something to do."""
        while self._expiries:
            time, _, progress, only_waiting = self._expiries[0]
            if not (progress.ended or (only_waiting and progress.started)):
                return time
            heappop(self._expiries)
        return None

    def flush(self) -> None:
        """Mark all that wait as not waiting for company."""
        for progress in self.waiting:
            progress.flushed = True

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + self.upcoming.num_held

    # ---- pages

    def grant(self, progress: Progress, num_tokens: int) -> int:
        """Give `progress` the pages for its next `num_tokens`; returns how many are new."""
        missing = self.memory.pages_for(progress.done + num_tokens) - len(progress.pages)
        if missing <= 0:
            return 0
        progress.pages += self.pool.take(missing)
        progress.capacity = len(progress.pages) * self.memory.page_size
        return missing

    def find_prefix(self, progress: Progress) -> tuple[int, ...]:
        """Known pages of its prefix; at least its last token is left to compute."""
        if self.prefix is None:
            return ()
        return self.prefix.match(progress.keys[: (progress.length - 1) // self.memory.page_size])

    def hold_back(self, progress: Progress, num_found: int) -> bool:
        """Whether somebody ahead computes more of its prefix than the `num_found` pages found.

        It then leaves the queue until that is there, or until whoever computes it has left.
        """
        num_useful = min(len(progress.keys), (progress.length - 1) // self.memory.page_size)
        if not self.upcoming.hold_back(progress, num_found, num_useful):
            return False
        self.waiting.remove(progress.rank)
        return True

    def share(self, progress: Progress, pages: tuple[int, ...]) -> None:
        """Start `progress` with `pages` that are computed already."""
        self.pool.hold(pages)
        progress.pages = pages
        progress.num_published = len(pages)
        progress.capacity = progress.done = progress.committed = len(pages) * self.memory.page_size
        self._num_stored += progress.committed
        if self.prefix is not None:
            self.upcoming.begin(progress)

    def return_pages(self, progress: Progress) -> None:
        """Take its pages back, now or when its last plan commits; what they stored is lost to it."""
        if progress.pages:
            self._queue(self.upcoming.leave(progress))
        owed = progress.pages, progress.committed
        if self.in_flight(progress):
            self._owed[progress.last_plan].append(owed)
        else:
            self._give_back(*owed)
        progress.pages = ()
        progress.capacity = progress.num_published = progress.committed = 0

    def requeue(self, progress: Progress) -> None:
        """Back to the queue, at its old place, to be computed again, but for what the prefix index still finds."""
        assert not self.in_flight(progress)
        self.return_pages(progress)
        progress.roll_back()
        self.waiting.add(progress.rank, progress)

    # ---- plans

    @property
    def next_plan_id(self) -> int:
        return self._num_planned

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def in_flight(self, progress: Progress) -> bool:
        return progress.last_plan in self._flights

    def launch(
        self, reason: Reason, chunks: Iterable[Chunk], flight: Flight, preempted: Iterable[str] = ()
    ) -> StepPlan:
        """Make the plan. The caller has set `last_plan` of every row that computes something in it."""
        plan = StepPlan(self._num_planned, reason, tuple(chunks), tuple(preempted))
        self._flights[plan.id] = flight
        self._num_planned += 1
        return plan

    def settle(self, plan_id: int, outcome: StepOutcome) -> tuple[list[Progress], Flight]:
        """Commit a plan; returns the rows that finished or erred, which the caller ends, and a failed plan's rows.

        A late row, whose request ended meanwhile, is thrown away. Rows of a failed plan lose their promises in
        every plan that is still in flight.
        """
        flight = self._flights.pop(plan_id)
        ended: list[Progress] = []
        failed: Flight = {}
        if outcome.failed:
            failed = {request_id: share for request_id, share in flight.items() if not share.row.ended}
            for request_id, share in failed.items():
                share.row.roll_back()
                for other in self._flights.values():
                    other.pop(request_id, None)
        else:
            ended = self._accept(flight, outcome)
        for pages, num_tokens in self._owed.pop(plan_id, ()):
            self._give_back(pages, num_tokens)
        return ended, failed

    def load(self, num_running: int) -> Load:
        return Load(
            num_waiting=self.num_waiting,
            num_running=num_running,
            pages_held=self.pool.num_held,
            pages_total=self.pool.num_pages,
            tokens_stored=self._num_stored - self.pool.num_shares * self.memory.page_size,
            num_in_flight=len(self._flights),
        )

    # ---- details

    def _accept(self, flight: Flight, outcome: StepOutcome) -> list[Progress]:
        ended = []
        for item in outcome.items:
            share = flight.get(item.request_id)
            if share is None or share.row.ended:
                continue
            progress, num_tokens, num_drafts = share
            assert item.num_accepted <= 1 + num_drafts, f"{item} gained more than {share} could bring"
            progress.accepted += item.num_accepted
            assert item.finished or item.error or progress.accepted < progress.limit, f"{item} must be finished"
            if num_drafts:
                num_right = max(0, item.num_accepted - 1)
                num_tokens -= num_drafts - num_right
                progress.acceptance.learn(num_drafts, num_right, progress.accepted)
            progress.committed += num_tokens
            if num_drafts:
                progress.roll_back()  # no later plan has it: what was not kept is promised no more
            progress.num_offered = item.num_drafts
            self._num_stored += num_tokens
            if item.keys:
                progress.keys.extend(item.keys)
            if item.error:
                self._withdraw(progress)
            elif self.prefix is not None and progress.num_published < len(progress.keys):
                self._publish(progress)
            if item.finished or item.error:
                ended.append(progress)
        return ended

    def _publish(self, progress: Progress) -> None:
        assert self.prefix is not None
        full = min(progress.committed // self.memory.page_size, len(progress.keys))
        for index in range(progress.num_published, full):
            self.prefix.publish(progress.keys[index], progress.pages[index])
            self._queue(self.upcoming.published(progress.keys[index]))
        progress.num_published = full

    def _withdraw(self, progress: Progress) -> None:
        """Nobody else may find the pages of a request that erred: any of them may hold numbers that are not finite."""
        if self.prefix is not None:
            self.prefix.withdraw(progress.pages)

    def _queue(self, rows: Iterable[Progress]) -> None:
        """Back to the queue: what they waited for is there, or comes no more."""
        for progress in rows:
            self.waiting.add(progress.rank, progress)

    def _give_back(self, pages: tuple[int, ...], num_tokens: int) -> None:
        self.pool.release(pages)
        self._num_stored -= num_tokens

    def _expect_expiry(self, progress: Progress, now: float) -> None:
        if len(self._expiries) > _MOST_STALE + 4 * len(self.live):  # two entries a live request, and as many stale ones
            self._expiries = [entry for entry in self._expiries if not entry[2].ended]
            heapify(self._expiries)
        request = progress.request
        waits = [wait for wait in (request.queue_timeout, self._queueing.timeout) if wait is not None]
        if waits:
            heappush(self._expiries, (now + min(waits), 2 * self._num_arrived, progress, True))
        if request.deadline is not None:
            heappush(self._expiries, (request.deadline, 2 * self._num_arrived + 1, progress, False))

    def _move_back(self, progress: Progress) -> None:
        is_queued = progress.rank in self.waiting  # not held back
        if is_queued:
            self.waiting.remove(progress.rank)
        level, _, arrived = progress.rank
        progress.rank = level, float("inf"), arrived
        if is_queued:
            self.waiting.add(progress.rank, progress)

    def _refusal(self, request: Request) -> Refused | None:
        """Why `request` can never run, or not now."""
        memory, most_rows = self.memory, self._max_rows_per_request
        lengths = f"run a prompt of {request.num_prompt} tokens for at most {request.max_tokens} more"
        needed = request.num_prompt + 1

        def refused(reason: RefusalReason, asked: str, fact: str, remedy: str) -> Refused:
            return Refused(request.id, reason, asked, fact, remedy)

        if request.id in self.live:
            return refused("invalid", f"add request {request.id!r}", "that id is live", "use another id")
        if request.num_prompt < 1 or request.max_tokens < 1:
            return refused("invalid", lengths, "both must be at least 1", "give a prompt, and raise max_tokens")
        if not all(
            _is_sane(number) for number in (request.priority, request.deadline or 0, request.queue_timeout or 0)
        ):
            fact = f"priority={request.priority!r:.40}, deadline and queue_timeout must be numbers below {_LARGEST:g}"
            return refused("invalid", lengths, fact, "correct them")
        if not 1 <= request.num_rows <= most_rows:
            asked = f"run {request.num_rows} rows in one request"
            return refused("invalid", asked, f"a request may have 1 to {most_rows} here", "send several requests")
        if needed > memory.context:
            fact = f"with one output token it needs a context of {needed}, the limit is {memory.context}"
            return refused("too_long", lengths, fact, "shorten the prompt")
        if needed > memory.num_tokens:
            pages = f"{memory.pages_for(needed)} pages of {memory.page_size}"
            fact = f"with one output token it needs {pages}, the pool has {memory.num_pages}"
            return refused("too_long", lengths, fact, "shorten the prompt or raise num_pages")
        if self._queueing.max_requests is not None and self.num_waiting >= self._queueing.max_requests:
            fact = f"{self.num_waiting} wait, which is the limit"
            return refused("queue_full", "queue one more request", fact, "try again later")
        return None


_MOST_STALE = 100
"""Expiries of ended requests that are kept before they are looked through."""

_LARGEST = 1e15
"""Of what is compared, or added up, as a float: priorities and times."""


def _is_sane(number: object) -> bool:
    return isinstance(number, int | float) and abs(number) < _LARGEST
