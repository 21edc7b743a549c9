"""One live request in a scheduler's books: what is known of it, what was promised, what was committed."""

from collections.abc import Hashable
from typing import NamedTuple

from batchwright.policy.order import Rank
from batchwright.policy.speculation import Acceptance
from batchwright.policy.types import Dropped, Request


class Progress:
    """One live request. `length` tokens are known or promised, `done` of them computed; a step narrows the gap."""

    __slots__ = (
        "acceptance",
        "accepted",
        "arrival",
        "capacity",
        "committed",
        "done",
        "ended",
        "flushed",
        "keys",
        "last_plan",
        "length",
        "limit",
        "num_offered",
        "num_published",
        "outputs",
        "pages",
        "paused",
        "rank",
        "request",
        "reserved",
        "running",
    )

    def __init__(self, request: Request, rank: Rank, arrival: float, limit: int) -> None:
        self.request = request
        self.rank = rank
        self.arrival = arrival
        self.limit = limit  # output tokens it may get
        self.keys: list[Hashable] = list(request.keys)
        self.pages: tuple[int, ...] = ()
        self.capacity = 0  # tokens that `pages` hold
        self.reserved = 0  # pages set aside for it and not yet granted
        self.num_published = 0  # pages offered to the prefix index
        self.length = request.num_prompt
        self.done = self.committed = 0  # positions computed: promised, committed
        self.outputs = self.accepted = 0  # output tokens: promised, committed
        self.num_offered = 0  # guesses that its executor has for its next step
        self.acceptance = Acceptance()
        self.last_plan = -1
        self.running = self.ended = self.flushed = False
        self.paused = False  # takes no part in plans until its last one has landed

    def promise(self, num_tokens: int) -> bool:
        """Count `num_tokens` more positions as promised; whether their last one samples a token."""
        self.done += num_tokens
        if self.done < self.length:
            return False
        self.outputs += 1
        if self.outputs < self.limit:  # the last output is never computed
            self.length += 1
        return True

    def promise_drafts(self, num_drafts: int) -> None:
        """Count `num_drafts` guesses, which follow its last token, as if all were right, until it is known."""
        self.done += num_drafts
        self.outputs += num_drafts
        self.length += num_drafts

    @property
    def started(self) -> bool:
        """Whether any of it was ever planned."""
        return self.last_plan >= 0

    def expired(self, now: float) -> Dropped:
        """Why it is dropped at `now`: its deadline passed, or it waited too long."""
        deadline = self.request.deadline
        return Dropped(self.request.id, "deadline" if deadline is not None and deadline <= now else "queue_timeout")

    def roll_back(self) -> None:
        """Forget promises that were not kept."""
        self.num_offered = 0
        self.done, self.outputs = self.committed, self.accepted
        self.length = self.request.num_prompt + self.accepted


class Share(NamedTuple):
    """What a plan computes for one live row: `num_tokens` positions, of which the last `num_drafts` are guesses."""

    row: Progress
    num_tokens: int
    num_drafts: int = 0


Flight = dict[str, Share]
"""The shares of a plan under way, by request."""
