"""OpenVINO carries out our plans over our pages: logits are transformers', within 1e-4, however the work is cut up."""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from batchwright.errors import ConfigError, MissingDependency, UnsupportedModel
from batchwright.policy.pages import Memory
from batchwright.policy.static import static
from batchwright.policy.types import Chunk, StepPlan
from batchwright.serve import openvino_executor
from batchwright.serve.decoders import native
from batchwright.serve.decoders.model import Decoder
from batchwright.serve.engine import Engine
from batchwright.serve.loading import weights
from batchwright.serve.openvino_executor import PAGE_SIZE, OpenVinoDecoder, OpenVinoExecutor, OpenVinoPending
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sequences import RowResult
from tests.serve.conftest import VARIANTS, MakeCheckpoint
from tests.serve.scripted import forced, reference, reference_logits, tokens_of

pytest.importorskip("openvino", reason="the extra openvino is not installed")

REPOSITORY = Path(__file__).parents[2]
NUM_PAGES, TOLERANCE = 60, 1e-4
FILLER = Chunk(None, 0, 0, 9, False, 0, ())


@cache
def compiled(
    dtype: torch.dtype = torch.float32, quantization: str | None = None, poison: int | None = None
) -> OpenVinoDecoder:
    """The tiny random model. `poison`: a token whose embedding is NaN, which no loader would let pass."""
    state = reference().state_dict()

    def take(name: str) -> Tensor:
        tensor = state[name].to(dtype, copy=True)
        if poison is not None and name == "model.embed_tokens.weight":
            tensor[poison] = torch.nan
        return tensor

    return OpenVinoDecoder(reference().config.to_dict(), take, dtype=dtype, quantization=quantization)


class Watched(OpenVinoExecutor):
    """Keeps the logits of every row that sampled: (request, tokens before it) -> logits."""

    def __init__(self, decoder: OpenVinoDecoder, memory: Memory) -> None:
        super().__init__(decoder, memory)
        self.logits: dict[tuple[str, int], Tensor] = {}
        self.kv.pages_L2PKSD.fill_(torch.nan)  # whatever a page held before must never show

    def start(self, plan: StepPlan) -> OpenVinoPending:
        pending = super().start(plan)
        ends = {chunk.request_id: chunk.start + chunk.num_tokens for chunk in plan.chunks if chunk.samples}
        for logits_V, request_id in zip(pending.logits(), pending.feed.sampling_ids, strict=True):
            self.logits[request_id, ends[request_id]] = logits_V.clone()
        return pending


