"""Guesses: nobody's text depends on them, nobody else pays for them, and they are made where they pay."""

import itertools
import random
from collections import deque
from copy import deepcopy

import hypothesis.strategies as st
import pytest
from hypothesis import given

from batchwright.errors import ConfigError
from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.order import Queueing, by_strict_priority
from batchwright.policy.pages import Memory
from batchwright.policy.speculation import Acceptance, Speculation, allot
from batchwright.policy.types import Request, Scheduler, StepOutcome, StepPlan
from tests.policy.chaos import random_request
from tests.policy.driver import AGED, MEMORIES, SCHEDULERS, Drive, make_continuous
from tests.policy.texts import END, TextExecutor, prefix_keys, write

ROOMY = Memory(num_pages=400, page_size=4, context=200)
FREE = Speculation(max_drafts=5, position_cost=0.0)
"""Every guess that is offered pays."""


def right(request_id: str, num_outputs: int) -> tuple[bool, ...]:
    """Always six, and all of them right."""
    return (True,) * 6


def wrong(request_id: str, num_outputs: int) -> tuple[bool, ...]:
    return (False,) * 6


def guessing(memory: Memory = ROOMY, guesses=right, speculation: Speculation = FREE, **settings) -> Drive:
    return Drive(Continuous(memory, ContinuousSettings(speculation=speculation, **settings)), memory, guesses=guesses)


def num_drafts(plan: StepPlan | None) -> dict[str, int]:
    """Guesses that each request carries."""
    return {chunk.request_id: chunk.num_drafts for chunk in plan.chunks} if plan else {}


# ---- nobody's text depends on them


