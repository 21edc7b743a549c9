"""The next step is planned while one runs: nobody gets a token more, less or other than without that."""

import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count, pairwise
from typing import Any

import pytest
import torch

from batchwright.errors import RequestError
from batchwright.policy.continuous import Continuous
from batchwright.policy.dynamic import DynamicSettings, dynamic
from batchwright.policy.pages import Memory
from batchwright.policy.static import one_by_one, static
from batchwright.policy.types import StepPlan
from batchwright.serve.engine import Engine, Policy
from batchwright.serve.executor import TorchExecutor
from batchwright.serve.outputs import Output
from batchwright.serve.sampling.params import SamplingParams
from batchwright.testing import VirtualClock
from tests.serve.scripted import (
    OverlappingExecutor,
    PretendingExecutor,
    Told,
    forced,
    tiny,
    tokens_of,
)
from tests.serve.test_engine import MEMORY, POLICIES, drain, ends, is_empty, mixed_prompts


def overlapping(policy: Policy = Continuous, memory: Memory = MEMORY, **more: Any) -> Engine:
    """An engine that computes, on the tiny model, and plans ahead."""
    return Engine(more.pop("model", tiny()), policy, memory=memory, executor=OverlappingExecutor, **more)


def pretending(policy: Policy = Continuous, memory: Memory = MEMORY, **more: Any) -> tuple[Engine, PretendingExecutor]:
    """An engine that plans ahead and computes nothing; its executor asserts that pages are used rightly."""
    executor = partial(PretendingExecutor, overlaps=True)
    engine = Engine(tiny(), lambda memory: Told(policy(memory)), memory=memory, executor=executor, **more)
    assert isinstance(engine.executor, PretendingExecutor)
    engine.scheduler.listener = engine.executor.hear
    return engine, engine.executor


def rests(engine: Engine) -> bool:
    """Nobody is left, all pages are free, and the executor has nothing to do."""
    return is_empty(engine) and engine.executor.running is None


def rows(plan: StepPlan) -> list[str | None]:
    return [chunk.request_id for chunk in plan.chunks if chunk.num_tokens]


# ---- the order of events


def test_a_step_is_planned_while_one_runs_and_begins_before_that_one_is_told() -> None:
    """Plan 1 before the result of 0; then 1 starts, 0 is committed and its outputs are handed out; and so on."""
    events: list[str] = []
    engine, executor = pretending()
    plan, commit = engine.scheduler.plan, engine.scheduler.commit
    engine.scheduler.plan = lambda now: (made := plan(now)) and [made, events.append(f"plan {made.id}")][0]
    engine.scheduler.commit = lambda number, *rest: [events.append(f"commit {number}"), commit(number, *rest)][1]
    executor.start_hook = lambda made: events.append(f"start {made.id}")
    executor.hook = lambda made: events.append(f"result {made.id}")
    engine.submit([1, 2, 3], forced(3), on_output=lambda output: events.append(f"token {output.token}"))
    drain(engine)
    assert events == [
        *("plan 0", "start 0", "plan 1", "result 0", "start 1", "commit 0", "token 1"),
        *("plan 2", "result 1", "start 2", "commit 1", "token 2"),
        *("result 2", "commit 2", "token 3"),
    ]
    assert rests(engine)


def test_without_an_executor_that_overlaps_each_step_is_planned_when_the_one_before_has_ended() -> None:
    """The scheduler never has two plans to count on."""
    engine = Engine(tiny(), executor=PretendingExecutor, memory=MEMORY)
    engine.submit([1, 2, 3], forced(4))
    while engine.step():
        assert engine.scheduler.load.num_in_flight == 0


def test_on_a_cpu_torch_does_not_overlap() -> None:
    """Its calls return when the work is done."""
    assert not TorchExecutor(tiny().decoder, MEMORY).overlaps


