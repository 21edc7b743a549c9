"""What the serving tests share: tiny models beside their references, executors that watch or pretend, a workload."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from batchwright.policy.pages import Memory
from batchwright.policy.types import Dropped, Request, Scheduler, StepOutcome, StepPlan
from batchwright.serve.decoders.model import Decoder
from batchwright.serve.executor import TorchExecutor, TorchPending
from batchwright.serve.keys import PageKeys
from batchwright.serve.loading.weights import LoadedModel
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sampling.sampler import Sampled
from batchwright.serve.sequences import NO_EXTRAS, Extras, RowResult
from batchwright.testing import FakeExecutor
from tests.serve.conftest import TINY

WORKLOAD = Path(__file__).parents[1] / "data" / "workload64.json"


class Job(NamedTuple):
    prompt: list[int]
    num_output: int


def workload64() -> list[Job]:
    return [Job(one["prompt"], one["out"]) for one in json.loads(WORKLOAD.read_text())["requests"]]


def forced(num_output: int, **changes: Any) -> SamplingParams:
    """Greedy, and exactly so many tokens."""
    return SamplingParams(max_tokens=num_output, ignore_eos=True, **changes)


@cache
def reference(**changes: Any) -> LlamaForCausalLM:
    """A random Llama as transformers runs it: grouped queries, 97 tokens, untied head."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY | {"max_position_embeddings": 2048} | changes)).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@cache
def tiny(dtype: torch.dtype = torch.float32, poison: int | None = None) -> LoadedModel:
    """The same weights as we run them. `poison`: a token whose embedding is NaN, which no loader would let pass."""
    state = reference().state_dict()

    def take(name: str) -> Tensor:
        tensor = state[name].to(dtype, copy=True)
        if poison is not None and name == "model.embed_tokens.weight":
            tensor[poison] = torch.nan
        return tensor

    config = reference().config.to_dict()
    return LoadedModel("tiny", Decoder(config, take), None, "it is random", (), config)


def reference_logits(tokens: Sequence[int]) -> Tensor:
    """What transformers gives after each of `tokens`, in one pass without a cache."""
    with torch.inference_mode():
        return reference()(torch.tensor(tokens)[None], use_cache=False).logits[0]


