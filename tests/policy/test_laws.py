"""What every scheduler owes every request, in any order of events; the same suite for all of them.

After each event `Drive.check` asserts: everyone is live or has ended once; pages held + free == total, each held by
those who will return it; tokens stored fit into pages held; nothing reserved twice; no step over budget or rows; no
idle machine beside work. The executor asserts that every row finds its own tokens in its pages.
"""

import math
import random
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from batchwright.policy.continuous import Continuous
from batchwright.policy.dynamic import DynamicSettings, dynamic
from batchwright.policy.order import Queueing, by_aged_priority, by_strict_priority
from batchwright.policy.pages import Memory
from batchwright.policy.static import one_by_one, static
from batchwright.policy.types import Request, Scheduler
from tests.policy.chaos import FAILURES, random_request
from tests.policy.driver import AGED, MEMORIES, SCHEDULERS, TINY, Drive, make_continuous

ROOMY = Memory(num_pages=400, page_size=4, context=200)
MAX_IN_FLIGHT = 3


class Events(RuleBasedStateMachine):
    """Any events, in any order, to one scheduler; at the end all that is left is run."""

    def __init__(self, make: Callable[[Memory, Queueing], Scheduler], memory: Memory) -> None:
        super().__init__()
        self.make, self.memory = make, memory
        self.drive = Drive(make(memory, AGED), memory)
        self.num_added = 0

    @rule(seed=st.integers(0, 2**20), num_output=st.integers(1, 30))
    def add(self, seed: int, num_output: int) -> None:
        request = random_request(
            random.Random(seed), str(self.num_added), self.memory.page_size, self.drive.clock.now()
        )
        self.num_added += 1
        self.drive.add(request, num_output)

    @precondition(lambda self: self.drive.live)
    @rule(index=st.integers(0, 50))
    def abort(self, index: int) -> None:
        live = sorted(self.drive.live)
        self.drive.abort(live[index % len(live)])

    @rule(seconds=st.sampled_from((0.0, 0.25, 0.5, 3.0)))
    def wait(self, seconds: float) -> None:
        self.drive.wait(seconds)

    @rule()
    def flush(self) -> None:
        self.drive.flush()

    @precondition(lambda self: len(self.drive.in_flight) < MAX_IN_FLIGHT)
    @rule()
    def launch(self) -> None:
        self.drive.launch()

    @precondition(lambda self: self.drive.in_flight)
    @rule()
    def land(self) -> None:
        self.drive.land()

    @precondition(lambda self: self.drive.in_flight)
    @rule()
    def void(self) -> None:
        self.drive.void()

    @rule(max_in_flight=st.integers(1, MAX_IN_FLIGHT), num_steps=st.integers(1, 12))
    def work(self, max_in_flight: int, num_steps: int) -> None:
        for _ in range(num_steps):
            while len(self.drive.in_flight) < max_in_flight and self.drive.launch():
                pass
            if self.drive.in_flight:
                self.drive.land()

    @rule(in_steps=st.integers(0, 3), how=st.sampled_from(FAILURES))
    def break_a_step(self, in_steps: int, how: str) -> None:
        self.drive.executor.failures = {self.drive.executor.num_steps + in_steps: how}

    @rule(limit=st.sampled_from((None, 6, 20)))
    def limit_memory(self, limit: int | None) -> None:
        self.drive.executor.max_positions = limit

    @precondition(lambda self: self.drive.live)
    @rule(index=st.integers(0, 50), how=st.sampled_from(("poison", "errors")))
    def break_a_request(self, index: int, how: str) -> None:
        live = sorted(self.drive.live)
        setattr(self.drive.executor, how, {live[index % len(live)]})

    @invariant()
    def laws(self) -> None:
        self.drive.check()

    def teardown(self) -> None:
        self.drive.flush()
        self.drive.run(max_in_flight=2)
        assert len(self.drive.ended) == self.num_added
        self.drive.tape.assert_replays_on(self.make(self.memory, AGED))


@pytest.mark.parametrize("pool", MEMORIES)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_law_holds_after_every_event(name: str, pool: str) -> None:
    """Whatever happens, everybody ends once, all pages return, and the same events give the same plans."""
    run_state_machine_as_test(
        lambda: Events(SCHEDULERS[name], MEMORIES[pool]), settings=settings(max_examples=50, stateful_step_count=40)
    )