def test_steps_in_the_records_do_not_overlap() -> None:
    """A step begins when the one before has ended, whenever it was planned; a request when its first step does."""
    looks = count()
    engine = overlapping(clock=lambda: float(next(looks)))
    engine.generate([tokens_of(seed, 5) for seed in range(3)], [forced(n) for n in (4, 2, 7)])
    steps = engine.recorder.steps
    assert all(one.started < one.finished <= two.started for one, two in pairwise(steps))
    assert all(record.started == steps[0].started for record in engine.recorder.requests)
    assert [record.token_times[0] for record in engine.recorder.requests] == [steps[0].finished] * 3


def test_step_has_nothing_to_do_only_when_nothing_runs() -> None:
    """Every call of `step` takes one step to its end; None means that the executor is idle and nothing is planned."""
    engine, executor = pretending()
    ids = [engine.submit(tokens_of(seed, 4), forced(3 + seed)) for seed in range(3)]
    outputs, num_steps = [], 0
    while (step := engine.step()) is not None:
        outputs += step
        num_steps += 1
    assert (executor.running, num_steps) == (None, 5)
    assert [output.request_id for output in outputs if output.finish_reason] == ids
    assert rests(engine)


# ---- the same tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_planning_ahead_changes_no_token(policy: str) -> None:
    """Greedy and drawn, under every policy: as without it, and within 1e-4 of transformers' logits."""
    prompts = mixed_prompts()
    params = [forced(3 + 5 * index % 17, temperature=index % 3 * 0.8, seed=index) for index in range(len(prompts))]
    plain = Engine(tiny(), POLICIES[policy], memory=MEMORY).generate(prompts, params)
    engine = overlapping(POLICIES[policy])
    ahead = engine.generate(prompts, params)
    assert [each.tokens for each in ahead] == [each.tokens for each in plain]
    sequences = {each.request_id: [*prompt, *each.tokens] for each, prompt in zip(ahead, prompts, strict=True)}
    assert engine.executor.worst(sequences) < 1e-4
    assert rests(engine)


def test_a_pool_that_is_too_small_preempts_and_loses_nothing() -> None:
    """Who must give its pages away gives them when its last step has landed."""
    engine = overlapping(POLICIES["utilization"], Memory(9, 4, 128))
    prompts = [tokens_of(seed, 5 + seed) for seed in range(8)]
    completions = engine.generate(prompts, forced(20))
    assert sum(record.num_preempted for record in engine.recorder.requests) >= 3
    assert [each.tokens for each in completions] == [
        each.tokens for each in Engine(tiny(), memory=MEMORY).generate(prompts, forced(20))
    ]
    assert rests(engine)


def test_a_limit_that_is_known_costs_no_step() -> None:
    """Nothing is computed beyond max_tokens: every position, and every token, is somebody's."""
    engine = overlapping()
    limits = list(range(1, 17))
    prompts = mixed_prompts()
    engine.generate(prompts, [forced(limit) for limit in limits])
    steps = [row for step in engine.recorder.steps for row in step.rows]
    records = engine.recorder.requests
    assert sum(row.samples for row in steps) == sum(limits)
    assert sum(row.num_tokens + row.padding for row in steps) == sum(
        record.num_prompt + record.num_output - 1 - record.num_cached for record in records
    )


def test_threads_may_share_it() -> None:
    """Six threads generate at once; each gets what it would get alone."""
    prompts = [tokens_of(index, 5 + index) for index in range(6)]
    alone = [overlapping().generate([prompt], forced(12))[0].tokens for prompt in prompts]
    engine = overlapping()
    together: dict[int, tuple[int, ...]] = {}

    def run(index: int) -> None:
        together[index] = engine.generate([prompts[index]], forced(12))[0].tokens

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[index] for index in range(len(prompts))] == alone
    assert rests(engine)


# ---- an end that the step behind did not know of