def tokens_of(seed: int, length: int) -> list[int]:
    """Random ids of the tiny model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TINY["vocab_size"], (length,), generator=generator).tolist()


class WatchedExecutor(TorchExecutor):
    """Keeps the logits of every row that sampled: (request, tokens before it) -> logits."""

    def __init__(self, decoder: Decoder, memory: Memory) -> None:
        super().__init__(decoder, memory)
        self.logits: dict[tuple[str, int], Tensor] = {}
        self.kv.pages_LPMSD.fill_(torch.nan)  # whatever a page held before must never show

    def start(self, plan: StepPlan) -> TorchPending:
        pending = super().start(plan)
        ends = {chunk.request_id: chunk.start + chunk.num_tokens for chunk in plan.chunks if chunk.samples}
        for logits_V, request_id in zip(pending.logits_RV, pending.feed.sampling_ids, strict=True):
            self.logits[request_id, ends[request_id]] = logits_V.clone()
        return pending

    def worst(self, sequences: dict[str, list[int]]) -> float:
        """The largest difference to the reference, over all that was sampled; `sequences`: prompts with outputs."""
        expected = {request_id: reference_logits(tokens) for request_id, tokens in sequences.items()}
        assert self.logits
        differences = [
            logits_V - expected[request_id][num_before - 1]
            for (request_id, num_before), logits_V in self.logits.items()
        ]
        return float(torch.stack(differences).abs().max())


class OverlappingExecutor(WatchedExecutor):
    """Computes on the CPU, and says that it overlaps; asserts that it is asked for one step after the other."""

    def __init__(self, decoder: Decoder, memory: Memory) -> None:
        super().__init__(decoder, memory)
        self.overlaps = True
        self.started: list[StepPlan] = []
        self.running: StepPlan | None = None

    def start(self, plan: StepPlan) -> Any:
        assert self.running is None, f"plan {plan.id} is started beside plan {self.running}"
        self.started.append(plan)
        pending, self.running = super().start(plan), plan
        return Pretended(partial(self._land, pending))

    def _land(self, pending: TorchPending) -> list[RowResult]:
        self.running = None
        return pending.result()


class Pretended(NamedTuple):
    """A step whose work is done when its result is asked for."""

    result: Callable[[], list[RowResult]]
    expert_tokens: tuple[tuple[int, ...], ...] = ()


class PretendingExecutor:
    """Behind the engine's seam, `testing.FakeExecutor`, which asserts that pages are used rightly; tokens are counted.

    Token n of a request is n, and `errors` and `hook` (called with every plan, may raise) make trouble, as does
    `start_hook` when a plan is started. Where it `overlaps`, the engine's scheduler must be `Told`.
    """

    def __init__(self, decoder: Decoder, memory: Memory, *, overlaps: bool = False) -> None:
        self.fake = FakeExecutor(memory, {})
        self.overlaps = overlaps
        self.hook: Callable[[StepPlan], None] = lambda plan: None
        self.start_hook: Callable[[StepPlan], None] = lambda plan: None
        self.errors: dict[str, str] = {}
        self.added: list[str] = []
        self.running: StepPlan | None = None
        self._tried: set[int] = set()  # plans that were executed, with or without success
        self._memory = memory
        self._lengths: dict[str, int] = {}
        self.fake.lengths = self._lengths

    def add(self, request_id: str, tokens: Sequence[int], params: SamplingParams, extras: Extras = NO_EXTRAS) -> None:
        self.added.append(request_id)
        self._lengths[request_id] = 1 << 40  # the engine says when it ends
        keys = PageKeys(self._memory.page_size).push(tokens)
        self.fake.receive(Request(request_id, len(tokens), params.max_tokens, keys=keys), 1 << 40)

    def remove(self, request_id: str) -> None:
        self.fake.forget(request_id)

    def start(self, plan: StepPlan) -> Pretended:
        self._fail_through(self.start_hook, plan)
        self.running = plan
        return Pretended(partial(self._execute, plan))

    def hear(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """What became of `plan`."""
        if outcome.failed == "void" and plan.id not in self._tried:
            self.fake.skip(plan)

    def _execute(self, plan: StepPlan) -> list[RowResult]:
        self.running = None
        self._fail_through(self.hook, plan)
        self._tried.add(plan.id)
        outcome = self.fake.execute(plan)
        if outcome.failed == "oom":
            raise MemoryError
        if outcome.failed:
            raise RuntimeError("a step broke")
        return list(self._results(plan))

    def _fail_through(self, hook: Callable[[StepPlan], None], plan: StepPlan) -> None:
        try:
            hook(plan)
        except BaseException:
            self._tried.add(plan.id)
            self.fake.failures = {self.fake.num_steps: "exception"}
            self.fake.execute(plan)
            raise

    def _results(self, plan: StepPlan) -> Iterator[RowResult]:
        for chunk in plan.chunks:
            if chunk.samples and chunk.request_id is not None:
                error = self.errors.get(chunk.request_id)
                number = self.fake.num_outputs(chunk.request_id) if self.fake.is_live(chunk.request_id) else 0
                yield RowResult(chunk.request_id, (Sampled(number) if error is None else Sampled(-1, error=error),))


class Told:
    """A scheduler that tells `listener` of every plan with its outcome, before it learns of that itself."""

    listener: Callable[[StepPlan, StepOutcome], None]

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._plans: dict[int, StepPlan] = {}

    def plan(self, now: float) -> StepPlan | None:
        plan = self._scheduler.plan(now)
        if plan is not None:
            self._plans[plan.id] = plan
        return plan

    def commit(self, plan_id: int, now: float, outcome: StepOutcome) -> tuple[Dropped, ...]:
        self.listener(self._plans.pop(plan_id), outcome)
        return self._scheduler.commit(plan_id, now, outcome)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)
