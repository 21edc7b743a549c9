"""Adapters chosen per request, and experts counted per step, through the whole engine."""

from functools import partial
from pathlib import Path

import pytest
import torch

from batchwright.errors import ConfigError, RequestError
from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.pages import Memory
from batchwright.policy.speculation import Speculation
from batchwright.records import Recorder
from batchwright.serve.engine import Engine
from batchwright.serve.loading.weights import load
from tests.serve.conftest import MakeAdapter, MakeCheckpoint
from tests.serve.families import tiny_model
from tests.serve.scripted import forced, tokens_of

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT uses the old name

MEMORY = Memory(64, 4, 256)
LORAS = {
    "rank 4": {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"},
    "rank 8": {"r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "rank 3": {"r": 3, "lora_alpha": 9, "target_modules": ["gate_proj", "o_proj"]},
}


@pytest.fixture
def adapted(make_checkpoint: MakeCheckpoint, make_adapter: MakeAdapter) -> tuple[Path, dict[str, Path]]:
    """A base model and three adapters."""
    base = make_checkpoint(head_dim=16)
    return base, {name: make_adapter(base, name, seed, **lora).path for seed, (name, lora) in enumerate(LORAS.items())}


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("speculation", [None, Speculation(position_cost=0)], ids=["plain", "guessing"])
def test_three_adapters_and_the_base_in_one_batch_give_each_what_it_gives_alone(
    backend: str, speculation: Speculation | None, adapted: tuple[Path, dict[str, Path]]
) -> None:
    """One prompt for all four, so that pages that were shared across adapters would show; twice, so that some are."""
    base, folders = adapted
    model = load(base, torch.float32, backend=backend)
    policy = partial(Continuous, settings=ContinuousSettings(token_budget=30, speculation=speculation))
    names = [None, *folders] * 3
    prompts = [tokens_of(row // 8, 21) for row in range(12)]
    params = [forced(14 + row) for row in range(12)]
    alone = []
    for name, prompt, its_params in zip(names, prompts, params, strict=True):
        engine = Engine(model, policy, memory=MEMORY, adapters=folders)
        alone.append(engine.generate(prompt, its_params, adapter=name)[0].tokens)
    engine = Engine(model, policy, memory=MEMORY, adapters=folders, recorder=partial(Recorder, "run"))
    together = [one.tokens for one in engine.generate(prompts, params, adapter=names)]
    assert together == alone
    assert len(set(alone[:4])) == 4, "the adapters change the answers"
    requests, steps = engine.recorder.complete()
    assert any(request.num_cached for request in requests), "requests with one adapter share pages"
    assert max(step.num_live for step in steps) >= 4


def test_an_unknown_adapter_is_refused(adapted: tuple[Path, dict[str, Path]]) -> None:
    base, folders = adapted
    engine = Engine(base, memory=MEMORY, dtype="float32", adapters=folders)
    with pytest.raises(RequestError, match="use adapter 'rank 5': the engine has rank 3, rank 4, rank 8; name one"):
        engine.submit([1, 2], adapter="rank 5")
    assert engine.generate([[1, 2], [3]], forced(2), adapter=["rank 5", None])[0].finish_reason == "refused"
    with pytest.raises(ConfigError, match="there are 1 adapters; give one for all, or each"):
        engine.generate([[1, 2], [3]], adapter=["rank 4"])
    assert engine.num_live == 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_step_reports_how_many_tokens_each_expert_was_given(deterministic: bool, tmp_path: Path) -> None:
    """All layers but the last route every position; the last routes only those whose logits are wanted."""
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    model = load(tmp_path, torch.float32, backend="torch")
    engine = Engine(model, memory=MEMORY, deterministic=deterministic, recorder=partial(Recorder, "run"))
    engine.generate([tokens_of(seed, 5 + seed) for seed in range(3)], forced(4))
    shape = model.decoder.shape
    for step in engine.recorder.complete()[1]:
        *first, last = (sum(tokens) for tokens in step.expert_tokens)
        num_positions = sum(row.num_tokens for row in step.rows)
        num_drawn = sum(row.samples for row in step.rows)
        assert first == [num_positions * shape.num_experts_per_token] * (shape.num_layers - 1)
        assert last == num_drawn * shape.num_experts_per_token
        assert all(len(tokens) == shape.num_experts for tokens in step.expert_tokens)