class Ending:
    """Ends request "a" after its third token, by other means than a limit, beside a neighbour with a longer answer."""

    def __init__(self, policy: Policy, how: str) -> None:
        free = Engine(tiny(), memory=MEMORY).generate([tokens_of(2, 7), tokens_of(3, 9)], forced(10))
        self.tokens, self.neighbour = free[0].tokens, free[1].tokens
        assert self.tokens[2] not in self.tokens[:2]
        self.how = how
        self.clock = VirtualClock()
        self.engine = overlapping(policy, clock=self.clock.now)
        self.outputs: list[Output] = []

    def run(self) -> None:
        stop = (self.tokens[2],) if self.how == "stop" else ()
        params = SamplingParams(max_tokens=10, ignore_eos=True, stop_token_ids=stop)
        deadline = 5.0 if self.how == "deadline" else None
        self.engine.submit(tokens_of(2, 7), params, request_id="a", deadline=deadline, on_output=self.on_output)
        self.engine.submit(tokens_of(3, 9), forced(10), request_id="b", on_output=self.outputs.append)
        drain(self.engine)

    def on_output(self, output: Output) -> None:
        self.outputs.append(output)
        if sum(one.request_id == "a" for one in self.outputs) != 3 or output.token is None:
            return
        if self.how == "abort":
            self.engine.abort("a")
        if self.how == "deadline":
            self.clock.advance_to(6.0)
        if self.how == "error":
            raise ValueError("its callback raises")


@pytest.mark.parametrize("how", ["stop", "abort", "deadline", "error"])
@pytest.mark.parametrize("policy", POLICIES)
def test_who_has_ended_gets_nothing_of_the_step_that_was_planned_before(policy: str, how: str) -> None:
    """Not streamed, not recorded; that row counts as dead, its pages return, and the neighbour has its tokens."""
    ending = Ending(POLICIES[policy], how)
    ending.run()
    engine, outputs = ending.engine, ending.outputs
    assert [one.token for one in outputs if one.request_id == "a" and one.token is not None] == [*ending.tokens[:3]]
    assert [one.token for one in outputs if one.request_id == "b"] == [*ending.neighbour]
    assert ends(engine) == {"a": how, "b": "length"}
    assert {record.id: record.num_output for record in engine.recorder.requests} == {"a": 3, "b": 10}
    recorded = [row.samples for step in engine.recorder.steps for row in step.rows if row.request_id == "a"]
    computed = [row.samples for plan in engine.executor.started for row in plan.chunks if row.request_id == "a"]
    assert (sum(recorded), sum(computed)) == (3, 4)
    assert rests(engine)


def test_the_pages_of_an_ended_request_wait_for_its_last_row() -> None:
    """Its late row still writes to them, so nobody gets them before that step has landed."""
    engine, executor = pretending(memory=Memory(6, 4, 24))
    engine.submit(tokens_of(0, 9), forced(9), request_id="a")
    engine.submit(tokens_of(1, 9), forced(9), request_id="b")
    engine.step()
    assert executor.running and rows(executor.running) == ["a", "b"]
    mine = set(executor.running.chunks[0].pages)
    engine.abort("a")
    engine.submit(tokens_of(2, 9), forced(2), request_id="c")
    plans: list[StepPlan] = []
    executor.start_hook = plans.append
    engine.step()
    assert [rows(plan) for plan in plans] == [["b"]]
    drain(engine)
    assert rows(plans[1]) == ["b", "c"]
    assert mine & set(plans[1].chunks[1].pages)
    assert rests(engine)


def test_an_id_may_be_used_again_while_a_late_row_of_its_last_owner_runs() -> None:
    """The newcomer gets its own tokens only, and the late row feeds nobody."""
    first, second = tokens_of(2, 7), tokens_of(4, 12)
    expected = [each.tokens for each in Engine(tiny(), memory=MEMORY).generate([first, second], forced(6))]
    engine = overlapping()
    got: list[Output] = []
    engine.submit(first, forced(6), request_id="a", on_output=got.append)
    engine.submit(tokens_of(5, 3), forced(20), request_id="other")
    for _ in range(3):
        engine.step()
    engine.abort("a")
    engine.submit(second, forced(6), request_id="a", on_output=got.append)
    drain(engine)
    assert [one.token for one in got] == [*expected[0][:3], None, *expected[1]]
    assert [(record.id, record.num_output) for record in engine.recorder.requests][:2] == [("a", 3), ("a", 6)]
    assert rests(engine)


