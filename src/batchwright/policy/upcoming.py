"""Pages under way: who computes which prefix page right now, and who waits for it rather than compute it too.

A request waits only for one that runs and ranks ahead of it, which gets on whenever it could itself. It waits at once
for all that the two share, and is free when the last of that is published, or when whoever computes it has left: nobody
waits for one who does not run. Keys are chained, so what two requests share is a prefix of both, found by bisection.
Costs O(1) per key of a prompt, and O(log keys) per request held back.
"""

from bisect import bisect_left
from collections.abc import Hashable, Iterable

from batchwright.policy.progress import Progress


class Upcoming:
    """The keys of pages that running requests are about to publish."""

    def __init__(self) -> None:
        self._computed_by: dict[Hashable, Progress] = {}
        self._held: dict[Hashable, dict[str, Progress]] = {}  # who waits for a key
        self._awaited: dict[str, Hashable] = {}  # what a request waits for

    @property
    def num_held(self) -> int:
        return len(self._awaited)

    def begin(self, row: Progress) -> None:
        """`row` is about to compute, and then to publish, all its keys but those that it was given."""
        for key in row.keys[row.num_published :]:
            self._computed_by[key] = row

    def hold_back(self, row: Progress, num_found: int, num_useful: int) -> bool:
        """Whether `row` is to wait. It finds pages for its first `num_found` keys, and has a use for `num_useful`."""
        if num_found >= num_useful:
            return False
        ahead = self._computed_by.get(row.keys[num_found])
        if ahead is None or ahead.rank > row.rank:
            return False
        most = range(min(num_useful, len(ahead.keys)))
        num_shared = bisect_left(most, True, num_found + 1, key=lambda index: row.keys[index] != ahead.keys[index])
        key = row.keys[num_shared - 1]
        self._held.setdefault(key, {})[row.request.id] = row
        self._awaited[row.request.id] = key
        return True

    def published(self, key: Hashable) -> Iterable[Progress]:
        """The page of `key` is there; returns those who waited for it."""
        self._computed_by.pop(key, None)
        return self._free(key)

    def leave(self, row: Progress) -> list[Progress]:
        """`row` runs no more; returns those who waited for what it had still to publish."""
        freed: list[Progress] = []
        for key in row.keys[row.num_published :]:
            if self._computed_by.get(key) is row:
                del self._computed_by[key]
            freed += self._free(key)
        return freed

    def let_go(self, row: Progress) -> None:
        """`row` has ended; if it was held back, it waits no more."""
        if row.request.id in self._awaited:
            del self._held[self._awaited.pop(row.request.id)][row.request.id]

    def _free(self, key: Hashable) -> Iterable[Progress]:
        freed = self._held.pop(key, {})
        for request_id in freed:
            del self._awaited[request_id]
        return freed.values()
