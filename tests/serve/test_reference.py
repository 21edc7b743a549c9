"""The embedded model on real prompts: logits, greedy tokens and quality are those of transformers, in float32.

Its reference is transformers' own Llama, holding the weights as transformers orders them; test_gguf shows that these
are, bit for bit, what the gguf package reads from the file.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.dynamic import DynamicSettings, dynamic
from batchwright.policy.pages import Memory
from batchwright.policy.static import one_by_one, static
from batchwright.policy.types import Scheduler
from batchwright.serve.decoders import linear, native
from batchwright.serve.decoders.backend import Backend
from batchwright.serve.engine import Engine, Policy
from batchwright.serve.loading import weights
from batchwright.serve.loading.gguf_config import config_of_gguf
from batchwright.serve.loading.gguf_file import GgufFile
from batchwright.serve.loading.gguf_model import GgufSource
from batchwright.serve.loading.locate import default_path
from batchwright.serve.loading.weights import LoadedModel
from tests.serve.scripted import Job, WatchedExecutor, forced, workload64

NEAR_TIE = 1e-4  # where the reference's two best logits are closer, either is right
JOBS = workload64()
NUM_IN_BFLOAT16 = 16


@pytest.fixture(scope="module")
def llama(smollm2: LoadedModel) -> LlamaForCausalLM:
    """The file's weights in transformers' Llama, with keys and queries as transformers orders their rows."""
    file = GgufFile(default_path())
    source = GgufSource(file, config_of_gguf(file))
    head_dim = smollm2.decoder.shape.head_dim
    state = {}
    for name in source.shapes:
        tensor = source.tensor(name, torch.float32)
        if ".q_proj." in name or ".k_proj." in name:
            pairs = tensor.view(-1, head_dim // 2, 2, tensor.shape[1])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        state[name] = tensor
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**smollm2.config))
    model.to_empty(device="cpu")
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval()


def needs(backend: str) -> None:
    """Skips where our kernels cannot run."""
    if backend == "native" and (reason := native.why_not(torch.float32, torch.device("cpu"))):
        pytest.skip(f"no kernels here: {reason}")


def reference_logits(llama: LlamaForCausalLM, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """What each of `output` was to be chosen from, in one pass without a cache."""
    tokens_1T = torch.tensor([[*prompt, *output[:-1]]])
    with torch.inference_mode():
        return llama(tokens_1T, use_cache=False, logits_to_keep=len(output)).logits[0]


class Charged(NamedTuple):
    """What the reference says of one request's output; its logits are reduced at once, for they are large."""

    cost: float  # NLL of all its tokens
    num_near_ties: int
    other_choices: list[int]  # outputs where the reference clearly chooses another token


_charged: dict[tuple[tuple[int, ...], tuple[int, ...]], Charged] = {}


def charged(llama: LlamaForCausalLM, prompt: Sequence[int], tokens: tuple[int, ...]) -> Charged:
    """Computed once where several engines write the same."""
    key = tuple(prompt), tokens
    if key not in _charged:
        logits_TV, chosen_T = reference_logits(llama, prompt, tokens), torch.tensor(tokens)
        best_T2 = logits_TV.topk(2).values
        is_near_T = best_T2[:, 0] - best_T2[:, 1] < NEAR_TIE
        differs_T = (logits_TV.argmax(-1) != chosen_T) & ~is_near_T
        cost = float(F.cross_entropy(logits_TV, chosen_T, reduction="sum"))
        _charged[key] = Charged(cost, int(is_near_T.sum()), differs_T.nonzero().flatten().tolist())
    return _charged[key]


class Written:
    """What an engine writes for some jobs, and what the reference says of it."""

    def __init__(self, engine: Engine, llama: LlamaForCausalLM, jobs: Sequence[Job]) -> None:
        completions = engine.generate([job.prompt for job in jobs], [forced(job.num_output) for job in jobs])
        self.tokens = [completion.tokens for completion in completions]
        self.num_preempted = sum(record.num_preempted for record in engine.recorder.requests)
        self.charged = [charged(llama, job.prompt, tokens) for job, tokens in zip(jobs, self.tokens, strict=True)]

    def nll(self, num_jobs: int | None = None) -> float:
        """Per token, over the first jobs."""
        return sum(one.cost for one in self.charged[:num_jobs]) / sum(map(len, self.tokens[:num_jobs]))


@pytest.fixture(scope="module", params=["native", "torch"])
def written(request: pytest.FixtureRequest, llama: LlamaForCausalLM) -> Written:
    """The whole workload, greedy in float32, in a pool that holds half of it; on our kernels and on torch's."""
    needs(request.param)
    return Written(Engine(dtype=torch.float32, backend=request.param, memory=Memory(250, 16, 2048)), llama, JOBS)


