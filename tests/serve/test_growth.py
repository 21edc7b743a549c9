"""An engine may live for ever: after thousands of requests it holds what it held before them.

Half of the traffic fills every cache and list that is bounded; what the live heap gains in the other half is growth.
Only what Python allocates is seen; the tensors of the real model's pages are allocated once.
"""

import gc
import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from batchwright.errors import RequestError
from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.pages import Memory
from batchwright.policy.static import static
from batchwright.policy.types import StepPlan
from batchwright.records import Recorder
from batchwright.serve.decoders.model import Decoder
from batchwright.serve.engine import Engine, Policy
from batchwright.serve.executor import TorchExecutor
from batchwright.serve.loading.weights import LoadedModel
from batchwright.serve.outputs import Output
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sampling.sampler import Sampled
from batchwright.serve.sequences import NO_EXTRAS, Extras, RowResult
from batchwright.testing import VirtualClock
from tests.serve.scripted import forced, tiny

MEMORY = Memory(num_pages=60, page_size=4, context=64)
NUM_PER_WAVE = 25
MOST_GROWTH = 64 * 1024
"""Bytes, over all requests of the second half; a number kept for each of 5,000 would be 180,000."""

POLICIES: dict[str, Policy] = {
    "continuous": lambda memory: Continuous(memory, ContinuousSettings(max_rows=8, token_budget=32)),
    "static": lambda memory: static(memory, 6),
}


class Answering:
    """An executor that answers at once, token after token from 300 on; some rows err, some steps fail."""

    expert_tokens = ()

    def __init__(self, decoder: Any, memory: Memory, *, overlaps: bool = True) -> None:
        self.overlaps = overlaps
        self._chance = random.Random(0)
        self._plan: StepPlan | None = None

    def add(self, request_id: str, tokens: Sequence[int], params: SamplingParams, extras: Extras = NO_EXTRAS) -> None:
        pass

    def remove(self, request_id: str) -> None:
        pass

    def start(self, plan: StepPlan) -> "Answering":
        self._plan = plan
        return self

    def result(self) -> list[RowResult]:
        plan, self._plan = self._plan, None
        assert plan
        if self._chance.random() < 0.01:
            raise RuntimeError("a step broke")
        return [RowResult(chunk.request_id, (self._sampled(chunk.start),)) for chunk in plan.chunks if chunk.samples]

    def _sampled(self, position: int) -> Sampled:
        return (
            Sampled(-1, error="look: it is bad; try again") if self._chance.random() < 0.01 else Sampled(300 + position)
        )


class Traffic:
    """Waves of short requests into one engine: most end by their limit or a stop, the others in every other way."""

    def __init__(self, engine: Engine, clock: VirtualClock, vocabulary: int) -> None:
        self._vocabulary = engine.model.decoder.shape.vocab
        self.engine = engine
        self.chance = random.Random(1)
        self._clock = clock
        self._prompts = [[self.chance.randrange(vocabulary) for _ in range(18)] for _ in range(40)]
        self.ends: set[str] = set()

    def wave(self) -> None:
        """`NUM_PER_WAVE` requests, from the first to the last of their ends."""
        chance = self.chance
        with suppress(RequestError):
            self.engine.submit([1] * 64, forced(1))
        ids = [self._submit(number) for number in range(NUM_PER_WAVE)]
        self.engine.flush()
        while self.engine.num_live:
            self._clock.advance_by(0.125)
            self.engine.step()
            if chance.random() < 0.1:
                self.engine.abort(chance.choice(ids))
        self.engine.step()  # takes what is left of those without a callback

    def _submit(self, number: int) -> str:
        chance = self.chance
        stop = ("e",) if chance.random() < 0.2 and self.engine.model.tokenizer else ()
        first = min(300, self._vocabulary - 30)
        stop_ids = (chance.randrange(first, first + 30),) if chance.random() < 0.2 else ()
        params = SamplingParams(max_tokens=chance.randint(1, 5), stop=stop, stop_token_ids=stop_ids)
        prompt = chance.choice(self._prompts)[: chance.randint(1, 18)]
        deadline = 1.0 if chance.random() < 0.1 else None
        timeout = 0.5 if chance.random() < 0.1 else None
        listener = None if number % 5 == 0 else self._raise if number % 25 == 1 else self._note
        return self.engine.submit(prompt, params, deadline=deadline, queue_timeout=timeout, on_output=listener)

    def _note(self, output: Output) -> None:
        if output.finish_reason:
            self.ends.add(output.finish_reason)

    def _raise(self, output: Output) -> None:
        raise ValueError("a callback that raises")


