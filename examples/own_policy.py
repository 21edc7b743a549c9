"""A scheduler of your own: shortest prompts first, under the same engine. A policy is told lengths, never text.

Run it with python examples/own_policy.py.
"""

from batchwright import Engine, SamplingParams
from batchwright.policy import Continuous, ContinuousSettings, Memory, Queueing
from batchwright.policy.types import Request

SECONDS_PER_TOKEN = 0.01


def shortest_first(request: Request, arrival: float) -> tuple[int, float]:
    """Every prompt token counts as if the request had come 10 ms later, so nobody waits for ever."""
    return 0, arrival + SECONDS_PER_TOKEN * request.num_prompt


def policy(memory: Memory) -> Continuous:
    """One request at a time, so that the order shows."""
    return Continuous(memory, ContinuousSettings(max_rows=1, queueing=Queueing(order=shortest_first)))


engine = Engine("smollm2", policy)
prompts = ["a long prompt, " * 20, "a shorter one, " * 5, "Hi"]
for output in engine.stream(prompts, SamplingParams(max_tokens=4)):
    if output.finish_reason:
        print(f"{output.request_id} ended: its prompt was {prompts[int(output.request_id[-1])][:20]!r}")