@pytest.mark.slow
def test_greedy_tokens_of_the_whole_workload_equal_transformers(written: Written) -> None:
    """All 64 requests, some preempted: each token is the reference's own choice; near ties are excused, and counted.

    Held against the reference position by position, with our tokens as its past: so a near tie would excuse itself
    only, and nothing that follows it.
    """
    assert [len(tokens) for tokens in written.tokens] == [job.num_output for job in JOBS]
    assert written.num_preempted > 0
    assert [index for index, one in enumerate(written.charged) if one.other_choices] == []
    assert sum(one.num_near_ties for one in written.charged) <= 2, "0 were seen among 3,933 tokens"


@pytest.mark.slow
def test_the_workloads_outputs_cost_what_the_true_model_charges(written: Written) -> None:
    """Wrongly read weights would write text that costs more: NLL per token is .564."""
    assert 0.559 < written.nll() < 0.569


@pytest.mark.slow
def test_bfloat16_writes_as_well_as_float32(written: Written, llama: LlamaForCausalLM) -> None:
    """The reference's NLL per token of what bfloat16 writes is within .02 of that of what float32 writes."""
    rounded = Written(Engine(memory=Memory(500, 16, 2048)), llama, JOBS[:NUM_IN_BFLOAT16])
    assert abs(rounded.nll() - written.nll(NUM_IN_BFLOAT16)) < 0.02


@pytest.mark.parametrize(("backend", "packed"), [("native", True), ("torch", True), ("torch", False)])
def test_logits_on_real_prompts_equal_transformers(
    backend: Backend, packed: bool, llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked, cached, preempted and resumed in 13 pages: every logit behind every token is within 1e-4.

    Of transformers' in float64: in float32 its own are up to 1.15e-4 from those, for float32 is near its end here.
    oneDNN's product of whole rows would be 2.3e-4 off; ours and `serve.linear`'s take it in slices.
    """
    needs(backend)
    if not packed:
        monkeypatch.setattr(linear, "can_pack", lambda dtype: False)

    def policy(memory: Memory) -> Scheduler:
        return Continuous(memory, ContinuousSettings(token_budget=64, chunk_cap=23))

    prefix = JOBS[0].prompt[:40]
    prompts = [prefix, *([*prefix, *JOBS[index].prompt[:30]] for index in range(1, 5)), JOBS[5].prompt[:60]]
    model = weights.load(dtype=torch.float32, backend=backend)
    engine = Engine(model, policy, memory=Memory(13, 16, 2048), executor=WatchedExecutor)
    completions = engine.generate(prompts, forced(14))
    records = engine.recorder.requests
    assert any(record.num_preempted for record in records) and any(record.num_cached for record in records)
    assert isinstance(engine.executor, WatchedExecutor)
    differences = []
    exact = deepcopy(llama).double()
    for prompt, completion in zip(prompts, completions, strict=True):
        expected_TV = reference_logits(exact, prompt, completion.tokens)
        ends = range(len(prompt), len(prompt) + 14)
        ours_TV = torch.stack([engine.executor.logits[completion.request_id, end] for end in ends])
        differences += (ours_TV - expected_TV).abs().amax(-1).tolist()
    assert max(differences) < 1e-4


def test_every_policy_gives_the_same_tokens(smollm2: LoadedModel) -> None:
    """Sixteen short requests one by one, in static, dynamic and both kinds of continuous batches."""
    jobs = sorted(JOBS, key=lambda job: len(job.prompt))[:16]
    limits = [forced(3 + index % 8) for index in range(16)]

    def tokens(policy: Policy) -> list[tuple[int, ...]]:
        engine = Engine(smollm2, policy, memory=Memory(120, 16, 2048))
        return [completion.tokens for completion in engine.generate([job.prompt for job in jobs], limits)]

    alone = tokens(one_by_one)
    assert tokens(lambda memory: static(memory, 8)) == alone
    assert tokens(lambda memory: dynamic(memory, DynamicSettings(max_batch_size=6))) == alone
    assert tokens(lambda memory: Continuous(memory, ContinuousSettings(token_budget=128))) == alone
    assert tokens(lambda memory: Continuous(memory, ContinuousSettings(capacity="guaranteed"))) == alone


def test_bfloat16_logits_are_close_to_float32s(llama: LlamaForCausalLM) -> None:
    """Over a real prompt, the mean difference is within 0.3% and the largest within 5% of the spread of the logits."""
    engine = Engine(executor=WatchedExecutor)
    (completion,) = engine.generate([JOBS[0].prompt], forced(8))
    assert isinstance(engine.executor, WatchedExecutor)
    expected_TV = reference_logits(llama, JOBS[0].prompt, completion.tokens)
    ours_TV = torch.stack(list(engine.executor.logits.values()))
    difference_TV, spread = (ours_TV - expected_TV).abs(), float(expected_TV.max() - expected_TV.min())
    assert float(difference_TV.mean()) < 0.003 * spread
    assert float(difference_TV.max()) < 0.05 * spread