class Writing:
    """Requests with common beginnings come in, steps run, up to `max_in_flight` at once, and some of them fail."""

    def __init__(self, scheduler: Scheduler, memory: Memory, quality: float, seed: int, max_in_flight: int) -> None:
        self.scheduler, self.memory, self.max_in_flight = scheduler, memory, max_in_flight
        self.random = random.Random(seed)
        self.executor = TextExecutor(memory, quality, most=6, seed=seed)
        self.wanted: dict[str, list[int]] = {}
        self.in_flight: deque[StepPlan] = deque()
        self.num_drafts = 0

    def add(self) -> None:
        rng = self.random
        common = [7, 1 + rng.randrange(2)] * 9
        prompt = common[: rng.randint(1, 18)] + [rng.randrange(1, 9) for _ in range(rng.randrange(4))]
        request_id = str(len(self.wanted))
        keys = prefix_keys(prompt, self.memory.page_size)
        request = Request(request_id, len(prompt), rng.choice((1, 3, 20, 45)), rng.randrange(3), keys=keys)
        max_tokens = self.scheduler.add(request, 0.0).max_tokens
        self.executor.receive(request, prompt, max_tokens)
        self.wanted[request_id] = write(prompt, max_tokens)

    def run(self, num_requests: int) -> None:
        while len(self.wanted) < num_requests or self.scheduler.load.num_waiting + self.scheduler.load.num_running:
            if len(self.wanted) < num_requests and self.random.random() < 0.4:
                self.add()
            while len(self.in_flight) < self.max_in_flight and (plan := self.scheduler.plan(0.0)):
                self.in_flight.append(plan)
                self.num_drafts += sum(chunk.num_drafts for chunk in plan.chunks)
            if self.in_flight:
                self._land()

    def _land(self) -> None:
        """One step in twelve fails after it wrote; what was planned behind it is not run."""
        plan = self.in_flight.popleft()
        if self.random.random() > 1 / 12:
            self.scheduler.commit(plan.id, 0.0, self.executor.execute(plan))
            return
        self.executor.write(plan)
        self.scheduler.commit(plan.id, 0.0, StepOutcome(failed="exception" if len(plan.chunks) > 1 else "void"))
        while self.in_flight:
            self.scheduler.commit(self.in_flight.popleft().id, 0.0, StepOutcome(failed="void"))


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("quality", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("capacity", ["utilization", "guaranteed"])
@pytest.mark.parametrize("pool", MEMORIES)
def test_every_text_is_what_it_is_without_guesses(pool: str, capacity: str, quality: float, max_in_flight: int) -> None:
    """Each token is made of what is read from the pages, which are too few, shared, taken back and written over."""
    memory = MEMORIES[pool]
    scheduler = make_continuous(memory, capacity=capacity, speculation=FREE, queueing=Queueing())
    writing = Writing(scheduler, memory, quality, seed=11, max_in_flight=max_in_flight)
    writing.run(num_requests=60)
    assert writing.executor.texts == writing.wanted
    assert writing.num_drafts > 50
    assert any(END in text for text in writing.wanted.values())
    assert scheduler.load.pages_held == 0


def test_right_guesses_save_steps_and_wrong_ones_cost_none() -> None:
    """Forty tokens: in 40 steps alone, in 1 + 7 where five guesses count each time, and in 40 where none does."""
    num_steps = {}
    for name, guesses in (("none", lambda *_: ()), ("right", right), ("wrong", wrong)):
        drive = guessing(guesses=guesses)
        drive.add(Request("a", 4, 40))
        num_steps[name] = len(drive.run())
        assert drive.tokens == {"a": 40}
    assert num_steps == {"none": 40, "right": 8, "wrong": 40}


# ---- nobody else pays for them


def without_guesses(scheduler: Continuous) -> Continuous:
    """A twin to whom nothing was offered."""
    twin = deepcopy(scheduler)
    for row in twin._ledger.live.values():
        row.num_offered = 0
    return twin


@pytest.mark.parametrize("capacity", ["utilization", "guaranteed"])
@pytest.mark.parametrize("pool", MEMORIES)
def test_a_plan_with_guesses_is_the_plan_without_them_and_guesses(pool: str, capacity: str) -> None:
    """The same rows get the same tokens, pages and preemptions, in the same order: guesses take what is left."""
    memory = MEMORIES[pool]
    drive = Drive(make_continuous(memory, capacity=capacity, speculation=FREE, queueing=AGED), memory)
    rng = random.Random(3)
    num_compared = 0
    while num_compared < 40:
        drive.wait(rng.choice((0.0, 0.25)))
        if rng.random() < 0.5:
            drive.add(random_request(rng, str(len(drive.lengths)), memory.page_size, drive.clock.now()))
        twin = without_guesses(drive.scheduler)
        plan = drive.launch()
        if any(num_drafts(plan).values()):
            assert_same_but_for_guesses(plan, twin.plan(drive.clock.now()))
            num_compared += 1
        if drive.in_flight and (plan is None or rng.random() < 0.6):
            drive.land()


def assert_same_but_for_guesses(plan: StepPlan, plain: StepPlan) -> None:
    assert (plan.id, plan.reason, plan.preempted) == (plain.id, plain.reason, plain.preempted)
    for chunk, expected in zip(plan.chunks, plain.chunks, strict=True):
        stripped = chunk._replace(
            num_tokens=chunk.num_tokens - chunk.num_drafts,
            num_granted=chunk.num_granted - len(chunk.pages) + len(expected.pages),
            pages=chunk.pages[: len(expected.pages)],
            num_drafts=0,
        )
        assert stripped == expected


def test_guesses_take_the_budget_that_is_left() -> None:
    """Two decodes, a prompt of 5, eight positions in all: one is left, and goes to the first in rank."""
    drive = guessing(token_budget=8)
    for name in "ab":
        drive.add(Request(name, 4, 20))
    drive.step()
    drive.add(Request("c", 5, 1))
    plan = drive.step()
    assert {chunk.request_id: chunk.num_tokens for chunk in plan.chunks} == {"a": 2, "b": 1, "c": 5}
    assert num_drafts(plan) == {"a": 1, "b": 0, "c": 0}


def test_guesses_take_no_page_from_those_who_run() -> None:
    """Four pages of 4, of which the step needs three, and a's guesses the last: b's are those that its pages hold."""
    drive = guessing(Memory(num_pages=4, page_size=4, context=16), watermark=0.0)
    drive.add(Request("a", 4, 9))
    drive.add(Request("b", 5, 9))
    drive.step()
    plan = drive.step()
    assert num_drafts(plan) == {"a": 3, "b": 2}
    assert drive.scheduler.load.pages_held == 4
    assert not plan.preempted


def test_guesses_leave_the_watermark_alone() -> None:
    """Ten pages, two kept back, seven held: a's guesses may fill its page and take one more, b's only fill its page."""
    drive = guessing(Memory(num_pages=10, page_size=4, context=40), watermark=0.2, speculation=Speculation(8, 0.0))
    drive.executor.guesses = lambda *_: (True,) * 8
    drive.add(Request("a", 10, 20))
    drive.add(Request("b", 13, 20))
    drive.step()
    assert drive.scheduler.load.pages_held == 7
    plan = drive.step()
    assert num_drafts(plan) == {"a": 5, "b": 2}
    assert drive.scheduler.load.pages_held == 8


def test_guesses_may_use_pages_that_are_set_aside_for_their_row() -> None:
    """Guaranteed: a prompt of 4 and 9 tokens have all three pages to themselves, none is free, and none need be."""
    drive = guessing(Memory(num_pages=3, page_size=4, context=16), capacity="guaranteed")
    drive.add(Request("a", 4, 9))
    drive.step()
    assert num_drafts(drive.step()) == {"a": 5}


def test_never_more_tokens_are_promised_than_are_left() -> None:
    """Six tokens, one of which the prompt brings: four guesses beside the token that a step brings anyway, not five."""
    drive = guessing()
    drive.add(Request("a", 4, 6))
    drive.step()
    assert num_drafts(drive.step()) == {"a": 4}
    assert drive.tokens == {"a": 6}


def test_what_was_refused_is_neither_stored_nor_lost() -> None:
    """One guess of four was right: two more tokens are stored, and the pages granted for the others stay with a."""
    drive = guessing(guesses=lambda *_: (True, False, True, True))
    drive.add(Request("a", 4, 20))
    drive.step()
    plan = drive.step()
    assert (plan.chunks[0].num_tokens, plan.chunks[0].num_granted) == (5, 2)
    assert (drive.scheduler.load.tokens_stored, drive.scheduler.load.pages_held) == (6, 3)
    plan = drive.step()
    assert (plan.chunks[0].start, plan.chunks[0].num_tokens, plan.chunks[0].num_granted) == (6, 5, 0)


def test_pages_with_refused_guesses_are_no_prefix_until_they_are_full_of_tokens() -> None:
    """The second page was written to its end, but counts to its middle: a later prompt shares the first alone."""
    drive = guessing(guesses=lambda *_: (True, False, False, False))
    drive.add(Request("a", 4, 20, keys=("k0",)))
    drive.step()
    drive.step()
    drive.add(Request("b", 12, 1, keys=("k0", ("output", 0, 1), "other")))
    assert drive.step().chunks[1].start == 4


# ---- while it is not known how many were right


def test_a_row_with_guesses_sits_out_and_the_others_go_on() -> None:
    """Where its next position is depends on how many are right; b, which has no guesses, is planned meanwhile."""
    drive = guessing(guesses=lambda request_id, n: (True,) * 6 if request_id == "a" else ())
    for name in "ab":
        drive.add(Request(name, 4, 20))
    drive.step()
    assert num_drafts(drive.launch()) == {"a": 5, "b": 0}
    assert num_drafts(drive.launch()) == {"b": 0}
    drive.land()
    plan = drive.launch()
    assert {chunk.request_id: chunk.start for chunk in plan.chunks} == {"a": 10, "b": 6}


def test_who_would_miss_a_step_for_less_than_a_token_does_not_guess() -> None:
    """With a step in flight guesses cost the row its place in the next: one, of 0.7 tokens, is not worth that."""
    drive = guessing(guesses=lambda *_: (True,))
    drive.add(Request("a", 4, 20))
    drive.step()
    assert num_drafts(drive.scheduler.plan(0.0)) == {"a": 1}
    drive = guessing(guesses=lambda *_: (True,))
    drive.add(Request("a", 4, 20))
    drive.launch()
    drive.launch()
    drive.land()
    assert num_drafts(drive.launch()) == {"a": 0}


@pytest.mark.parametrize("failure", ["oom", "exception", "void"])
def test_a_step_that_failed_is_run_again_without_its_guesses(failure: str) -> None:
    """So alone it can't run out of memory for them; the step after offers again."""
    drive = guessing()
    for name in "ab":
        drive.add(Request(name, 4, 20))
    drive.step()
    drive.launch()
    if failure == "void":
        drive.void()
    else:
        drive.executor.failures = {drive.executor.num_steps: failure}
        drive.land()
    again = drive.step()
    assert not any(num_drafts(again).values())
    assert [chunk.start for chunk in again.chunks] == [4] * len(again.chunks)
    drive.run()
    assert drive.tokens == {"a": 20, "b": 20}


def test_what_was_offered_to_who_was_preempted_is_forgotten() -> None:
    """b is displaced, and computed again; its first step after that carries no guess, though it was offered some."""
    drive = guessing(max_rows=1, queueing=Queueing(order=by_strict_priority))
    drive.add(Request("b", 4, 20, priority=1))
    drive.step()
    drive.add(Request("a", 4, 1))
    assert drive.step().preempted == ("b",)
    plan = drive.step()
    assert (plan.chunks[0].request_id, plan.chunks[0].num_tokens, plan.chunks[0].num_drafts) == ("b", 5, 0)
    assert num_drafts(drive.step()) == {"b": 5}


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if "speculating" not in name])
def test_who_does_not_speculate_ignores_what_is_offered(name: str) -> None:
    """And says so beforehand, so that nobody need look for guesses."""
    drive = Drive(SCHEDULERS[name](ROOMY, AGED), ROOMY, guesses=right)
    assert drive.scheduler.max_drafts == 0
    drive.add(Request("a", 4, 9))
    drive.flush()
    assert not any(any(num_drafts(plan).values()) for plan in drive.run())


