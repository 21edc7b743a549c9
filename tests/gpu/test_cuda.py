"""The engine on a CUDA device does what it does on the CPU: same tokens in float32, same choices whatever the batch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.pages import Memory
from batchwright.policy.static import static
from batchwright.policy.types import Scheduler
from batchwright.serve.engine import Engine
from batchwright.serve.outputs import Completion
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sampling.sampler import Row, Sampler
from tests.serve.conftest import make_checkpoint  # noqa: F401 - a fixture

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * index + step) % 97 for step in range(1 + 5 * index)] for index in range(12)]
MEMORY = Memory(num_pages=14, page_size=8, context=256)
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=3)


def crowded(memory: Memory) -> Scheduler:
    return Continuous(memory, ContinuousSettings(token_budget=40, chunk_cap=13))


def run(path: Path, device: str, policy: Callable[[Memory], Scheduler], dtype: torch.dtype) -> list[Completion]:
    return Engine(str(path), policy, memory=MEMORY, device=device, dtype=dtype).generate(PROMPTS, PARAMS)


def test_float32_tokens_equal_the_cpus_under_chunks_preemption_and_padding(
    make_checkpoint: Callable[..., Path],  # noqa: F811
) -> None:
    """Continuous in a pool that preempts, and static with padding and dead rows."""
    torch.backends.cuda.matmul.allow_tf32 = False
    path = make_checkpoint()
    expected = [completion.tokens for completion in run(path, "cpu", crowded, torch.float32)]

    assert expected == [completion.tokens for completion in run(path, "cuda", crowded, torch.float32)]
    assert expected == [completion.tokens for completion in run(path, "cuda", lambda m: static(m, 2), torch.float32)]


def test_planned_ahead_or_not_stops_give_the_cpus_tokens(
    make_checkpoint: Callable[..., Path],  # noqa: F811
) -> None:
    """A step is in flight between two calls, with rows of requests that turn out to have ended."""
    torch.backends.cuda.matmul.allow_tf32 = False
    path, params = make_checkpoint(), SamplingParams(max_tokens=40, stop_token_ids=tuple(range(0, 97, 9)))
    there = Engine(str(path), crowded, memory=MEMORY, device="cpu", dtype=torch.float32)
    here = Engine(str(path), crowded, memory=MEMORY, device="cuda", dtype=torch.float32)
    expected = there.generate(PROMPTS, params)

    assert here.executor.overlaps
    assert [completion.tokens for completion in here.generate(PROMPTS, params)] == [one.tokens for one in expected]
    assert {one.finish_reason for one in expected} >= {"stop"}
    assert here.scheduler.load.num_in_flight == here.scheduler.load.pages_held == 0
    for prompt in PROMPTS[:3]:
        here.submit(prompt, params)
    here.step()
    assert here.scheduler.load.num_in_flight == 1


def test_bfloat16_logprobs_are_near_float32s(make_checkpoint: Callable[..., Path]) -> None:  # noqa: F811
    """The first token's log-probabilities, before any choice can differ, are within 0.1."""
    path = make_checkpoint()
    exact, rounded = (run(path, "cuda", crowded, dtype) for dtype in (torch.float32, torch.bfloat16))

    for one, other in zip(exact, rounded, strict=True):
        assert other.logprobs[0][1][0][1] == pytest.approx(one.logprobs[0][1][0][1], abs=0.1)


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"top_k": 50, "top_p": 0.9},
        {"top_p": 0.99},
        {"min_p": 0.01},
        {"typical_p": 0.9},
        {"repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_a_draw_depends_on_its_own_row_alone(setting: dict[str, float]) -> None:
    """Bitwise, on the device: alone, and among 64 others."""
    logits_BV = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)).cuda()
    sampler, prompt = Sampler(5000, torch.device("cuda")), list(range(40))
    params = [SamplingParams(temperature=0.8, seed=index, logprobs=5, **setting) for index in range(64)]
    rows = [Row(sampler.add(one, prompt), prompt, len(prompt)) for one in params]
    together = sampler.sample(logits_BV, rows)

    assert together == [sampler.sample(logits_BV[index : index + 1], rows[index : index + 1])[0] for index in range(64)]
    assert all(one.error is None for one in together)
