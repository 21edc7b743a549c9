"""Prompts that arrive together are computed once: who may wait for whose pages, and what that costs."""

import pytest

from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.order import Queueing, by_strict_priority
from batchwright.policy.pages import Memory
from batchwright.policy.types import Request
from tests.policy.driver import Drive

PAGE_SIZE = 4
ROOMY = Memory(num_pages=400, page_size=PAGE_SIZE, context=200)


def sharing(memory: Memory = ROOMY, **settings) -> Drive:
    return Drive(Continuous(memory, ContinuousSettings(**settings)), memory, guesses=lambda *_: ())


def prompt(request_id: str, num_prompt: int, *own: object, num_output: int = 3, priority: int = 0) -> Request:
    """Its pages are everybody's, but for the last ones, which have the keys `own`."""
    num_keys = num_prompt // PAGE_SIZE
    keys = (*range(num_keys - len(own)), *own)
    return Request(request_id, num_prompt, num_output, priority=priority, keys=keys)


def starts(drive: Drive) -> dict[str, int]:
    """Where each request's first chunk begins."""
    first: dict[str, int] = {}
    for plan in drive.plans:
        for chunk in plan.chunks:
            first.setdefault(chunk.request_id, chunk.start)
    return first


# ---- computed once


@pytest.mark.parametrize("num_requests", [2, 7, 40])
@pytest.mark.parametrize("chunk_cap", [None, 4, 7])
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_every_full_page_of_equal_prompts_is_computed_once(
    num_requests: int, chunk_cap: int, max_in_flight: int
) -> None:
    """23 tokens: five full pages, computed by the first, and a rest of 3, computed by everyone."""
    drive = sharing(chunk_cap=chunk_cap, token_budget=64)
    for index in range(num_requests):
        drive.add(prompt(str(index), 23))
    plans = drive.run(max_in_flight)
    assert sum(chunk.num_tokens for plan in plans for chunk in plan.chunks) == 20 + num_requests * (3 + 2)
    assert starts(drive) == {str(index): 20 if index else 0 for index in range(num_requests)}
    assert set(drive.ended.values()) == {"finished"}


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_who_shares_a_part_waits_for_that_part_only(max_in_flight: int) -> None:
    """b has two pages in common with a, whose prompt takes twelve steps: it enters when those two are there."""
    drive = sharing(chunk_cap=4)
    drive.add(prompt("a", 48, num_output=1))
    drive.add(Request("b", 16, 1, keys=(0, 1, "mine", "too")))
    plans = drive.run(max_in_flight)
    assert starts(drive)["b"] == 8
    assert next(index for index, plan in enumerate(plans) if len(plan.chunks) == 2) == 1 + max_in_flight


def test_a_tree_of_prompts_is_computed_node_by_node() -> None:
    """Two pages of all, two of each half, one of each request's own: 2 + 2 * 2 + 4 pages, and a rest of 1 each."""
    drive = sharing()
    for index in range(4):
        half = index // 2
        drive.add(Request(str(index), 21, 1, keys=(0, 1, ("half", half, 2), ("half", half, 3), ("own", index))))
    plans = drive.run()
    assert sum(plan.num_tokens for plan in plans) == 4 * (2 + 2 * 2 + 4) + 4
    assert starts(drive) == {"0": 0, "1": 16, "2": 8, "3": 16}


def test_those_behind_do_not_wait_with_who_is_held_back() -> None:
    """b waits for a's pages; c, which came last, has nothing to share and enters at once."""
    drive = sharing()
    drive.add(prompt("a", 20))
    drive.add(prompt("b", 20))
    drive.add(Request("c", 20, 3))
    assert [chunk.request_id for chunk in drive.step().chunks] == ["a", "c"]
    assert [chunk.request_id for chunk in drive.step().chunks] == ["a", "c", "b"]


def test_without_prefix_caching_nobody_waits() -> None:
    """There would be nothing to find."""
    drive = sharing(prefix_caching=False)
    for name in "ab":
        drive.add(prompt(name, 20))
    assert [chunk.request_id for chunk in drive.step().chunks] == ["a", "b"]


def test_a_prompt_within_one_page_waits_for_nobody() -> None:
    """Its last token is computed by itself in any case, and that is in its only page."""
    drive = sharing()
    for name in "ab":
        drive.add(prompt(name, 4))
    assert [chunk.start for chunk in drive.step().chunks] == [0, 0]


# ---- nobody waits for one who does not get on