# ---- where they pay


def rate_of(counts: tuple[int, ...], offers: list[tuple[float, int]], num_rows: int, position_cost: float) -> float:
    """Tokens in the time that a step takes before its first position."""
    gains = sum(rate**i for (rate, _), count in zip(offers, counts, strict=True) for i in range(1, count + 1))
    return (num_rows + gains) / (1 + position_cost * (num_rows + sum(counts)))


@given(
    offers=st.lists(st.tuples(st.floats(0.01, 0.99), st.integers(0, 4)), min_size=1, max_size=3),
    num_others=st.integers(0, 40),
    position_cost=st.sampled_from((0.0, 0.002, 0.05, 0.3, 2.0)),
)
def test_no_choice_of_guesses_brings_more_tokens_per_second(
    offers: list[tuple[float, int]], num_others: int, position_cost: float
) -> None:
    """Held against all choices there are."""
    num_rows = len(offers) + num_others
    counts = tuple(allot(offers, num_rows, position_cost, must_skip=False))
    choices = itertools.product(*(range(most + 1) for _, most in offers))
    best = max(rate_of(choice, offers, num_rows, position_cost) for choice in choices)
    assert rate_of(counts, offers, num_rows, position_cost) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(("num_rows", "count"), [(1, 14), (4, 11), (16, 6), (64, 2), (200, 0)])
