"""Laws of ranks and of the queue that is sorted by them."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from batchwright.errors import ConfigError
from batchwright.policy.order import RankedQueue, by_aged_priority, by_arrival, by_strict_priority
from batchwright.policy.types import Request

RANKS = st.tuples(st.integers(0, 3), st.sampled_from((0.0, 0.5, 1.0, float("inf"))), st.integers(0, 1000))
WHO = st.tuples(st.integers(-3, 3), st.integers(0, 100))  # priority, arrival


@given(st.lists(RANKS, unique_by=lambda rank: rank[2]), st.randoms())
def test_a_queue_is_sorted_whatever_comes_and_goes(ranks: list, rng) -> None:
    """Iteration, indexing, length and membership all agree with a plain sorted list."""
    queue: RankedQueue[tuple] = RankedQueue()
    present: list[tuple] = []
    for rank in ranks:
        queue.add(rank, rank)
        present.append(rank)
        if rng.random() < 0.3:
            gone = present.pop(rng.randrange(len(present)))
            assert queue.remove(gone) == gone
            assert gone not in queue
        present.sort()
        assert list(queue) == present
        assert len(queue) == len(present)
        assert all(rank in queue for rank in present)
        assert [queue[index] for index in range(len(present))] == present


@given(WHO, WHO, st.integers(0, 500), st.sampled_from((0.5, 1.0, 10.0)))
def test_ageing_is_a_constant(first: tuple, second: tuple, later: int, seconds_per_level: float) -> None:
    """Who is ahead by level minus time waited, now or at any later moment, is ahead by the rank that never changes."""
    order = by_aged_priority(seconds_per_level)
    now = 100 + later

    def aged(who: tuple) -> float:
        priority, arrival = who
        return seconds_per_level * priority - (now - arrival)

    ranks = [order(Request("r", 1, 1, priority), arrival) for priority, arrival in (first, second)]
    assert (ranks[0] < ranks[1]) == (aged(first) < aged(second))


@given(WHO, WHO)
def test_strict_order_is_by_level_then_by_arrival(first: tuple, second: tuple) -> None:
    """However long one has waited."""
    ranks = [by_strict_priority(Request("r", 1, 1, priority), arrival) for priority, arrival in (first, second)]
    assert (ranks[0] < ranks[1]) == (first < second)


@given(WHO, WHO)
def test_order_of_arrival_knows_no_priorities(first: tuple, second: tuple) -> None:
    """First come, first served."""
    ranks = [by_arrival(Request("r", 1, 1, priority), arrival) for priority, arrival in (first, second)]
    assert (ranks[0] < ranks[1]) == (first[1] < second[1])


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_ageing_needs_time(seconds: float) -> None:
    """No ageing has a name of its own."""
    with pytest.raises(ConfigError, match="by_strict_priority"):
        by_aged_priority(seconds)
