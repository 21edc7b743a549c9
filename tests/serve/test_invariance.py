"""A deterministic engine gives a request the same bits in any company, however its prompt is cut and pages are had."""

import random
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.pages import Memory
from batchwright.serve.decoders import native
from batchwright.serve.decoders.backend import Quantization
from batchwright.serve.decoders.model import Decoder
from batchwright.serve.decoders.native import NativeOps
from batchwright.serve.decoders.ops import Ops, TorchOps
from batchwright.serve.engine import Completion, Engine
from batchwright.serve.loading.weights import LoadedModel, load
from batchwright.serve.sampling.params import SamplingParams
from tests.serve.families import tiny_model
from tests.serve.scripted import forced, reference, tokens_of, workload64

CPU = torch.device("cpu")
NO_KERNELS = native.why_not(torch.bfloat16, CPU)
needs_kernels = pytest.mark.skipif(bool(NO_KERNELS), reason=f"no kernels here: {NO_KERNELS}")

SLIDING = {"sliding_window": 20}
WINDOWS: dict[str, dict[str, Any]] = {
    "gemma2": SLIDING,
    "gemma3_text": SLIDING,
    "smollm3": SLIDING | {"use_sliding_window": True},
}
PROMPT = tokens_of(0, 90)
PARAMS = forced(12, logprobs=3)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, seed=7, ignore_eos=True, logprobs=3)


@cache
def model(ops: type[Ops], dtype: torch.dtype, quantization: str | None = None) -> LoadedModel:
    """A random model whose heads the kernels take, on the given operators."""
    config = reference(head_dim=16).config.to_dict()
    state = reference(head_dim=16).state_dict()
    decoder = Decoder(config, lambda name: state[name].to(dtype, copy=True), ops=ops(quantization))
    return LoadedModel("tiny", decoder, None, "it is random", (), config)


@cache
def model_of(family: str, dtype: torch.dtype, quantization: Quantization | None = None) -> LoadedModel:
    """The same of another family, on our kernels. Its windows, if it has any, are far shorter than the request."""
    with TemporaryDirectory() as folder:
        tiny_model(family, max_position_embeddings=512, **WINDOWS.get(family, {})).save_pretrained(folder)
        return load(folder, dtype, backend="native", quantization=quantization, deterministic=True)


class Company:
    """Runs the fixed request among random others under random limits; what it got, and what happened to it."""

    def __init__(self, which: LoadedModel, *, deterministic: bool = True) -> None:
        self.model = which
        self.deterministic = deterministic
        self.num_preempted = self.num_cached = self.num_chunked = 0

    def alone(self, params: SamplingParams = PARAMS) -> Completion:
        return Engine(self.model, deterministic=self.deterministic).generate([PROMPT], params)[0]

    def among_others(self, seed: int, params: SamplingParams = PARAMS) -> Completion:
        draw = random.Random(seed)
        page_size = draw.choice([8, 16, 16, 32])
        num_pages = draw.choice([160, 320, 640]) // page_size
        settings = ContinuousSettings(max_rows=draw.choice([2, 4, 16, 64]), token_budget=draw.choice([16, 50, 64, 512]))
        engine = Engine(
            self.model,
            lambda memory: Continuous(memory, settings),
            memory=Memory(num_pages, page_size, 512),
            deterministic=self.deterministic,
        )
        if draw.random() < 0.3:  # the same beginning was computed before, and is in pages
            engine.generate([PROMPT[: draw.randint(1, 90)] + tokens_of(seed, 3)], forced(1))
        prompts = [tokens_of(seed + i, draw.randint(1, 100)) for i in range(draw.randint(0, 7))]
        where = draw.randint(0, len(prompts))
        others = [forced(draw.randint(1, 30)) for _ in prompts]
        completions = engine.generate(
            [*prompts[:where], PROMPT, *prompts[where:]], [*others[:where], params, *others[where:]]
        )
        self._watch(engine, completions[where])
        return completions[where]

    def _watch(self, engine: Engine, mine: Completion) -> None:
        record = next(r for r in engine.recorder.requests if r.id == mine.request_id)
        self.num_preempted += record.num_preempted > 0
        self.num_cached += record.num_cached > 0
        chunks = [row for step in engine.recorder.steps for row in step.rows if row.request_id == mine.request_id]
        self.num_chunked += sum(row.num_tokens > 1 for row in chunks) > 1


def bits(completion: Completion) -> tuple[object, ...]:
    """Tokens and log-probabilities, to be compared exactly."""
    return completion.tokens, completion.logprobs, completion.finish_reason


@needs_kernels
def test_a_thousand_random_batches_change_no_bit() -> None:
    """bfloat16: tokens, their log-probabilities and the three likeliest are equal, not close."""
    company = Company(model(NativeOps, torch.bfloat16))
    expected = bits(company.alone())
    for seed in range(1000):
        assert bits(company.among_others(seed)) == expected, f"batch {seed} differs"
    assert company.num_preempted > 50 and company.num_cached > 50 and company.num_chunked > 300


@needs_kernels
@pytest.mark.parametrize(("dtype", "quantization"), [(torch.float32, None), (torch.bfloat16, "int8")])
def test_the_same_in_float32_in_int8_and_when_drawing(dtype: torch.dtype, quantization: str | None) -> None:
    """A hundred batches each, tokens drawn with a seed."""
    company = Company(model(NativeOps, dtype, quantization))
    expected = bits(company.alone(SAMPLED))
    for seed in range(100):
        assert bits(company.among_others(seed, SAMPLED)) == expected, f"batch {seed} differs"


@needs_kernels
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen3_moe", "smollm3"])
@pytest.mark.parametrize(
    ("dtype", "quantization"), [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, "int8")]
)
def test_the_same_of_other_families(family: str, dtype: torch.dtype, quantization: Quantization | None) -> None:
    """Windows, caps, norms of heads, layers without rotation, and experts, whose rows are other companies yet."""
    company = Company(model_of(family, dtype, quantization))
    expected = bits(company.alone())
    for seed in range(25):
        assert bits(company.among_others(seed)) == expected, f"batch {seed} differs"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_the_mode_torchs_operators_do_differ(dtype: torch.dtype) -> None:
    """The negative control: among the same batches some give the request other bits."""
    company = Company(model(TorchOps, dtype), deterministic=False)
    expected = bits(company.alone())
    assert any(bits(company.among_others(seed)) != expected for seed in range(1000))


def test_where_there_are_no_kernels_every_position_is_computed_by_itself() -> None:
    """torch's operators under the mode: slow, and the same bits."""
    company = Company(model(TorchOps, torch.bfloat16))
    expected = bits(company.alone())
    for seed in range(25):
        assert bits(company.among_others(seed)) == expected, f"batch {seed} differs"


@needs_kernels
def test_the_embedded_model_among_its_workload() -> None:
    """SmolLM2 in bfloat16: eight requests of the workload alone, and all together in steps of mixed sizes."""
    jobs = workload64()[:8]
    which = load("smollm2", deterministic=True)
    params = [forced(min(job.num_output, 24), logprobs=2) for job in jobs]

    def run(engine: Engine, which: range) -> list[tuple[object, ...]]:
        return [bits(one) for one in engine.generate([jobs[i].prompt for i in which], [params[i] for i in which])]

    settings = ContinuousSettings(token_budget=300)
    together = Engine(which, lambda memory: Continuous(memory, settings), deterministic=True)
    assert run(together, range(8)) == [run(Engine(which, deterministic=True), range(i, i + 1))[0] for i in range(8)]