def test_fewer_guesses_pay_the_more_rows_there_are(num_rows: int, count: int) -> None:
    """At 64 rows: 0.9 and 0.81 are above 0.05 * 64 / (1 + 0.05 * 64) = 0.76, and 0.729 is not."""
    assert allot([(0.9, 20)], num_rows, 0.05, must_skip=False) == [count]


def test_rows_without_guesses_count_where_it_is_asked_what_pays() -> None:
    """0.7 is above 0.05 * 20 / (1 + 0.05 * 20) = 0.5, and 0.49 is not: one guess of the one row that has some."""
    drive = guessing(speculation=Speculation(5, 0.05), guesses=lambda name, n: (True,) * 6 if name == "7" else ())
    for index in range(20):
        drive.add(Request(str(index), 4, 20))
    drive.step()
    assert sum(num_drafts(drive.step()).values()) == 1


def rate_after(*steps: tuple[int, int]) -> float:
    """Of a request that guessed so many, of which so many were right, in steps one after the other."""
    acceptance = Acceptance()
    num_outputs = 1
    for num_guessed, num_right in steps:
        num_outputs += 1 + num_right
        acceptance.learn(num_guessed, num_right, num_outputs)
    return acceptance.rate(num_outputs)


def test_a_request_s_rate_follows_what_became_of_its_guesses() -> None:
    """Hopeful at first; then what was seen; what was seen last counts most."""
    assert rate_after() == pytest.approx(0.7)
    assert rate_after((4, 0)) == pytest.approx(0.7 / 2)
    assert rate_after(*[(4, 4)] * 20) > 0.98
    assert rate_after(*[(1, 1), (1, 0)] * 50) == pytest.approx(0.5, abs=0.05)
    assert rate_after(*[(4, 4)] * 50, *[(4, 0)] * 60) < 0.25


