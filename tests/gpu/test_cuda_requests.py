"""What a client can ask for gives the same on a CUDA device as on the CPU: parameters, guesses, several choices."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.pages import Memory
from batchwright.policy.speculation import Speculation
from batchwright.records import Recorder
from batchwright.serve.engine import Engine
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sampling.sampler import Row, Sampler
from tests.serve.conftest import make_checkpoint  # noqa: F401 - a fixture
from tests.serve.test_constrained_requests import PROMPTS, holds, params_of

pytestmark = pytest.mark.gpu

MEMORY = Memory(num_pages=200, page_size=8, context=256)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "nothing": {},
    "top-k": {"top_k": 17},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "typical": {"typical_p": 0.7},
    "all filters": {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {3: 5.0, 9: -100.0}, "bad_words": [[5], [7, 8]]},
    "allowed": {"allowed_token_ids": list(range(0, 5000, 7))},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_same_logits_choose_the_same_tokens(setting: str) -> None:
    """Exponentials are rounded otherwise there, so that one draw in thousands may differ."""
    logits_BV = 3 * torch.randn(64, 5000, generator=torch.Generator().manual_seed(0))
    chosen = []
    for device in ("cpu", "cuda"):
        sampler, prompt = Sampler(5000, torch.device(device)), [*range(40), 7]
        params = [
            SamplingParams(**{"temperature": 0.8, "seed": index, "logprobs": 3} | SETTINGS[setting])
            for index in range(64)
        ]
        rows = [Row(sampler.add(one, prompt[:20]), prompt, len(prompt)) for one in params]
        chosen.append(sampler.sample(logits_BV.to(device), rows))
    assert all(one.error is None for both in chosen for one in both)
    assert sum(here.token != there.token for here, there in zip(*chosen, strict=True)) <= 1
    for here, there in zip(*chosen, strict=True):
        if here.token == there.token:
            assert here.logprob == pytest.approx(there.logprob, abs=1e-5)


def test_guesses_choices_and_scores_are_the_cpus(make_checkpoint: Callable[..., Path]) -> None:  # noqa: F811
    """In float32; rows that guess miss the step that is planned while theirs runs."""
    torch.backends.cuda.matmul.allow_tf32 = False
    path = make_checkpoint()
    prompts = [[(7 * index + step % 5) % 97 for step in range(20 + index)] for index in range(8)]
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, temperature=1e-4, seed=index, n=1 + index % 2, prompt_logprobs=1)
        for index in range(8)
    ]
    policy = partial(Continuous, settings=ContinuousSettings(token_budget=64, speculation=Speculation(position_cost=0)))
    here, there = (
        Engine(path, policy, memory=MEMORY, device=device, dtype=torch.float32, recorder=partial(Recorder, "run"))
        for device in ("cuda", "cpu")
    )
    for mine, theirs in zip(here.generate(prompts, params), there.generate(prompts, params), strict=True):
        assert mine.tokens == theirs.tokens
        assert [one.tokens for one in mine.alternatives] == [one.tokens for one in theirs.alternatives]
        scores = [one[0] for one in mine.prompt_logprobs if one]
        assert scores == pytest.approx([one[0] for one in theirs.prompt_logprobs if one], abs=1e-4)
    assert sum(step.num_right for step in here.recorder.complete()[1])


def test_constrained_requests_have_their_form() -> None:
    """Masks are made in pinned memory while the forward runs, and some of the rows are free."""
    engine = Engine("smollm2", memory=MEMORY, device="cuda")
    completions = engine.generate(PROMPTS, [params_of(row) for row in range(len(PROMPTS))])
    assert all(one.error is None for one in completions)
    assert all(holds(one, row) for row, one in enumerate(completions) if one.finish_reason == "stop")
    assert [one.finish_reason for one in completions].count("stop") >= 8
    assert engine.scheduler.load.pages_held == 0
