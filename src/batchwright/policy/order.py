"""Who is first: ranks as pure functions of a request and its arrival, and a queue sorted by them.

A rank never changes while a request waits, although priorities age: with `a` seconds of waiting worth one
level, "level p since t" outranks "level q since u" iff t + a*p < u + a*q, at every moment. So ageing is a
constant added to the arrival time, no request waits for ever, and a preempted request finds its old place.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

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
