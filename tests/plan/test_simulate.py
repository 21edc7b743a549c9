"""The simulator against queueing theory, hand-made timelines and itself."""

import random
from collections.abc import Callable
from statistics import fmean

import pytest

from batchwright import traffic
from batchwright.errors import ConfigError
from batchwright.plan.simulate import Arrival, Simulation, arrivals, simulate
from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.dynamic import DynamicSettings, dynamic
from batchwright.policy.order import Queueing, by_arrival
from batchwright.policy.pages import Memory
from batchwright.policy.speculation import Speculation
from batchwright.policy.static import one_by_one, static
from batchwright.policy.types import Request, Scheduler, StepPlan

MEMORY = Memory(num_pages=40, page_size=8, context=128)

POLICIES: dict[str, Callable[[], Scheduler]] = {
    "one by one": lambda: one_by_one(MEMORY),
    "static": lambda: static(MEMORY, 4),
    "dynamic": lambda: dynamic(MEMORY, DynamicSettings(4, max_queue_delay=0.5)),
    "continuous": lambda: Continuous(MEMORY),
    "continuous, guaranteed": lambda: Continuous(MEMORY, ContinuousSettings(capacity="guaranteed")),
}


def one_second(plan: StepPlan) -> float:
    return 1.0


def by_work(plan: StepPlan) -> float:
    return 0.01 + 0.001 * sum(chunk.num_tokens + chunk.padding for chunk in plan.chunks)


def poisson_load(num: int = 150, rate: float = 8.0) -> list[Arrival]:
    lengths = zip(
        traffic.uniform_lengths(1, 60, seed=1), traffic.lognormal_lengths(12, 1.0, 1, 60, seed=2), strict=False
    )
    return list(arrivals(traffic.limit(traffic.generate(traffic.poisson(rate, seed=3), lengths), num), 8, 64))


def at_once(*lengths: tuple[int, int]) -> list[Arrival]:
    return [Arrival(0.0, Request(str(i), prompt, output), output) for i, (prompt, output) in enumerate(lengths)]


def mean_wait(service: Callable[[StepPlan], float], rate: float, num: int) -> float:
    """Mean time from arrival to service of single-step requests at one server."""
    load = traffic.limit(traffic.generate(traffic.poisson(rate, seed=11), iter(lambda: (1, 1), None)), num)
    server = one_by_one(Memory(1, 8, 8), Queueing(order=by_arrival))
    done = simulate(server, arrivals(load, 8), service)
    return fmean(record.started - record.arrival for record in done.requests)


# ---- closed forms


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_fixed_service_times_wait_as_in_an_m_d_1_queue(load: float) -> None:
    """Mean wait is load / (2 (1 - load)) service times (Pollaczek-Khinchine with no variance)."""
    assert mean_wait(one_second, load, 40_000) == pytest.approx(load / (2 * (1 - load)), rel=0.05)


def test_exponential_service_times_wait_as_in_an_m_m_1_queue() -> None:
    """Mean wait is load / (1 - load) service times: twice that of fixed ones."""
    rng = random.Random(5)
    assert mean_wait(lambda plan: rng.expovariate(1.0), 0.5, 40_000) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    ("policy", "makespan"),
    [
        (lambda: one_by_one(MEMORY), 3 + 1 + 2 + 2),
        (lambda: static(MEMORY, 2), 3 + 2),
        (lambda: static(MEMORY, 3), 3 + 2),
        (lambda: static(MEMORY, 4), 3),
        (lambda: dynamic(MEMORY, DynamicSettings(3, max_queue_delay=9.0)), 3 + 2),
        (lambda: Continuous(MEMORY, ContinuousSettings(max_rows=2)), 3 + 2),
        (lambda: Continuous(MEMORY), 3),
    ],
)
def test_outputs_of_3_1_2_and_2_tokens_at_once_take_as_long_as_on_paper(policy, makespan: float) -> None:
    """One-second steps. Two continuous rows: 0 and 1, then 2 beside 0 from step 2, then 3 in the row of either."""
    done = simulate(policy(), at_once((4, 3), (4, 1), (4, 2), (4, 2)), one_second)
    assert done.makespan == makespan
    assert sorted(record.num_output for record in done.requests) == [1, 2, 2, 3]


# ---- what every run keeps