# ---- nobody is lost


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_pool_too_small_for_the_load_still_finishes_everything(name: str, max_in_flight: int) -> None:
    """Ten requests that each nearly fill the pool: preempted or queued, all get their tokens, none is lost."""
    drive = Drive(SCHEDULERS[name](TINY, AGED), TINY)
    for index in range(10):
        drive.add(Request(str(index), 5 + index, 20))
    drive.flush()
    drive.run(max_in_flight)
    assert drive.tokens == {str(index): 20 for index in range(10)}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_machine_with_less_memory_than_the_budget_still_finishes_everything(name: str) -> None:
    """Steps of more than 8 positions run out of memory: the batch shrinks, and nobody is given up."""
    drive = Drive(SCHEDULERS[name](ROOMY, AGED), ROOMY, max_positions=8)
    for index in range(10):
        drive.add(Request(str(index), 1 + index % 8, 6))
    drive.flush()
    drive.run()
    assert set(drive.ended.values()) == {"finished"}
    assert drive.failed or name == "one by one"


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_row_that_alone_runs_out_of_memory_is_the_only_one_given_up(name: str) -> None:
    """A one-token prompt whose step can't run: no smaller step is left to try."""
    drive = Drive(SCHEDULERS[name](ROOMY, AGED), ROOMY, max_positions=0)
    drive.add(Request("a", 1, 5))
    drive.flush()
    drive.run()
    assert drive.ended == {"a": "out_of_memory"}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_deadline_and_a_queue_timeout_at_one_moment_drop_a_request_once(name: str) -> None:
    """It ends by its deadline; the timeout finds it gone."""
    drive = Drive(SCHEDULERS[name](ROOMY, AGED), ROOMY)
    drive.add(Request("a", 4, 5, deadline=2.0, queue_timeout=1.0))
    drive.wait(3.0)
    assert drive.ended == {"a": "deadline"}


# ---- one bad request


MAKERS_OF_EIGHT: dict[str, Callable[[], Scheduler]] = {
    "static": lambda: static(ROOMY, 8),
    "dynamic": lambda: dynamic(ROOMY, DynamicSettings(8)),
    "continuous": lambda: make_continuous(ROOMY, max_rows=8, token_budget=200, chunk_cap=None),
}


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("name", MAKERS_OF_EIGHT)
def test_a_poisonous_request_costs_few_extra_steps_and_only_itself(
    name: str, max_in_flight: int, position: int
) -> None:
    """Halving finds one row of 8 in at most 2 log2(8) extra steps; plans that were in flight already are on top."""
    drive = Drive(MAKERS_OF_EIGHT[name](), ROOMY, poison={str(position)})
    for index in range(8):
        drive.add(Request(str(index), 4, 12))
    drive.flush()
    drive.run(max_in_flight)
    assert [request_id for request_id, end in drive.ended.items() if end != "finished"] == [str(position)]
    assert drive.ended[str(position)] == "exception"
    assert sum(plan.reason == "retry" for plan in drive.plans) <= 2 * math.log2(8)
    assert len(drive.plans) <= 12 + 2 * math.log2(8) + 1 + (max_in_flight - 1)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_an_item_s_error_ends_that_item_alone(name: str) -> None:
    """The others of its step keep what they computed."""
    drive = Drive(SCHEDULERS[name](ROOMY, AGED), ROOMY, errors={"1"})
    for index in range(4):
        drive.add(Request(str(index), 4, 5))
    drive.flush()
    drive.run()
    assert drive.ended.pop("1") == "error"
    assert set(drive.ended.values()) == {"finished"}


# ---- priorities and waiting


WAITING = Queueing(order=by_aged_priority(5.0))
AGEING: dict[str, Callable[[Queueing], Scheduler]] = {
    "one by one": lambda queueing: one_by_one(ROOMY, queueing),
    "static": lambda queueing: static(ROOMY, 2, queueing),
    "dynamic": lambda queueing: dynamic(ROOMY, DynamicSettings(2, queueing=queueing)),
    "continuous": lambda queueing: make_continuous(ROOMY, max_rows=2, queueing=queueing),
    "continuous, guaranteed": lambda queueing: make_continuous(
        ROOMY, max_rows=2, capacity="guaranteed", queueing=queueing
    ),
}


def end_of_the_unimportant(scheduler: Scheduler, horizon: int) -> float | None:
    """When a request of priority 4 ends though two of priority 0 arrive every second, as fast as they are served."""
    drive = Drive(scheduler, ROOMY)
    drive.add(Request("unimportant", 4, 1, priority=4))
    for second in range(horizon):
        for index in range(2):
            drive.add(Request(f"{second}.{index}", 4, 1))
        drive.step()
        if "unimportant" in drive.ended:
            return drive.clock.now()
        drive.wait(1.0)
    return None


@pytest.mark.parametrize("name", AGEING)
def test_with_ageing_nobody_waits_for_ever(name: str) -> None:
    """Four levels at 5 s each are made up for in 20 s, plus the backlog of that time where one row serves two."""
    end = end_of_the_unimportant(AGEING[name](WAITING), horizon=80)
    assert end is not None
    assert 5.0 <= end <= 45.0


@pytest.mark.parametrize("name", AGEING)
def test_strict_priorities_let_the_unimportant_starve(name: str) -> None:
    """This is what strict means, and why it isn't the default of schedulers that run language models."""
    assert end_of_the_unimportant(AGEING[name](Queueing(order=by_strict_priority)), horizon=80) is None