class Bench:
    """An executor over NaN-filled pages, and what each of its requests knows; plans are made by hand."""

    def __init__(self, seed: int = 0) -> None:
        self.executor = Watched(compiled(), Memory(NUM_PAGES, PAGE_SIZE, 512))
        self.known: dict[str, list[int]] = {}
        generator = torch.Generator().manual_seed(seed)
        self._free: list[int] = torch.randperm(NUM_PAGES, generator=generator).tolist()
        self.tables: dict[str, tuple[int, ...]] = {}
        self._ids = count()

    def add(self, request_id: str, prompt: Sequence[int], shared: tuple[int, ...] = ()) -> str:
        self.executor.add(request_id, prompt, forced(99))
        self.known[request_id] = list(prompt)
        self.tables[request_id] = shared
        return request_id

    def chunk(self, request_id: str, start: int, num_tokens: int | None = None, padding: int = 0) -> Chunk:
        """The next `num_tokens` of a request, or all that it knows; in pages that lie anywhere."""
        known = len(self.known[request_id])
        num_tokens = known - start if num_tokens is None else num_tokens
        table = self.tables[request_id]
        missing = -(-(start + num_tokens) // PAGE_SIZE) - len(table)
        self.tables[request_id] = table = table + tuple(self._free.pop() for _ in range(missing))
        samples = num_tokens > 0 and start + num_tokens == known
        return Chunk(request_id, start, num_tokens, padding, samples, max(0, missing), table)

    def last(self, request_id: str) -> Chunk:
        """Its next decode."""
        return self.chunk(request_id, len(self.known[request_id]) - 1)

    def step(self, *chunks: Chunk) -> list[RowResult]:
        results = self.executor.start(StepPlan(next(self._ids), "next", chunks)).result()
        for request_id, samples, *_ in results:
            self.known[request_id].append(samples[0].token)
        return results

    def preempt(self, request_id: str) -> None:
        """Its pages go to whoever asks next."""
        self._free += self.tables[request_id]
        self.tables[request_id] = ()

    def worst(self) -> float:
        """The largest difference to the reference, over all that was sampled."""
        expected = {request_id: reference_logits(tokens) for request_id, tokens in self.known.items()}
        differences = [
            logits_V - expected[request_id][num_before - 1]
            for (request_id, num_before), logits_V in self.executor.logits.items()
        ]
        return float(torch.stack(differences).abs().max())


def test_prompts_of_every_length_prefill_at_once() -> None:
    """Lengths that begin, fill and exceed pages: logits after the last token equal the reference's."""
    bench = Bench()
    for length in (*range(1, 8), 31, 32, 33, 63, 64, 65, 130):
        bench.step(bench.chunk(bench.add(f"{length}", tokens_of(length, length)), 0))
    assert bench.worst() < TOLERANCE


def test_a_prompt_may_be_cut_at_every_boundary() -> None:
    """Two chunks, cut anywhere, give the logits of one pass."""
    prompt = tokens_of(0, 70)
    for cut in range(1, len(prompt)):
        bench = Bench(seed=cut)
        bench.add("a", prompt)
        assert bench.step(bench.chunk("a", 0, cut)) == []
        assert len(bench.step(bench.chunk("a", cut))) == 1
        assert bench.worst() < TOLERANCE, cut


def test_decodes_read_pages_that_lie_anywhere() -> None:
    """Forty steps of one token over scattered pages, each within the tolerance and greedy as the reference."""
    bench = Bench()
    bench.add("a", tokens_of(1, 90))
    bench.step(bench.chunk("a", 0))
    assert bench.tables["a"] != tuple(sorted(bench.tables["a"]))
    for _ in range(40):
        bench.step(bench.last("a"))
    assert bench.worst() < TOLERANCE
    assert bench.known["a"][90:] == reference_logits(bench.known["a"])[89:-1].argmax(-1).tolist()


def test_a_step_mixes_chunks_and_decodes_of_very_different_contexts() -> None:
    """Contexts of 1 to 300 decode beside the first, middle and last chunks of other prompts."""
    bench = Bench()
    old = [bench.add(f"old-{length}", tokens_of(length, length)) for length in (1, 2, 40, 41, 150, 300)]
    bench.step(*(bench.chunk(request_id, 0) for request_id in old))
    new = [bench.add(f"new-{length}", tokens_of(length, length)) for length in (60, 61, 190)]
    for start, num_tokens in ((0, 33), (33, 1), (34, 9), (43, None)):
        decodes = [bench.last(request_id) for request_id in old]
        chunks = [bench.chunk(request_id, start, num_tokens) for request_id in new]
        bench.step(chunks[0], *decodes[:3], *chunks[1:], *decodes[3:])
    assert len(bench.executor.logits) == 5 * len(old) + len(new)
    assert bench.worst() < TOLERANCE


def test_padding_dead_rows_and_fillers_change_no_live_row() -> None:
    """All that a static batch wastes is executed, and its live rows still get the reference's logits."""
    bench = Bench()
    for request_id, length in {"short": 3, "long": 40, "ended": 5}.items():
        bench.add(request_id, tokens_of(length, length))
    first = [bench.chunk(request_id, 0, padding=40 - len(bench.known[request_id])) for request_id in bench.known]
    bench.step(*first, FILLER._replace(padding=40))
    bench.executor.remove("ended")
    for step in range(8):
        dead = bench.chunk("ended", 6 + step, 0, padding=1)
        live = [bench.last(request_id) for request_id in ("short", "long")]
        results = bench.step(dead, *live, FILLER._replace(start=40 + step, padding=1))
        assert {result.request_id for result in results} == {"short", "long"}
    assert bench.worst() < TOLERANCE


def test_dummy_positions_are_computed_into_the_scratch_page_alone() -> None:
    """A dead row of nine positions, and five behind a prompt, store keys and values in every layer; nobody else's."""
    bench = Bench()
    pages_L2PKSD = bench.executor.kv.pages_L2PKSD.fill_(0)

    def stored() -> Tensor:
        return (pages_L2PKSD != 0).any(-1).all(3)

    assert bench.step(FILLER) == []
    assert stored()[:, :, -1, :9].all()
    assert not stored()[:, :, :-1].any()
    bench.add("a", tokens_of(0, 32))
    bench.step(bench.chunk("a", 0, padding=14))
    assert stored()[:, :, -1].sum(-1).unique().tolist() == [14]
    assert stored()[:, :, :-1].sum() == stored()[:, :, bench.tables["a"][0]].sum() == 3 * 2 * 32


def test_a_request_reads_the_pages_of_anothers_equal_prefix() -> None:
    """Having computed only what lies behind the shared pages, it gets the logits of its whole prompt."""
    bench = Bench()
    prefix = tokens_of(2, 64)
    bench.step(bench.chunk(bench.add("a", prefix + tokens_of(3, 7)), 0))
    bench.add("b", prefix + tokens_of(4, 5), shared=bench.tables["a"][:2])
    bench.add("nearly all", prefix, shared=bench.tables["a"][:1])
    bench.step(bench.chunk("b", 64), bench.last("a"), bench.chunk("nearly all", 32))
    assert bench.worst() < TOLERANCE


def test_a_preempted_request_resumes_in_other_pages() -> None:
    """Prompt and outputs are computed again, at once or in chunks, and decoding goes on as if nothing had happened."""
    bench, undisturbed = Bench(), Bench(seed=9)
    for each in (bench, undisturbed):
        each.add("a", tokens_of(5, 60))
        each.step(each.chunk("a", 0))
        for _ in range(6):
            each.step(each.last("a"))
    bench.preempt("a")
    bench.step(bench.chunk(bench.add("b", tokens_of(8, 70)), 0))
    bench.step(bench.chunk("a", 0, 39))
    bench.step(bench.chunk("a", 39))
    undisturbed.step(undisturbed.last("a"))
    for each in (bench, undisturbed):
        each.step(each.last("a"))
    assert bench.known["a"] == undisturbed.known["a"]
    assert bench.worst() < TOLERANCE


def test_a_step_run_again_gives_the_same_tokens() -> None:
    """After a failure the same plan writes the same positions; drawn tokens repeat as well as greedy ones."""
    executor = OpenVinoExecutor(compiled(), Memory(20, PAGE_SIZE, 512))
    executor.add("greedy", tokens_of(0, 39), forced(9))
    executor.add("drawn", tokens_of(1, 6), SamplingParams(temperature=1.5, seed=3))
    chunks = Chunk("greedy", 0, 39, 0, True, 2, (4, 1)), Chunk("drawn", 0, 6, 0, True, 1, (3,))
    prefill = StepPlan(0, "idle", chunks)
    decode = StepPlan(
        1, "idle", tuple(chunk._replace(start=chunk.num_tokens, num_tokens=1, num_granted=0) for chunk in chunks)
    )
    once = [executor.start(plan).result() for plan in (prefill, decode)]
    again = [executor.start(plan).result() for plan in (prefill, prefill, decode, decode)]
    assert again == [once[0], once[0], once[1], once[1]]


def test_a_step_whose_result_nobody_took_does_not_keep_the_next_from_starting() -> None:
    """As after an interrupt; an executor that is dropped meanwhile waits for its step."""
    executor = OpenVinoExecutor(compiled(), Memory(20, PAGE_SIZE, 512))
    executor.add("a", tokens_of(0, 300), forced(9))
    plan = StepPlan(0, "idle", (Chunk("a", 0, 300, 0, True, 10, tuple(range(10))),))
    executor.start(plan)
    expected = executor.start(plan).result()
    executor.start(plan)
    assert executor.start(plan).result() == expected
    executor.start(plan)
    del executor


OUT_OF_MEMORY = """
import re, resource
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from batchwright.policy.pages import Memory
from batchwright.policy.types import Chunk, StepPlan
from batchwright.serve.openvino_executor import OpenVinoDecoder, OpenVinoExecutor
from tests.serve.conftest import TINY
from tests.serve.scripted import forced

config = LlamaConfig(**TINY | {"intermediate_size": 20_000})
state = LlamaForCausalLM(config).state_dict()
executor = OpenVinoExecutor(OpenVinoDecoder(config.to_dict(), state.get, dtype=torch.float32), Memory(80, 32, 4096))
executor.add("a", [5] * 2500, forced(9))
small, large = (
    StepPlan(0, "idle", (Chunk("a", 0, num, 0, num == 2500, 0, tuple(range(79))),)) for num in (7, 2500)
)
executor.start(small).result()
size = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
for _ in range(3):
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), -1))
    for _ in range(2):
        try:
            executor.start(large).result()
        except MemoryError:
            print("out of memory")
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    assert executor.start(small).result() == []
(result,) = executor.start(large).result()
assert result.samples[0].error is None
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the size of the process is read from /proc")
def test_a_step_out_of_memory_says_so_and_leaves_the_next_ones_sound() -> None:
    """OpenVINO's own nodes disagree about sizes after such a step, and would refuse those that ran before."""
    command = [sys.executable, "-c", OUT_OF_MEMORY]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("out of memory") == 6


def test_logits_that_are_no_numbers_are_that_rows_error_alone() -> None:
    """One poisoned row errs; its neighbours, and whoever gets its pages next, have clean results."""
    executor = OpenVinoExecutor(compiled(poison=96), Memory(10, PAGE_SIZE, 512))
    clean = [token for token in tokens_of(6, 40) if token != 96]
    executor.add("bad", [1, 96, 2, 3, 4, 5] * 7, forced(9))
    executor.add("good", clean, forced(9))
    good = Chunk("good", 0, len(clean), 3, True, 2, (0, 1))
    plan = StepPlan(0, "idle", (Chunk("bad", 0, 42, 9, True, 2, (3, 4)), good))
    results = {result.request_id: result.samples[0] for result in executor.start(plan).result()}
    assert results["bad"].token == -1
    assert "NaN" in str(results["bad"].error)
    expected = int(reference_logits(clean)[-1].argmax())
    assert (results["good"].token, results["good"].error) == (expected, None)
    executor.add("next", clean, forced(9))
    (result,) = executor.start(StepPlan(1, "idle", (good._replace(request_id="next", pages=(4, 3)),))).result()
    assert result.samples[0].token == expected


@settings(max_examples=40)
@given(st.data())
def test_any_way_to_run_requests_gives_the_same_logits(data: st.DataObject) -> None:
    """Chunks of any size, padding, dead rows, fillers, restarts, any order: every sampled row equals the reference."""
    bench = Bench(data.draw(st.integers(0, 9), "page order"))
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=4), "prompts")
    done = {bench.add(f"{i}", tokens_of(i, length)): 0 for i, length in enumerate(lengths)}
    for _ in range(data.draw(st.integers(1, 8), "steps")):
        chunks = []
        for request_id in data.draw(st.permutations(sorted(done)), "rows"):
            left = len(bench.known[request_id]) - done[request_id]
            what = data.draw(st.sampled_from(["run", "run", "run", "pad", "rest", "dead", "restart"]))
            if what == "restart":
                bench.preempt(request_id)
                done[request_id] = 0
            elif what == "dead":
                start, padding = data.draw(st.integers(0, 80)), data.draw(st.integers(1, 5))
                chunks.append(FILLER._replace(start=start, padding=padding))
            elif what != "rest":
                num_tokens = data.draw(st.integers(1, left))
                padding = data.draw(st.integers(0, 6)) if what == "pad" else 0
                chunks.append(bench.chunk(request_id, done[request_id], num_tokens, padding))
                done[request_id] += num_tokens
        if chunks:
            bench.step(*chunks)
    if bench.executor.logits:
        assert bench.worst() < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_shape_we_claim_to_run_gives_transformers_logits(variant: str, make_checkpoint: MakeCheckpoint) -> None:
    """From safetensors, in chunks: tied heads, biases, wide heads, one or all key-value heads, Llama 3's rotations."""
    path = make_checkpoint(**VARIANTS[variant])
    executor = Watched(weights.load(path, torch.float32, backend="openvino").decoder, Memory(8, PAGE_SIZE, 512))
    prompt = tokens_of(3, 150)
    executor.add("a", prompt, forced(9))
    for start, end in ((0, 70), (70, 71), (71, 150)):
        chunk = Chunk("a", start, end - start, 0, end == len(prompt), 0, (7, 2, 0, 5, 3))
        executor.start(StepPlan(start, "idle", (chunk,))).result()
    with torch.inference_mode():
        expected_TV = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)(torch.tensor([prompt])).logits[0]
    assert (executor.logits["a", 150] - expected_TV[-1]).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "quantization", "limit"),
    [(torch.bfloat16, None, 0.02), (torch.float32, "int8", 0.06), (torch.bfloat16, "int8", 0.06)],
)
def test_narrower_arithmetic_is_close_to_float32s(dtype: torch.dtype, quantization: str | None, limit: float) -> None:
    """On the tiny model, of the spread of the logits: bfloat16 within 2%, int8 weights within 6%."""
    executor = Watched(compiled(dtype, quantization), Memory(10, PAGE_SIZE, 512))
    prompt = tokens_of(7, 60)
    executor.add("a", prompt, forced(1))
    executor.start(StepPlan(0, "idle", (Chunk("a", 0, 47, 0, False, 2, (0, 1)),))).result()
    executor.start(StepPlan(1, "idle", (Chunk("a", 47, 13, 0, True, 0, (0, 1)),))).result()
    expected_V = reference_logits(prompt)[-1]
    difference = float((executor.logits["a", 60] - expected_V).abs().max() / (expected_V.max() - expected_V.min()))
    assert 1e-5 < difference < limit


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, "f32"), (torch.bfloat16, "bf16")])
def test_pages_hold_what_the_model_computes_in_and_nothing_narrower(dtype: torch.dtype, kind: str) -> None:
    decoder = compiled(dtype)
    pages = OpenVinoExecutor(decoder, Memory(5, PAGE_SIZE, 512)).kv
    assert decoder.compiled.input("value_cache.2").element_type.get_type_name() == kind
    assert pages.num_bytes == 6 * PAGE_SIZE * decoder.shape.kv_bytes_per_token(dtype.itemsize)