@pytest.mark.parametrize("how", ["abort", "stop", "close"])
def test_when_the_last_request_ends_the_step_that_runs_comes_to_its_end(how: str) -> None:
    """An engine with nobody in it has nothing in flight, whichever way the last one left."""
    plain = Engine(tiny(), memory=MEMORY).generate([tokens_of(2, 7)], forced(10))[0].tokens
    engine = overlapping()
    stop = plain[2:3] if how == "stop" else ()
    stream = engine.stream([tokens_of(2, 7)], SamplingParams(max_tokens=10, ignore_eos=True, stop_token_ids=stop))
    for _ in range(2):
        next(stream)
    assert engine.executor.running is not None
    if how == "abort":
        engine.abort("request-0")
    elif how == "stop":
        next(stream)
    else:
        stream.close()
    assert rests(engine)
    assert engine.generate([tokens_of(2, 7)], forced(3))[0].tokens == plain[:3]


def test_a_row_in_error_has_something_to_feed_to_the_step_behind() -> None:
    """NaN logits give no token; the neighbours of its late row are a clean run's, and so is who gets its pages."""
    prompts = [[token for token in tokens_of(seed, 5 + 3 * seed) if token != 96] for seed in range(4)]
    memory = Memory(40, 4, 128)
    clean = [each.tokens for each in Engine(tiny(), memory=memory).generate(prompts, forced(7))]
    engine = overlapping(memory=memory, model=tiny(poison=96))
    for _ in range(3):
        *others, error = engine.generate([*prompts, [1, 96, 2]], forced(7))
        assert [each.tokens for each in others] == clean
        assert (error.finish_reason, error.tokens) == ("error", ())
    assert rests(engine)


# ---- steps that fail


def failing_once(at: int, error: BaseException) -> Callable[[StepPlan], None]:
    """A hook that raises for plan `at`."""

    def hook(plan: StepPlan) -> None:
        if plan.id == at:
            raise error

    return hook


@pytest.mark.parametrize("where", ["start_hook", "hook"])
@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA"), RuntimeError("shapes differ")])
@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "one by one"])
def test_what_was_planned_behind_a_step_that_fails_is_not_run(
    policy: str, at: int, error: Exception, where: str
) -> None:
    """It would need the tokens that never came. All that is lost is tried again: no token is missing or doubled."""
    engine, executor = pretending(POLICIES[policy])
    begun: list[int] = []
    fail = failing_once(at, error)
    setattr(executor, where, fail)
    start = executor.start
    executor.start = lambda plan: [begun.append(plan.id), start(plan)][1]
    completions = engine.generate([[1, 2], [3, 4], [5, 6, 7]], forced(5))
    assert [each.tokens for each in completions] == [(1, 2, 3, 4, 5)] * 3
    assert [step.id for step in engine.recorder.steps] == begun
    assert [step.id for step in engine.recorder.steps if step.failed] == [at]
    is_planned_behind = where == "hook" and at < 4  # what fails at once is known before the next is planned
    assert (at + 1 in begun) != is_planned_behind
    assert rests(engine)


