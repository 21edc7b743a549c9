"""Speculation through the whole engine: guesses change how many steps it takes, and nothing else."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.pages import Memory
from batchwright.policy.speculation import Speculation
from batchwright.records import Recorder
from batchwright.serve.decoders import native
from batchwright.serve.engine import Engine
from batchwright.serve.loading.weights import LoadedModel, load
from batchwright.serve.outputs import Completion
from batchwright.serve.sampling.params import SamplingParams
from tests.serve.scripted import OverlappingExecutor, forced, tiny, tokens_of, workload64

EAGER = Speculation(max_drafts=6, position_cost=0)
MEMORY = Memory(200, 4, 512)


def engine_of(speculation: Speculation | None, memory: Memory = MEMORY, **how: object) -> Engine:
    policy = partial(Continuous, settings=ContinuousSettings(speculation=speculation))
    return Engine(how.pop("model", tiny()), policy, memory=memory, recorder=partial(Recorder, "run"), **how)


def both(prompts: list[list[int]], params: list[SamplingParams], **how: object) -> tuple[Engine, list[Completion]]:
    """Runs them without and with guesses, and asserts that the answers are equal; the second engine."""
    expected = engine_of(None, **how).generate(prompts, params)
    engine = engine_of(EAGER, **how)
    completions = engine.generate(prompts, params)
    assert [one.tokens for one in completions] == [one.tokens for one in expected]
    assert [one.finish_reason for one in completions] == [one.finish_reason for one in expected]
    assert engine.scheduler.load.pages_held == 0
    return engine, completions


def num_right(engine: Engine) -> tuple[int, int]:
    steps = engine.recorder.complete()[1]
    return sum(step.num_drafts for step in steps), sum(step.num_right for step in steps)


def repetitive(seed: int) -> list[int]:
    return tokens_of(seed, 5) * 6


@pytest.mark.parametrize(
    "params",
    [
        forced(40),
        forced(40, temperature=1.0, top_k=2, seed=1),
        forced(40, temperature=1.0, top_p=0.9, top_k=3, seed=2, logprobs=2),
        forced(40, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-1.5),
        forced(40, n=3, temperature=1.0, top_k=2, seed=3),
        forced(40, prompt_logprobs=1),
    ],
    ids=["greedy", "drawn", "filtered", "penalised", "several", "scored"],
)
def test_guesses_change_no_answer(params: SamplingParams) -> None:
    """Greedy or drawn: each token is drawn with its own randomness, whatever was guessed; some guesses are right."""
    engine, _ = both([repetitive(seed) for seed in range(8)], [params] * 8, deterministic=True)
    drafts, right = num_right(engine)
    assert drafts
    assert 0 < right <= drafts


@pytest.mark.parametrize("executor", [None, OverlappingExecutor], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("memory", [MEMORY, Memory(26, 4, 512)], ids=["roomy", "crowded"])
def test_guesses_change_no_answer_in_any_company(executor: Callable[..., object] | None, memory: Memory) -> None:
    """Rows that guess beside rows that don't, prompts in chunks, preemption, steps planned ahead."""
    prompts = [repetitive(seed) if seed % 2 else tokens_of(seed, 17 + seed) for seed in range(6)]
    engine, _ = both(prompts, [forced(10 + 7 * row) for row in range(6)], memory=memory, executor=executor)
    assert num_right(engine)[1]
    if memory is not MEMORY:
        assert sum(record.num_preempted for record in engine.recorder.requests)


def test_an_answer_ends_in_the_middle_of_its_right_guesses() -> None:
    """A stop token among them: what was guessed behind it is nobody's."""
    (free,) = engine_of(None).generate(repetitive(1), forced(60))
    for index in range(20, 40):
        (completion,) = engine_of(EAGER).generate(repetitive(1), forced(60, stop_token_ids=(free.tokens[index],)))
        first = free.tokens.index(free.tokens[index])
        assert completion.tokens == free.tokens[: first + 1]
        assert completion.finish_reason == "stop"


@pytest.mark.parametrize("limit", range(1, 12))
def test_no_answer_is_longer_than_its_limit(limit: int) -> None:
    (completion,) = engine_of(EAGER).generate(repetitive(1), forced(limit))
    assert len(completion.tokens) == limit


def test_64_requests_get_the_same_greedy_tokens() -> None:
    """The real model in float32, on real prompts, in batches that guesses make different."""
    model = load("smollm2", torch.float32, backend="auto")
    jobs = workload64()
    how = {"model": model, "memory": Memory(2000, 16, 2048), "deterministic": model.decoder.ops.invariant}
    engine, completions = both([job.prompt for job in jobs], [forced(min(job.num_output, 48)) for job in jobs], **how)
    assert len(completions) == 64
    assert num_right(engine)[1]


def test_bfloat16_kernels_are_exact_too(smollm2_in_bfloat16: LoadedModel) -> None:
    """A row's bits depend on itself alone, so a guess that is right saves a step and changes no bit."""
    if not smollm2_in_bfloat16.decoder.ops.invariant:
        pytest.skip(f"our kernels cannot run here: {native.why_not(torch.bfloat16, torch.device('cpu'))}")
    jobs = workload64()[:16]
    params = [forced(min(job.num_output, 32), temperature=0.8, seed=row) for row, job in enumerate(jobs)]
    both([job.prompt for job in jobs], params, model=smollm2_in_bfloat16, memory=Memory(2000, 16, 2048))


@pytest.fixture(scope="module")
def smollm2_in_bfloat16() -> LoadedModel:
    return load("smollm2")