@pytest.mark.parametrize("how", ["abort", "error", "deadline", "exception"])
def test_when_whoever_computes_it_ends_the_next_computes_it(how: str) -> None:
    """a leaves half-way: b goes on from the pages that are good, and c waits for b."""
    drive = sharing(chunk_cap=8)
    drive.add(Request("a", 24, 2, deadline=5.0 if how == "deadline" else None, keys=tuple(range(6))))
    for name in "bc":
        drive.add(prompt(name, 24))
    drive.step()
    if how == "abort":
        drive.abort("a")
    elif how == "error":
        drive.executor.errors = {"a"}
    elif how == "exception":
        drive.executor.poison = {"a"}
    else:
        drive.wait(5.0)
    drive.run()
    assert drive.ended.pop("a") != "finished"
    assert drive.ended == {"b": "finished", "c": "finished"}
    assert starts(drive) == {"a": 0, "b": 0 if how == "error" else 8, "c": 20}


def test_who_is_held_back_may_leave() -> None:
    """Aborted or too late while it waits: it has ended, and a finishes as if nothing had been."""
    drive = sharing(chunk_cap=4)
    drive.add(prompt("a", 24))
    drive.add(prompt("b", 24))
    drive.add(Request("c", 24, 3, queue_timeout=1.0, keys=tuple(range(6))))
    drive.step()
    assert drive.scheduler.load.num_waiting == 2
    drive.abort("b")
    drive.wait(1.0)
    drive.run()
    assert drive.ended == {"b": "aborted", "c": "queue_timeout", "a": "finished"}


def test_who_times_out_while_held_back_goes_behind_the_others() -> None:
    """b's wait of 1 s ends while a computes what it wants; d, which came later, is ahead of it now."""
    drive = sharing(chunk_cap=4, max_rows=3, queueing=Queueing(timeout=1.0, on_timeout="delay"))
    drive.add(Request("long", 4, 9))
    drive.add(prompt("a", 24, num_output=1))
    drive.add(prompt("b", 24))
    drive.step()
    drive.wait(1.0)
    drive.add(Request("d", 4, 1))
    drive.run()
    assert list(starts(drive)) == ["long", "a", "d", "b"]
    assert starts(drive)["b"] == 20


def test_those_held_back_count_as_waiting_where_the_queue_is_limited() -> None:
    """Two may wait; that they wait for a's pages makes no room for a third."""
    drive = sharing(chunk_cap=4, queueing=Queueing(max_requests=2))
    drive.add(prompt("a", 24))
    drive.step()
    for name in "bcd":
        drive.add(prompt(name, 24))
        drive.step()
    assert drive.ended == {"d": "refused"}


# ---- priorities


def test_the_important_do_not_wait_for_the_unimportant() -> None:
    """One who ranks behind may be kept from getting on, so nobody waits for it: b computes the pages once more."""
    drive = sharing(chunk_cap=4, queueing=Queueing(order=by_strict_priority))
    drive.add(prompt("a", 24, priority=1))
    drive.step()
    drive.add(prompt("b", 24, priority=0))
    drive.step()
    drive.add(prompt("c", 24, priority=2))
    drive.run()
    assert starts(drive) == {"a": 0, "b": 4, "c": 20}


def test_of_two_who_compute_the_same_the_one_ahead_is_waited_for() -> None:
    """b outranks a, and computes its pages once more; a leaves, and c still waits for b."""
    drive = sharing(chunk_cap=4, queueing=Queueing(order=by_strict_priority))
    drive.add(prompt("a", 24, priority=1))
    drive.step()
    drive.add(prompt("b", 24, priority=0))
    drive.step()
    drive.abort("a")
    drive.add(prompt("c", 24, priority=2))
    drive.run()
    assert starts(drive) == {"a": 0, "b": 4, "c": 20}


def test_who_is_held_back_displaces_nobody() -> None:
    """b outranks the one with a low priority, but would only wait in its row: it gets it when it can use it."""
    drive = sharing(chunk_cap=8, max_rows=2, queueing=Queueing(order=by_strict_priority))
    drive.add(prompt("a", 24))
    drive.add(Request("low", 4, 20, priority=5))
    drive.step()
    drive.add(prompt("b", 24))
    plans = drive.run()
    assert [plan.preempted for plan in plans[:3]] == [(), (), ("low",)]
    assert list(drive.ended)[-1] == "low"
    assert starts(drive)["b"] == 20
