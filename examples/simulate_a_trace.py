"""The schedulers that serve, in virtual time: what would 500 requests do to each? No torch, no model.

Run it with python examples/simulate_a_trace.py.
"""

from itertools import islice

from batchwright.bench.summary import summarize
from batchwright.plan.simulate import arrivals, simulate
from batchwright.policy import Continuous, ContinuousSettings, DynamicSettings, Memory, dynamic, one_by_one, static
from batchwright.policy.types import StepPlan
from batchwright.traffic import generate, lognormal_lengths, poisson

MEMORY = Memory(num_pages=4000, page_size=16, context=4096)


def step_seconds(plan: StepPlan) -> float:
    """A made-up machine: 20 ms to read the weights, or 0.2 ms a position where that is more."""
    num_positions = sum(chunk.num_tokens + chunk.padding for chunk in plan.chunks)
    return max(0.020, 0.0002 * num_positions)


lengths = zip(lognormal_lengths(200, 1.0, 1, 2000, seed=1), lognormal_lengths(100, 1.0, 1, 1000, seed=2), strict=False)
traffic = list(islice(generate(poisson(rate=2.0, seed=3), lengths), 500))

schedulers = {
    "one by one": one_by_one(MEMORY),
    "static": static(MEMORY, batch_size=8),
    "dynamic": dynamic(MEMORY, DynamicSettings(max_batch_size=8, max_queue_delay=0.1)),
    "continuous": Continuous(MEMORY, ContinuousSettings(max_rows=64, token_budget=512)),
}
for name, scheduler in schedulers.items():
    run = simulate(scheduler, arrivals(traffic, MEMORY.page_size), step_seconds)
    summary = summarize(run.requests, run.steps)
    assert summary.ttft and summary.output_rate
    print(f"{name:11} {summary.output_rate:6.0f} tok/s, first token after {summary.ttft.p50:8.2f} s (median)")