@pytest.mark.parametrize("at", range(4))
def test_a_step_that_fails_alone_ends_its_request(at: int) -> None:
    """One by one there is nobody to share the blame with; the next request is unharmed."""
    engine, executor = pretending(one_by_one)
    executor.hook = failing_once(at, RuntimeError("shapes differ"))
    bad, good = engine.generate([[1, 2], [3, 4]], forced(4))
    assert (bad.finish_reason, len(bad.tokens)) == ("error", at)
    assert good.tokens == (1, 2, 3, 4)
    assert rests(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_running_out_of_memory_shrinks_the_step_and_everybody_finishes(policy: str) -> None:
    """Steps above 24 positions fail; after smaller ones every request has all its tokens."""
    engine, executor = pretending(POLICIES[policy])
    executor.fake.max_positions = 24
    completions = engine.generate([tokens_of(seed, 12) for seed in range(9)], forced(5))
    assert [each.tokens for each in completions] == [(1, 2, 3, 4, 5)] * 9
    assert rests(engine)


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_decodes_that_run_out_of_memory_stay_in_halves(policy: str) -> None:
    """With the next round planned behind the one that failed, a batch still learns its size, and fails once."""
    engine, executor = pretending(POLICIES[policy])
    executor.start_hook = lambda plan: setattr(executor.fake, "max_positions", 3 if plan.id > 2 else None)
    engine.generate([[seed] for seed in range(6)], forced(12))
    assert sum(step.failed is not None for step in engine.recorder.steps) == 1
    assert {len(step.rows) for step in engine.recorder.steps[6:]} == {3}
    assert rests(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_breaks_every_step_errs_alone(policy: str) -> None:
    """It is found by halving, and no innocent row is given up for having been planned beside it."""
    engine, executor = pretending(POLICIES[policy])
    executor.fake.poison = {"request-3"}
    completions = engine.generate([tokens_of(seed, 6) for seed in range(8)], forced(5))
    bad = completions.pop(3)
    assert (bad.finish_reason, bad.tokens) == ("error", ())
    assert [each.tokens for each in completions] == [(1, 2, 3, 4, 5)] * 7
    assert sum(step.failed is not None for step in engine.recorder.steps) <= 1 + 2 * 3
    assert rests(engine)


def test_who_was_preempted_by_a_step_that_was_not_run_is_in_the_records() -> None:
    """Every preemption is told by a step, so that what is computed again is not taken for new work."""
    prompts = [tokens_of(seed, 5 + seed) for seed in range(8)]
    num_told = []
    for at in range(3, 60):
        engine, executor = pretending(POLICIES["utilization"], Memory(9, 4, 128))
        executor.hook = failing_once(at, RuntimeError("shapes differ"))
        engine.generate(prompts, forced(20))
        told = [request_id for step in engine.recorder.steps for request_id in step.preempted]
        assert sorted(told) == sorted(
            record.id for record in engine.recorder.requests for _ in range(record.num_preempted)
        )
        num_told.append(len(told))
    assert min(num_told) > 0


# ---- interrupts


@pytest.mark.parametrize("where", ["start_hook", "hook"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), AssertionError("a bug"), IndexError("ours")])
def test_an_interrupt_or_a_bug_passes_through_and_leaves_the_engine_usable(error: BaseException, where: str) -> None:
    """It reaches the caller; the stream it ended has aborted its requests, and all pages are back."""
    for at in range(6):
        engine, executor = pretending()
        setattr(executor, where, failing_once(at, error))
        with pytest.raises(type(error)):
            engine.generate([tokens_of(seed, 9) for seed in range(4)], forced(9))
        assert rests(engine)
        assert set(ends(engine).values()) == {"abort"}
        assert engine.generate([[1, 2]], forced(3))[0].tokens == (1, 2, 3)


@pytest.mark.parametrize("where", ["start_hook", "hook"])
@pytest.mark.parametrize("policy", POLICIES)
def test_after_an_interrupt_the_next_step_goes_on(policy: str, where: str) -> None:
    """Nobody is given up for it, also where a step has a single row: all tokens come, once."""
    for at in range(4):
        engine, executor = pretending(POLICIES[policy])
        setattr(executor, where, failing_once(at, KeyboardInterrupt()))
        got: list[Output] = []
        for seed in range(3):
            engine.submit([seed], forced(4), on_output=got.append)
        engine.flush()
        with pytest.raises(KeyboardInterrupt):
            drain(engine)
        drain(engine)
        assert sorted(output.token for output in got if output.token) == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
        assert set(ends(engine).values()) == {"length"}
        assert rests(engine)


@pytest.mark.parametrize("policy", [one_by_one, lambda memory: static(memory, 3), Continuous])
@pytest.mark.parametrize("at", range(2, 50))
def test_ctrl_c_anywhere_leaves_a_usable_engine(policy: Policy, at: int) -> None:
    """At the n-th look at the clock: no page is lost, and what runs afterwards ends."""
    looks = count(1)

    def clock() -> float:
        number = next(looks)
        if number == at:
            signal.raise_signal(signal.SIGINT)
        return float(number)

    engine, _ = pretending(policy, clock=clock)
    while next(looks) <= at:
        with suppress(KeyboardInterrupt):
            engine.generate([[1, 2, 3], [4, 5]], forced(3))
    engine.abort("nobody")
    assert rests(engine)
    assert [one.finish_reason for one in engine.generate([[1], [2]], forced(2))] == ["length"] * 2


# ---- flush, wakeup and wait while a step runs


def test_a_flush_while_a_step_runs_lets_the_rest_go_when_it_can() -> None:
    """The second, incomplete batch leaves when the first is done."""
    engine, executor = pretending(lambda memory: static(memory, 2))
    for seed in range(3):
        engine.submit([seed], forced(3), request_id=f"{seed}")
    engine.step()
    assert executor.running is not None
    engine.flush()
    while engine.step():
        pass
    assert list(ends(engine)) == ["0", "1", "2"]
    assert rests(engine)


def test_a_dynamic_batch_that_comes_due_while_another_runs_follows_it() -> None:
    """`wakeup` speaks of what waits; `wait` is for when nothing runs."""
    clock = VirtualClock()
    engine, executor = pretending(lambda memory: dynamic(memory, DynamicSettings(2, 1.0)), clock=clock.now)
    for seed in range(2):
        engine.submit([seed], forced(4))
    engine.step()
    late = engine.submit([7], forced(2), deadline=50.0)
    assert executor.running is not None
    assert engine.wakeup() == 50.0
    clock.advance_to(2.0)
    while engine.step():
        pass
    assert ends(engine)[late] == "length"
    assert engine.wakeup() is None
    engine.wait(until=clock.now())
    assert rests(engine)


# ---- everything at once


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_is_lost_whatever_happens(policy: str, seed: int) -> None:
    """Arrivals, aborts, deadlines, failures and interrupts by chance: each ends once, with tokens 1, 2, 3 and so on."""
    chance, clock = random.Random(seed), VirtualClock()
    engine, executor = pretending(POLICIES[policy], Memory(24, 4, 60), clock=clock.now)
    got: dict[str, list[Output]] = {}

    def trouble(plan: StepPlan) -> None:
        draw = chance.random()
        if draw < 0.06:
            raise chance.choice([MemoryError("full"), RuntimeError("broken"), KeyboardInterrupt(), IndexError("bug")])

    executor.hook = executor.start_hook = trouble

    def submit(number: int) -> None:
        outputs: list[Output] = []
        stop = (chance.randint(1, 9),) if chance.random() < 0.3 else ()
        params = SamplingParams(max_tokens=chance.randint(1, 12), ignore_eos=True, stop_token_ids=stop)
        deadline = chance.choice([None, None, 3.0])
        with suppress(RequestError):
            prompt = tokens_of(number, chance.randint(1, 30))
            got[engine.submit(prompt, params, deadline=deadline, on_output=outputs.append)] = outputs

    for number in range(150):
        draw = chance.random()
        with suppress(KeyboardInterrupt, IndexError):
            if draw < 0.25:
                submit(number)
            elif draw < 0.30 and got:
                engine.abort(chance.choice(sorted(got)))
            elif draw < 0.40:
                clock.advance_by(chance.random())
            elif draw < 0.45:
                engine.flush()
            else:
                engine.step()
    engine.flush()
    while engine.num_live:
        with suppress(KeyboardInterrupt, IndexError):
            engine.step()
    engine.abort("nobody")
    for outputs in got.values():
        tokens = [output.token for output in outputs if output.token is not None]
        assert tokens == list(range(1, len(tokens) + 1))
        assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {record.id: record.num_output for record in engine.recorder.requests} == {
        request_id: sum(output.token is not None for output in outputs) for request_id, outputs in got.items()
    }
    assert rests(engine)
