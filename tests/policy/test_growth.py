"""What plan and commit cost, in lines executed: proportional to the running requests, whatever the machine."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.pages import Memory
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


def outcome(plan: StepPlan) -> StepOutcome:
    return StepOutcome(tuple(ItemOutcome(chunk.request_id, int(chunk.samples)) for chunk in plan.chunks))


def lines_executed(scheduler: Scheduler, num_running: int, num_steps: int = PAGE_SIZE) -> int:
    """By the policy alone, over steps in which every request takes one new page."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if POLICY not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    for _ in range(num_steps):
        sys.settrace(trace)
        try:
            plan = scheduler.plan(0.0)
        finally:
            sys.settrace(before)
        assert len(plan.chunks) == num_running
        result = outcome(plan)
        sys.settrace(trace)
        try:
            scheduler.commit(plan.id, 0.0, result)
        finally:
            sys.settrace(before)
    return count


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