@pytest.mark.parametrize("name", POLICIES)
def test_every_request_of_a_poisson_load_ends_once_with_its_tokens(name: str) -> None:
    """One record each, with as many token times as its true length, in order."""
    load = poisson_load()
    done = simulate(POLICIES[name](), load, by_work)
    assert sorted(record.id for record in done.requests) == sorted(each.request.id for each in load)
    outputs = {each.request.id: each.num_output for each in load}
    for record in done.requests:
        assert record.num_output == outputs[record.id] == len(record.token_times)
        assert record.finish_reason == "stop"
        assert record.arrival <= record.started < record.token_times[0]
        assert record.token_times[-1] == record.finished
    assert done.makespan == max(record.finished for record in done.requests) - load[0].time


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_run_twice_gives_the_same_records(name: str) -> None:
    """Nothing depends on anything but the events."""
    assert simulate(POLICIES[name](), poisson_load(), by_work) == simulate(POLICIES[name](), poisson_load(), by_work)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("max_in_flight", [2, 3])
def test_planning_ahead_gives_the_same_tokens(name: str, max_in_flight: int) -> None:
    """Steps follow each other without a gap, and the late rows of ended requests are thrown away."""
    once, ahead = (
        simulate(POLICIES[name](), poisson_load(), by_work, max_in_flight=number) for number in (1, max_in_flight)
    )
    assert {record.id: record.num_output for record in once.requests} == {
        record.id: record.num_output for record in ahead.requests
    }


@pytest.mark.parametrize("name", POLICIES)
def test_steps_never_overlap_nor_start_before_the_first_arrival(name: str) -> None:
    """One machine runs one step at a time, in the order of the plans, also when it is planned ahead."""
    done = simulate(POLICIES[name](), poisson_load(), by_work, max_in_flight=2)
    for before, after in zip(done.steps, done.steps[1:], strict=False):
        assert before.finished <= after.started < after.finished
    assert done.steps[0].started >= min(record.arrival for record in done.requests)
    assert [step.id for step in done.steps] == sorted(step.id for step in done.steps)


def test_a_plan_made_ahead_starts_when_the_step_before_it_ends() -> None:
    """The machine is never idle between two steps."""
    done = simulate(Continuous(MEMORY), at_once((4, 3)), one_second, max_in_flight=2)
    assert [(step.started, step.finished) for step in done.steps] == [(0, 1), (1, 2), (2, 3)]


def test_the_policy_sees_what_the_client_asked_for_not_what_it_will_get() -> None:
    """An answer that stops early says so; one that was cut says that."""
    load = [Arrival(0.0, Request("early", 4, 50), 5), Arrival(0.0, Request("cut", 4, 5), 50)]
    ends = {record.id: record for record in simulate(Continuous(MEMORY), load, one_second).requests}
    assert (ends["early"].num_output, ends["early"].finish_reason) == (5, "stop")
    assert (ends["cut"].num_output, ends["cut"].finish_reason) == (5, "length")


def test_refusals_and_timeouts_are_records_too() -> None:
    """One server busy for 10 s: a request that waits 3 s at most is lost at 3 s, one too long at its arrival."""
    load = [
        Arrival(0.0, Request("served", 4, 10), 10),
        Arrival(0.0, Request("impatient", 4, 1, queue_timeout=3.0), 1),
        Arrival(1.0, Request("endless", 500, 1), 1),
        Arrival(1.0, Request("late", 4, 1, deadline=4.5), 1),
    ]
    ends = {record.id: record for record in simulate(one_by_one(MEMORY), load, one_second).requests}
    assert {key: (record.finished, record.finish_reason) for key, record in ends.items()} == {
        "served": (10.0, "length"),
        "impatient": (3.0, "queue_timeout"),
        "endless": (1.0, "refused"),
        "late": (4.5, "deadline"),
    }
    assert "shorten the prompt" in ends["endless"].error


def test_a_delay_wakes_the_driver_though_nothing_happens() -> None:
    """The first leaves alone when its delay is over: another request is still to come, so nothing was flushed."""
    load = [Arrival(0.0, Request("first", 4, 1), 1), Arrival(100.0, Request("second", 4, 1), 1)]
    done = simulate(dynamic(MEMORY, DynamicSettings(4, max_queue_delay=2.5)), load, one_second)
    assert [record.started for record in done.requests] == [2.5, 100.0]
    assert [step.reason for step in done.steps] == ["deadline", "flush"]