# ---- planning ahead


@pytest.mark.parametrize("name", SCHEDULERS)
def test_pages_return_only_when_the_last_plan_that_names_them_has_landed(name: str) -> None:
    """A request that is aborted with two plans in flight keeps its pages until both have been executed."""
    drive = Drive(SCHEDULERS[name](ROOMY, AGED), ROOMY)
    drive.add(Request("a", 4, 5))
    drive.flush()
    drive.launch()
    drive.launch()
    held = drive.scheduler.load.pages_held
    drive.abort("a")
    drive.land()
    assert drive.scheduler.load.pages_held == held > 0
    drive.land()
    drive.check_idle()


def test_a_pause_ends_when_its_reason_does() -> None:
    """A row paused to give its pages to one ahead runs again when that one ends instead, and nothing else is left."""
    memory = Memory(num_pages=4, page_size=4, context=16)
    drive = Drive(Continuous(memory), memory)
    drive.add(Request("first", 7, 5))
    drive.add(Request("second", 7, 5))
    drive.step()
    drive.launch()
    assert drive.launch() is None
    drive.abort("first")
    drive.land()
    assert [chunk.request_id for chunk in drive.launch().chunks] == ["second"]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_step_that_is_not_run_costs_its_requests_nothing(name: str) -> None:
    """Every third plan is void, and so is whatever was planned behind it: all tokens come, as after no such thing."""
    drive = Drive(SCHEDULERS[name](ROOMY, AGED), ROOMY)
    for index in range(6):
        drive.add(Request(str(index), 3 + index, 9))
    drive.flush()
    while drive.live:
        while len(drive.in_flight) < 2 and drive.launch():
            pass
        if len(drive.plans) % 3:
            drive.land()
        else:
            while drive.in_flight:
                drive.void()
    while drive.in_flight:
        drive.void()
    drive.check_idle()
    assert drive.tokens == {str(index): 9 for index in range(6)}
    assert not drive.failed


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_whatever_was_planned_behind_a_failed_step_need_not_be_run(name: str, failure: str) -> None:
    """The plan behind is void: everybody finishes, and after a failure as soon as if nothing had been planned ahead."""
    num_steps = []
    for max_in_flight in (1, 2):
        drive = Drive(SCHEDULERS[name](ROOMY, AGED), ROOMY, failures={3: failure}, guesses=lambda *_: ())
        for index in range(4):
            drive.add(Request(str(index), 4, 8))
        drive.flush()
        while drive.live or drive.in_flight:
            while len(drive.in_flight) < max_in_flight and drive.launch():
                pass
            if drive.land().failed and drive.in_flight:
                drive.void()
        drive.check_idle()
        num_steps.append(drive.executor.num_steps)
        assert len(drive.tokens) == (3 if (name, failure) == ("one by one", "exception") else 4) or name == "one by one"
    assert num_steps[0] == num_steps[1]


def test_a_late_row_that_breaks_its_step_does_not_end_the_only_other() -> None:
    """The culprit has ended, but is still executed: who shares that step with it is tried again, alone."""
    drive = Drive(make_continuous(ROOMY), ROOMY)
    for request_id in ("innocent", "culprit"):
        drive.add(Request(request_id, 4, 5))
    drive.step()
    drive.launch()
    drive.abort("culprit")
    drive.executor.poison = {"culprit"}
    assert drive.land().failed
    drive.run()
    assert drive.ended == {"culprit": "aborted", "innocent": "finished"}


MAKERS_OF_SIX: dict[str, Callable[[], Scheduler]] = {
    "static": lambda: static(ROOMY, 6),
    "dynamic": lambda: dynamic(ROOMY, DynamicSettings(6, allowed_sizes=(2, 4, 6))),
}


@pytest.mark.parametrize("name", MAKERS_OF_SIX)
def test_a_batch_that_was_planned_ahead_of_a_failure_wastes_what_it_would_have_wasted(name: str) -> None:
    """Prompts run out of memory with the first decodes planned behind: paddings and fillers are as without that."""
    shapes = []
    for max_in_flight in (1, 2):
        drive = Drive(MAKERS_OF_SIX[name](), ROOMY, failures={0: "oom"})
        for index in range(3):
            drive.add(Request(str(index), 4 + index, 4 + index))
        drive.flush()
        ran = []
        while drive.live or drive.in_flight:
            while len(drive.in_flight) < max_in_flight and (plan := drive.launch()):
                ran.append(plan)
            if drive.land().failed and drive.in_flight:
                ran.remove(drive.in_flight[0])
                drive.void()
        shapes.append([[(chunk.request_id, chunk.num_tokens, chunk.padding) for chunk in plan.chunks] for plan in ran])
        shapes[-1].append([chunk.start for plan in ran for chunk in plan.chunks if chunk.request_id is None])
    assert shapes[0] == shapes[1]
