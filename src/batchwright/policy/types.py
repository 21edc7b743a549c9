"""The words between a scheduler and whoever drives it: requests in, plans out, outcomes back.

A scheduler sees lengths and opaque block keys, never token ids and never a true output length. Everything
here is immutable and serialisable, so a log of plans can be replayed and compared. `Chunk` and `ItemOutcome`
are NamedTuples instead of frozen dataclasses because a step makes one per row, and a NamedTuple is built four
times faster (decision 0002).
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from batchwright.policy.pages import Memory

Reason = Literal["full", "preferred", "deadline", "idle", "flush", "next", "retry"]
"""Why a plan was released: rows or token budget full; a preferred size was reached; the oldest request waited
long enough; the machine was idle; nothing more is coming; the next step of a batch under way; a failed step
is being run again in parts."""

DropReason = Literal["deadline", "queue_timeout", "out_of_memory", "exception"]
RefusalReason = Literal["too_long", "queue_full", "invalid"]

Failure = Literal["oom", "exception", "void"]
"""How a step fails as a whole: it ran out of memory, something was raised, or it was not run to its end for a reason
that has nothing to do with its rows (the step before it failed, somebody pressed Ctrl-C)."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a policy may know of a request. Lengths are tokens, times are seconds on the caller's clock.

    `priority`: lower is more important. `deadline`: absolute time after which it is dropped, waiting or running.
    `queue_timeout`: seconds it may wait for its first step. `num_rows`: rows it occupies (never split).
    `keys`: one opaque key per full page of the prompt; equal keys mean equal tokens up to that page's end.
    """

    id: str
    num_prompt: int
    max_tokens: int
    priority: int = 0
    deadline: float | None = None
    queue_timeout: float | None = None
    num_rows: int = 1
    keys: tuple[Hashable, ...] = ()


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request is queued; it will get at most `max_tokens`, which may be fewer than it asked for."""

    request_id: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The request is not queued: what can never fit is refused on arrival; the three parts carry the numbers."""

    request_id: str
    reason: RefusalReason
    asked: str
    fact: str
    remedy: str

    @property
    def message(self) -> str:
        return f"{self.asked}: {self.fact}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class Dropped:
    """The scheduler gave up on a request it had admitted."""

    request_id: str
    reason: DropReason


class Chunk(NamedTuple):
    """One row's share of a step: compute positions `start .. start + num_tokens`, then `padding` dummy positions.

    `pages` is the row's whole page table, of which the last `num_granted` are new in this plan. `samples`: the
    row's last known token is in this chunk, so one token is sampled. `num_tokens == 0` is a dead row: its
    request ended (or never was: `request_id` None) and the batch still executes it.

    `num_drafts`: the last so many of `num_tokens` are guesses of the tokens that follow the row's last known one, which
    is the first of the chunk. The chunk then samples after each of its positions, and is right about a guess where it
    samples that very token before it. Keys and values of refused guesses lie beyond what counts, and are overwritten.
    An executor that has fewer guesses by now than it offered may feed any token instead.
    """

    request_id: str | None
    start: int
    num_tokens: int
    padding: int
    samples: bool
    num_granted: int
    pages: tuple[int, ...]
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to run next. `preempted`: requests whose pages were taken back; they will be computed again."""

    id: int
    reason: Reason
    chunks: tuple[Chunk, ...]
    preempted: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Useful positions computed by this step."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def padding(self) -> int:
        """Dummy positions in rows that also compute something."""
        return sum(chunk.padding for chunk in self.chunks if chunk.num_tokens)

    @property
    def dead_rows(self) -> int:
        """Rows executed for no request."""
        return sum(1 for chunk in self.chunks if not chunk.num_tokens)


class ItemOutcome(NamedTuple):
    """What happened to one row of a step.

    `num_accepted`: tokens the row gained: 1 where it sampled, and as many more as its chunk's guesses were right before
    the first that was wrong; fewer if it finished before. `keys`: the opaque keys of the pages that those tokens
    completed, in order. `error` ends the request, and no other will share its pages. `num_drafts`: guesses that the
    executor has for the row's next step.
    """

    request_id: str
    num_accepted: int = 0
    finished: bool = False
    error: bool = False
    keys: tuple[Hashable, ...] = ()
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """How a step ended: per live row, or as a whole (`failed`), in which case nothing of it counts.

    The rows of a void step are planned again as if it had not been; the pages that it granted stay granted, and whom
    it preempted stays preempted.
    """

    items: tuple[ItemOutcome, ...] = ()
    failed: Failure | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """A scheduler's state in six numbers; a page shared by several requests is held, and stored, once."""

    num_waiting: int
    num_running: int
    pages_held: int
    pages_total: int
    tokens_stored: int
    num_in_flight: int


class Scheduler(Protocol):
    """Events in, plans out. `now` never decreases. No clock, randomness, threads or tensors inside.

    Plans that share a request are committed in the order they were made; any number may be in flight.
    """

    def add(self, request: Request, now: float) -> Admitted | Refused:
        """A request arrived. Ids must be new among live requests."""
        ...

    def abort(self, request_id: str, now: float) -> None:
        """Its client left. Unknown or ended ids are ignored; legal while a step runs."""
        ...

    def flush(self, now: float) -> None:
        """Nothing more is expected: what is queued now need not wait for company."""
        ...

    def advance(self, now: float) -> tuple[Dropped, ...]:
        """Time passed: expired requests are dropped; legal while a step runs."""
        ...

    def plan(self, now: float) -> StepPlan | None:
        """What to run next, or None: nothing to do, waiting for company, or for a step in flight."""
        ...

    def commit(self, plan_id: int, now: float, outcome: StepOutcome) -> tuple[Dropped, ...]:
        """A step ended, or is not run. Returns the requests given up because their steps kept failing.

        Rows of a failed step that are in later plans too lose those promises as well. Where such a plan has not
        been started, it is best committed as void.
        """
        ...

    def wakeup(self, now: float) -> float | None:
        """When to ask again though nothing happens: a delay or a timeout runs out."""
        ...

    @property
    def memory(self) -> Memory:
        """The pages it plans for."""
        ...

    @property
    def max_drafts(self) -> int:
        """The most guesses that it may ever plan for a row; 0: it never speculates, and offers are ignored."""
        ...

    @property
    def load(self) -> Load:
        """Queue, rows and pages right now."""
        ...
