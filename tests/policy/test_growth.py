"""What plan and commit cost, in lines executed: proportional to the running requests, whatever the machine."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.pages import Memory
from batchwright.policy.speculation import Speculation
from batchwright.policy.static import static
from batchwright.policy.types import ItemOutcome, Request, Scheduler, StepOutcome, StepPlan

POLICY = str(Path("batchwright", "policy"))
PAGE_SIZE = 16
MEMORY = Memory(num_pages=60_000, page_size=PAGE_SIZE, context=4096)


def decoding(scheduler: Scheduler, num_running: int) -> Scheduler:
    """A scheduler in the middle of `num_running` answers, whose prompts were as many tokens modulo a page."""
    for index in range(num_running):
        scheduler.add(Request(str(index), PAGE_SIZE + index % PAGE_SIZE, 500), 0.0)
    step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    scheduler.commit(plan.id, 0.0, outcome(plan))
    return plan


def outcome(plan: StepPlan, *, finished: bool = False) -> StepOutcome:
    """Every guess is wrong, and four more are offered. `finished`: the first token of every answer is its last."""
    return StepOutcome(
        tuple(
            ItemOutcome(chunk.request_id, int(chunk.samples), finished and chunk.samples, num_drafts=4)
            for chunk in plan.chunks
        )
    )


def lines_executed(scheduler: Scheduler, num_running: int, num_steps: int = PAGE_SIZE) -> int:
    """By the policy alone, over steps in which every request takes one new page."""
    count = 0
    for _ in range(num_steps):
        plan, num_lines = counted_step(scheduler)
        assert len(plan.chunks) == num_running
        count += num_lines
    return count


def counted_step(scheduler: Scheduler, *, finished: bool = False) -> tuple[StepPlan, int]:
    """A step, and the lines of its plan and commit."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if POLICY not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        plan = scheduler.plan(0.0)
    finally:
        sys.settrace(before)
    result = outcome(plan, finished=finished)
    sys.settrace(trace)
    try:
        scheduler.commit(plan.id, 0.0, result)
    finally:
        sys.settrace(before)
    return plan, count


SCHEDULERS = {
    **{
        f"continuous, {capacity}, prefix caching {caching}": (
            lambda num, capacity=capacity, caching=caching: Continuous(
                MEMORY,
                ContinuousSettings(
                    max_rows=num, token_budget=10**6, capacity=capacity, prefix_caching=caching, watermark=None
                ),
            )
        )
        for capacity in ("utilization", "guaranteed")
        for caching in (True, False)
    },
    "continuous, speculating": lambda num: Continuous(
        MEMORY, ContinuousSettings(max_rows=num, token_budget=10**6, speculation=Speculation(4, position_cost=0.0))
    ),
    "static": lambda num: static(MEMORY, num),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_plan_and_commit_grow_with_the_running_requests_and_no_faster(name: str) -> None:
    """Sixteen times the requests, at most 1.15 * 16 times the lines."""
    few, many = (lines_executed(decoding(SCHEDULERS[name](num), num), num) for num in (64, 1024))
    assert few > 64 * PAGE_SIZE
    assert many <= 1.15 * 16 * few


def test_a_step_costs_few_lines_per_row() -> None:
    """Continuous decodes: some thirty lines per row for plan and commit together, so 1,024 rows stay under 2 ms."""
    scheduler = decoding(Continuous(MEMORY, ContinuousSettings(max_rows=256, token_budget=10**6)), 256)
    assert lines_executed(scheduler, 256) / PAGE_SIZE / 256 < 40


def test_those_who_wait_cost_the_running_nothing() -> None:
    """A thousand in the queue, none of whom fits: the same lines as with one."""
    counts = []
    for num_waiting in (1, 1000):
        scheduler = decoding(Continuous(MEMORY, ContinuousSettings(max_rows=64, token_budget=10**6)), 64)
        for index in range(num_waiting):
            scheduler.add(Request(f"waits {index}", 16, 4), 0.0)
        counts.append(lines_executed(scheduler, 64))
    assert counts[0] == counts[1]


def prompt(request_id: str) -> Request:
    """Twenty pages that all such requests have in common."""
    return Request(request_id, 20 * PAGE_SIZE, 1, keys=tuple(range(20)))


def test_those_who_wait_for_a_page_cost_those_who_compute_it_nothing() -> None:
    """Two or two thousand wait while a prompt is computed, a page a step: the same lines after the first step."""
    counts = []
    for num_waiting in (2, 2000):
        scheduler = Continuous(MEMORY, ContinuousSettings(chunk_cap=PAGE_SIZE))
        for index in range(1 + num_waiting):
            scheduler.add(prompt(str(index)), 0.0)
        step(scheduler)
        counts.append(lines_executed(scheduler, 1, num_steps=17))
        assert scheduler.load.num_waiting == num_waiting
    assert counts[0] == counts[1]


def test_prompts_in_common_cost_lines_in_proportion_to_their_number() -> None:
    """Sixteen times the requests, at most 1.15 * 16 times the lines, from the first plan to the last commit."""
    counts = []
    for num_requests in (64, 1024):
        scheduler = Continuous(MEMORY, ContinuousSettings(max_rows=32, chunk_cap=PAGE_SIZE))
        for index in range(num_requests):
            scheduler.add(prompt(str(index)), 0.0)
        counts.append(0)
        while scheduler.load.num_waiting + scheduler.load.num_running:
            counts[-1] += counted_step(scheduler, finished=True)[1]
    assert counts[1] <= 1.15 * 16 * counts[0]
