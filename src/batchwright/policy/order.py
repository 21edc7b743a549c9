"""How requests wait: ranks as pure functions of a request and its arrival, and a queue sorted by them.

A rank never changes while a request waits, although priorities age: with `a` seconds of waiting worth one
level, "level p since t" outranks "level q since u" iff t + a*p < u + a*q, at every moment. So ageing is a
constant added to the arrival time, no request waits for ever, and a preempted request finds its old place.
Two choices give this up: strict priorities, and delaying what timed out.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from batchwright.errors import ConfigError
from batchwright.policy.types import Request

Rank = tuple[int, float, int]
"""Lower is first: strict level, then aged arrival time, then the order of arrival."""

RankRule = Callable[[Request, float], tuple[int, float]]
Item = TypeVar("Item")


def by_arrival(request: Request, arrival: float) -> tuple[int, float]:
    """First come, first served; priorities are ignored."""
    return 0, arrival


def by_strict_priority(request: Request, arrival: float) -> tuple[int, float]:
    """Lower priority numbers first, always: a low-priority request can wait for ever."""
    return request.priority, arrival


def by_aged_priority(seconds_per_level: float) -> RankRule:
    """Lower priority numbers first, but `seconds_per_level` of waiting make up for one level."""
    if not seconds_per_level > 0:
        raise ConfigError(
            f"age priorities at {seconds_per_level} s per level",
            "it must be above 0",
            "use by_strict_priority for none",
        )

    def rank(request: Request, arrival: float) -> tuple[int, float]:
        return 0, arrival + seconds_per_level * request.priority

    return rank


@dataclass(frozen=True, slots=True)
class Queueing:
    """How requests wait: `order` ranks them, `max_requests` bounds the queue, `timeout` (s) bounds the wait.

    `on_timeout` "reject" drops a request that waited too long. "delay" moves it behind all requests of its strict
    level that have not timed out, later arrivals included: under sustained load it can wait for ever.
    """

    order: RankRule = field(default_factory=lambda: by_aged_priority(10.0))
    max_requests: int | None = None
    timeout: float | None = None
    on_timeout: Literal["reject", "delay"] = "reject"

    def __post_init__(self) -> None:
        if self.max_requests is not None and self.max_requests < 1:
            raise ConfigError(f"queue at most {self.max_requests} requests", "none could be served", "use at least 1")
        if self.timeout is not None and not self.timeout >= 0:
            raise ConfigError(f"time out after {self.timeout} s", "it must not be negative", "use 0 or more, or None")
        if self.on_timeout not in ("reject", "delay"):
            raise ConfigError(f"use on_timeout={self.on_timeout!r}", "there is no such rule", "use reject or delay")


class RankedQueue(Generic[Item]):
    """Items in order of rank. Adding and removing take O(log n) comparisons."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._items: list[Item] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __getitem__(self, index: int) -> Item:
        return self._items[index]

    def add(self, rank: Rank, item: Item) -> None:
        """Ranks are unique: they end in the order of arrival."""
        index = bisect_left(self._ranks, rank)
        self._ranks.insert(index, rank)
        self._items.insert(index, item)

    def remove(self, rank: Rank) -> Item:
        """Take out the item of `rank`, which is in the queue."""
        index = bisect_left(self._ranks, rank)
        assert self._ranks[index] == rank
        del self._ranks[index]
        return self._items.pop(index)

    def __contains__(self, rank: Rank) -> bool:
        index = bisect_left(self._ranks, rank)
        return index < len(self._ranks) and self._ranks[index] == rank