@pytest.mark.parametrize("later", [9.0, 0.0])
def test_what_is_cached_of_a_prompt_is_not_computed_again(later: float) -> None:
    """Two prompts of one trace block, be it at once: the second finds the first's full pages, and computes its own."""
    load = [
        traffic.TrafficRequest("a", 0.0, 40, 2, keys=("shared", "a"), key_block=32),
        traffic.TrafficRequest("b", later, 40, 2, keys=("shared", "b"), key_block=32),
    ]
    done: Simulation = simulate(Continuous(MEMORY), arrivals(load, MEMORY.page_size), one_second)
    assert [record.num_cached for record in done.requests] == [0, 32]


def test_a_policy_that_may_guess_and_is_offered_nothing_runs_as_if_it_might_not() -> None:
    """No simulated machine has guesses."""
    speculating = Continuous(MEMORY, ContinuousSettings(speculation=Speculation()))
    assert simulate(speculating, poisson_load(), by_work) == simulate(Continuous(MEMORY), poisson_load(), by_work)


def test_no_requests_are_no_run() -> None:
    """An empty load is a load."""
    assert simulate(Continuous(MEMORY), [], one_second) == Simulation((), (), 0.0)


def test_arrivals_out_of_order_and_no_plans_in_flight_are_refused() -> None:
    """Both are mistakes of the caller, and are told as such."""
    load = [Arrival(2.0, Request("a", 4, 1), 1), Arrival(1.0, Request("b", 4, 1), 1)]
    with pytest.raises(ConfigError, match="sort the requests"):
        simulate(Continuous(MEMORY), load, one_second)
    with pytest.raises(ConfigError, match="at least 1"):
        simulate(Continuous(MEMORY), [], one_second, max_in_flight=0)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_cost_that_is_no_duration_neither_loops_for_ever_nor_ends_before_it_starts(name: str, seconds: float) -> None:
    """NaN is never popped from the heap, and -1 s gave a makespan of -1."""
    with pytest.raises(ConfigError, match=f"step 0 .*cost is {seconds} s; .*cost function"):
        simulate(POLICIES[name](), at_once((4, 3)), lambda plan: seconds)


def test_costs_that_add_up_to_infinity_are_refused_where_they_do() -> None:
    """Each is finite; the second step would never end."""
    with pytest.raises(ConfigError, match=r"step 1 from 1e.308 s"):
        simulate(Continuous(MEMORY), at_once((4, 3)), lambda plan: 1e308)


def test_a_step_may_take_no_time() -> None:
    """0 s is a cost: a free machine."""
    assert simulate(Continuous(MEMORY), at_once((4, 3)), lambda plan: 0.0).makespan == 0.0


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("num_before", [0, 1])
def test_an_arrival_at_no_time_does_not_loop_for_ever(time: float, num_before: int) -> None:
    """First or later, it is refused by name."""
    load = [*at_once((4, 1))[:num_before], Arrival(time, Request("never", 4, 1), 1)]
    with pytest.raises(ConfigError, match=f"'never', which arrives at {time} s: time starts at 0"):
        simulate(Continuous(MEMORY), load, one_second)


@pytest.mark.parametrize("num_output", [0, -1])
def test_an_output_of_no_tokens_is_no_failed_assertion(num_output: int) -> None:
    """A request that runs produces its first token; one that never ends would not end the run."""
    with pytest.raises(ConfigError, match=f"'none'.*would produce {num_output} tokens; .*at least 1"):
        simulate(Continuous(MEMORY), [Arrival(0.0, Request("none", 4, 3), num_output)], one_second)


@pytest.mark.parametrize("name", POLICIES)
def test_an_id_that_is_live_twice_is_no_key_error(name: str) -> None:
    """The second would have taken the first one's place."""
    load = [Arrival(0.0, Request("twin", 4, 3), 3), Arrival(1.0, Request("twin", 4, 3), 3)]
    with pytest.raises(ConfigError, match=r"'twin', which arrives at 1.0 s: .*same id; .*id of its own"):
        simulate(POLICIES[name](), load, one_second)


def test_an_id_used_again_does_not_find_its_namesakes_pages() -> None:
    """Prompts without keys are shared with nobody, but keys made of one id were alike: 32 tokens were "cached"."""
    load = [traffic.TrafficRequest("a", time, 40, 2) for time in (0.0, 9.0)]
    with pytest.raises(ConfigError, match="same id"):
        simulate(Continuous(MEMORY), arrivals(load, MEMORY.page_size), one_second)
