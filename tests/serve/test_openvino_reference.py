"""The embedded model on OpenVINO: transformers' logits and tokens in float32, nearly those in bfloat16 and int8."""

import subprocess
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import LlamaForCausalLM

from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.pages import Memory
from batchwright.policy.types import Scheduler
from batchwright.serve.decoders.attention import RowSpan
from batchwright.serve.engine import Engine
from batchwright.serve.loading import weights
from batchwright.serve.loading.weights import LoadedModel
from batchwright.serve.openvino_executor import PAGE_SIZE, OpenVinoExecutor
from batchwright.serve.sequences import Feed
from tests.serve import test_reference
from tests.serve.scripted import forced
from tests.serve.test_openvino import Watched
from tests.serve.test_reference import JOBS, Written, reference_logits

pytest.importorskip("openvino", reason="the extra openvino is not installed")

llama = test_reference.llama


@cache
def smollm2_on(dtype: torch.dtype, quantization: weights.Quantization | None = None) -> LoadedModel:
    return weights.load(dtype=dtype, backend="openvino", quantization=quantization)


def engine_of(model: LoadedModel, num_pages: int) -> Engine:
    return Engine(model, memory=Memory(num_pages, PAGE_SIZE, 2048))


def test_logits_on_real_prompts_equal_transformers(llama: LlamaForCausalLM) -> None:
    """Chunked, cached, preempted and resumed in seven pages: every logit behind every token is within 1e-4.

    Of transformers' in float64: in float32 its own are up to 1.15e-4 from those.
    """

    def policy(memory: Memory) -> Scheduler:
        return Continuous(memory, ContinuousSettings(token_budget=64, chunk_cap=23))

    prefix = JOBS[0].prompt[:40]
    prompts = [prefix, *([*prefix, *JOBS[index].prompt[:30]] for index in range(1, 5)), JOBS[5].prompt[:60]]
    engine = Engine(smollm2_on(torch.float32), policy, memory=Memory(7, PAGE_SIZE, 2048), executor=Watched)
    completions = engine.generate(prompts, forced(30))
    records = engine.recorder.requests
    assert any(record.num_preempted for record in records) and any(record.num_cached for record in records)
    assert isinstance(engine.executor, Watched)
    differences = []
    exact = deepcopy(llama).double()
    for prompt, completion in zip(prompts, completions, strict=True):
        expected_TV = reference_logits(exact, prompt, completion.tokens)
        ends = range(len(prompt), len(prompt) + 30)
        ours_TV = torch.stack([engine.executor.logits[completion.request_id, end] for end in ends])
        differences += (ours_TV - expected_TV).abs().amax(-1).tolist()
    assert max(differences) < 1e-4


@pytest.mark.slow
def test_greedy_tokens_of_the_whole_workload_equal_transformers(llama: LlamaForCausalLM) -> None:
    """All 64 requests in a pool that holds half: each token is the reference's own choice, near ties excused."""
    written = Written(engine_of(smollm2_on(torch.float32), 125), llama, JOBS)
    assert [len(tokens) for tokens in written.tokens] == [job.num_output for job in JOBS]
    assert written.num_preempted > 0
    assert [index for index, one in enumerate(written.charged) if one.other_choices] == []
    assert sum(one.num_near_ties for one in written.charged) <= 2, "0 were seen among 3,933 tokens"
    assert 0.559 < written.nll() < 0.569


def logits_of(model: LoadedModel, prompt: list[int], output: tuple[int, ...]) -> Tensor:
    """Before each token of `output`, in one pass."""
    tokens = [*prompt, *output]
    row = RowSpan(0, len(tokens), tuple(range(-(-len(tokens) // PAGE_SIZE))))
    executor = OpenVinoExecutor(model.decoder, Memory(len(row.table), PAGE_SIZE, 8192))
    feed = Feed(executor._sequences.sampler)
    feed.tokens, feed.rows = [tokens], list(range(len(prompt) - 1, len(tokens) - 1))
    return executor._begin([row], feed).logits().clone()


@pytest.mark.slow
def test_narrower_arithmetic_stays_near_float32() -> None:
    """Over what float32 writes for eight requests: NLL per token, and how far the next token's distribution moves."""
    jobs = JOBS[::8]
    completions = engine_of(smollm2_on(torch.float32), 250).generate(
        [job.prompt for job in jobs], [forced(job.num_output) for job in jobs]
    )
    outputs = [completion.tokens for completion in completions]
    tokens_R = torch.tensor([token for output in outputs for token in output])

    def scores(model: LoadedModel) -> Tensor:
        parts = [logits_of(model, job.prompt, output) for job, output in zip(jobs, outputs, strict=True)]
        return torch.cat(parts).log_softmax(-1)

    exact_RV = scores(smollm2_on(torch.float32))
    for quantization, most_nll, most_divergence in ((None, 0.01, 0.002), ("int8", 0.03, 0.02)):
        mine_RV = scores(smollm2_on(torch.bfloat16, quantization))
        nll, base = (-each.gather(1, tokens_R[:, None]).mean() for each in (mine_RV, exact_RV))
        divergence = kl_div(mine_RV, exact_RV, log_target=True, reduction="batchmean")
        assert abs(nll - base) < most_nll
        assert 1e-5 < divergence < most_divergence


PEAK = """
import re, sys
import openvino
from batchwright import Engine, SamplingParams
from batchwright.policy.pages import Memory
from batchwright.serve.loading import weights

def peak() -> int:
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

openvino.Core().get_property("CPU", "FULL_DEVICE_NAME")
before = peak()
model = weights.load(backend="openvino", quantization=sys.argv[1] or None)
engine = Engine(model, memory=Memory(100, 32, 2048))
engine.generate([[5] * 250] * 8, SamplingParams(max_tokens=8, ignore_eos=True))
print(peak() - before, engine.executor.kv.num_bytes, model.decoder.num_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("quantization", ["", "int8"])
def test_peak_memory_is_the_weights_twice_the_pool_and_a_workspace(quantization: str) -> None:
    """Bytes beyond the imports, over steps of up to 2,000 positions; 114 to 164 MiB of workspace were seen."""
    done = subprocess.run([sys.executable, "-c", PEAK, quantization], check=True, capture_output=True, text=True)
    grown, pool, held = map(int, done.stdout.split())
    assert grown < 2 * held + pool + (240 << 20)