def test_an_engine_overlaps_its_steps_and_writes_what_torch_writes(make_checkpoint: MakeCheckpoint) -> None:
    """Two dozen requests, in a pool that preempts, continuous and static."""
    path = make_checkpoint()
    prompts = [tokens_of(seed, 5 + 9 * seed % 60) for seed in range(24)]
    limits = [forced(3 + 7 * seed % 40) for seed in range(24)]
    expected = [one.tokens for one in Engine(path, dtype=torch.float32).generate(prompts, limits)]
    model = weights.load(path, torch.float32, backend="openvino")
    for policy in ({}, {"policy": lambda memory: static(memory, 6)}):
        engine = Engine(model, memory=Memory(20, PAGE_SIZE, 512), **policy)
        assert isinstance(engine.executor, OpenVinoExecutor) and engine.executor.overlaps
        assert [one.tokens for one in engine.generate(prompts, limits)] == expected


def test_auto_takes_it_where_our_kernels_are_not_the_faster_ones(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU of another kind, where it is installed; never for a deterministic engine, or under another name."""
    path = make_checkpoint()
    monkeypatch.setattr(native, "is_faster", lambda dtype: False)
    monkeypatch.setattr(openvino_executor, "runs_here", lambda dtype: True)
    assert isinstance(weights.load(path, torch.float32).decoder, OpenVinoDecoder)
    assert isinstance(weights.load(path, torch.float32, backend="torch").decoder, Decoder)
    assert isinstance(weights.load(path, torch.float32, deterministic=True).decoder, Decoder)
    windowed = rewritten(make_checkpoint("windowed"), model_type="mistral", sliding_window=8)
    assert isinstance(weights.load(windowed, torch.float32).decoder, Decoder)
    monkeypatch.setattr(openvino_executor, "runs_here", lambda dtype: False)
    assert isinstance(weights.load(path, torch.float32).decoder, Decoder)


def test_what_it_cannot_do_is_refused_with_what_can_be_done(make_checkpoint: MakeCheckpoint) -> None:
    """Other pages, another device, equal bits in any company, bfloat16 on a CPU without it, what Llama does not do."""
    with pytest.raises(ConfigError, match="pages of 16 tokens on OpenVINO: its pages hold 32; use Memory"):
        OpenVinoExecutor(compiled(), Memory(20, 16, 512))
    with pytest.raises(ConfigError, match=r'being deterministic.*use backend="native"'):
        weights.load(make_checkpoint(), backend="openvino", deterministic=True)
    model = weights.load(make_checkpoint(), torch.float32, backend="openvino")
    with pytest.raises(ConfigError, match="being deterministic"):
        Engine(model, deterministic=True)
    assert Engine(model).memory.page_size == PAGE_SIZE
    with pytest.raises(ConfigError, match=r'the device is meta; use device="cpu"'):
        weights.load(make_checkpoint(), backend="openvino", device="meta")
    windowed = rewritten(make_checkpoint("windowed"), model_type="mistral", sliding_window=8)
    with pytest.raises(UnsupportedModel, match=r'a mistral model like this one does more; use backend="native"'):
        weights.load(windowed, backend="openvino")
    with pytest.raises(ConfigError, match="no bfloat16 products"):
        openvino_executor.check_precision(Pretended(), torch.bfloat16)


def rewritten(path: Path, **changes: Any) -> Path:
    """The checkpoint, with another config."""
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return path


def test_relatives_that_do_no_more_than_llama_run_too(make_checkpoint: MakeCheckpoint) -> None:
    """A Mistral without windows is one."""
    path = rewritten(make_checkpoint(), model_type="mistral", sliding_window=None)
    prompts, limits = [tokens_of(seed, 40) for seed in range(3)], [forced(12)] * 3
    expected = [one.tokens for one in Engine(path, dtype=torch.float32, backend="torch").generate(prompts, limits)]
    found = Engine(path, dtype=torch.float32, backend="openvino").generate(prompts, limits)
    assert [one.tokens for one in found] == expected


class Pretended:
    """A core on a CPU of 2015."""

    def get_property(self, device: str, name: str) -> list[str]:
        assert (device, name) == ("CPU", "OPTIMIZATION_CAPABILITIES")
        return ["FP32", "INT8"]


def missing(name: str) -> Any:
    raise openvino_executor.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (missing, r"openvino is not installed; run: pip install 'batchwright\[openvino\]'"),
        (lambda name: "2025.4.1", r"openvino 2025.4.1 is installed; supported is 2026.4; run: pip install 'openvino=="),
        (lambda name: "2026.40.0", "openvino 2026.40.0 is installed"),
    ],
)
def test_a_missing_or_untried_openvino_is_named_with_the_command_that_helps(
    version: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino_executor, "version", version)
    with pytest.raises(MissingDependency, match=message):
        weights.load(tmp_path, backend="openvino")