@pytest.fixture
def heap() -> Iterator[Callable[[], int]]:
    """Bytes that Python has allocated since the test began and not freed."""

    def measure() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    yield measure
    tracemalloc.stop()


def growth(traffic: Traffic, num_requests: int, heap: Callable[[], int]) -> int:
    """Bytes that the second half of `num_requests` leaves behind."""
    sizes = []
    for _ in range(2):
        for _ in range(num_requests // NUM_PER_WAVE // 2):
            traffic.wave()
        sizes.append(heap())
    return sizes[1] - sizes[0]


def traffic_of(model: LoadedModel, policy: Policy, vocabulary: int, **more: Any) -> Traffic:
    clock = VirtualClock()
    return Traffic(Engine(model, policy, memory=MEMORY, clock=clock.now, **more), clock, vocabulary)


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind(smollm2: LoadedModel, heap: Callable[[], int]) -> None:
    """The engine as it is by default, with text: its scheduler, prefix cache, streams and records."""
    traffic = traffic_of(smollm2, POLICIES["continuous"], 40_000, executor=Answering)
    assert growth(traffic, 10_000, heap) <= MOST_GROWTH
    assert traffic.ends == {"length", "stop", "abort", "deadline", "queue_timeout", "error"}
    assert len(traffic.engine.recorder.requests) == len(traffic.engine.recorder.steps) == 1000


@pytest.mark.parametrize(("policy", "overlaps"), [("continuous", False), ("static", True)])
def test_nothing_grows_in_other_ways_to_run(
    smollm2: LoadedModel, policy: str, overlaps: bool, heap: Callable[[], int]
) -> None:
    """Step after step, and in batches that run to their end."""
    more = {"executor": partial(Answering, overlaps=overlaps), "recorder": partial(Recorder, "newest", keep=100)}
    traffic = traffic_of(smollm2, POLICIES[policy], 40_000, **more)
    assert growth(traffic, 3_000, heap) <= MOST_GROWTH // 2
    assert traffic.ends == {"length", "stop", "abort", "deadline", "queue_timeout", "error"}


def test_a_recorder_that_keeps_everything_grows(smollm2: LoadedModel, heap: Callable[[], int]) -> None:
    """So growth would be seen: the same traffic, a fifth of it, is over the bound many times."""
    recorder = partial(Recorder, "all")
    traffic = traffic_of(smollm2, POLICIES["continuous"], 40_000, executor=Answering, recorder=recorder)
    assert growth(traffic, 2_000, heap) > 10 * MOST_GROWTH


class Ahead(TorchExecutor):
    """torch on the CPU, planned ahead as on CUDA."""

    def __init__(self, decoder: Decoder, memory: Memory) -> None:
        super().__init__(decoder, memory)
        self.overlaps = True


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_requests_through_a_real_model_leave_nothing_behind(heap: Callable[[], int]) -> None:
    """Token ids, layouts and logits: neither bytes nor tensors are left of four hundred requests."""
    recorder = partial(Recorder, "newest", keep=50)
    traffic = traffic_of(tiny(), POLICIES["continuous"], 97, executor=Ahead, recorder=recorder)
    growth(traffic, 100, heap)
    before = num_tensors()
    assert growth(traffic, 400, heap) <= MOST_GROWTH // 4
    assert num_tensors() == before