def test_who_goes_on_guessing_forgets_only_what_is_old() -> None:
    """Forty wrong guesses, one a token: each is remembered, 39 fortieths of it after the next."""
    acceptance = Acceptance()
    for num_outputs in range(1, 41):
        acceptance.rate(num_outputs)
        acceptance.learn(1, 0, num_outputs + 1)
    assert acceptance.rate(41) == pytest.approx(0.7 / (1 + 40 * (1 - (39 / 40) ** 40)))


def test_guesses_behind_a_wrong_one_say_nothing() -> None:
    """Right, wrong, and two that were not looked at: one of two."""
    assert rate_after((4, 1)) == rate_after((2, 1))


def guesses_of_a_failure(num_rows: int, num_outputs: int) -> list[int]:
    """The outputs at which a request guesses whose guesses are always wrong."""
    acceptance, guessed = Acceptance(), []
    for number in range(1, num_outputs):
        (count,) = allot([(acceptance.rate(number), 5)], num_rows, 0.05, must_skip=False)
        if count:
            acceptance.learn(count, 0, number + 1)
            guessed.append(number)
    return guessed


@pytest.mark.parametrize("num_rows", [1, 5, 20])
def test_a_request_whose_guesses_keep_failing_tries_again_ever_less_often(num_rows: int) -> None:
    """Where a guess costs a twentieth of a step without rows: for one token in twenty at most, then for fewer still."""
    guessed = guesses_of_a_failure(num_rows, num_outputs=5000)
    first, last = (sum(start <= number < start + 1000 for number in guessed) for start in (0, 4000))
    assert len(guessed) < 5000 / 20
    assert 0 < last <= first / 2


def test_what_became_of_guesses_is_learnt_from_the_outcomes() -> None:
    """Alone, with guesses that are always offered and always wrong: few of five hundred steps carry any."""
    drive = guessing(Memory(num_pages=200, page_size=4, context=600), wrong, Speculation(max_drafts=5))
    drive.add(Request("a", 4, 500))
    plans = drive.run()
    assert sum(any(num_drafts(plan).values()) for plan in plans) < 100


def test_a_request_whose_guesses_come_right_again_guesses_again() -> None:
    """A thousand tokens of prose, then a quotation of as many: found out soon, and then six tokens come at a time."""
    memory = Memory(num_pages=800, page_size=4, context=3000)
    drive = guessing(memory, lambda request_id, num_outputs: (num_outputs > 1000,) * 6, Speculation(max_drafts=5))
    drive.add(Request("a", 4, 2000))
    assert 1000 + 1000 / 6 < len(drive.run()) < 1000 + 1000 / 6 + 200


@pytest.mark.parametrize("settings", [(0, 0.1), (4, -1.0), (4, float("nan")), (4, float("inf"))])
def test_settings_without_sense_are_refused(settings: tuple[int, float]) -> None:
    """At once, in three parts."""
    with pytest.raises(ConfigError) as caught:
        Speculation(*settings)
    assert caught.value.remedy
