"""Every family computes what transformers computes, however requests are cut, mixed, shared and begun anew."""

import random
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from batchwright.errors import BatchwrightError, BrokenWeights
from batchwright.facts import families as facts
from batchwright.facts import shape
from batchwright.facts.shape import ModelShape
from batchwright.policy.pages import Memory
from batchwright.serve.decoders import native, recipe
from batchwright.serve.decoders.attention import RowSpan, layout_order
from batchwright.serve.decoders.backend import Backend
from batchwright.serve.decoders.experts import Experts, unfused
from batchwright.serve.decoders.model import Decoder, supported_shape, tensor_shapes
from batchwright.serve.decoders.native import NativeOps
from batchwright.serve.decoders.ops import TorchOps
from batchwright.serve.decoders.recipe import recipe_of
from batchwright.serve.engine import Engine
from batchwright.serve.kv import PagedKV
from batchwright.serve.loading import weights
from batchwright.serve.loading.checkpoint import SafetensorsSource
from batchwright.serve.sampling.params import SamplingParams
from tests.serve.conftest import DenseCache
from tests.serve.families import NUM_VOCAB, TINY_FAMILIES, reference_logits, tiny_model

LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SCALES = {"mscale": 2.0, "mscale_all_dim": 0.5, "beta_fast": 2, "beta_slow": 0.5, "truncate": False}
GLOBAL = {"rope_type": "linear", "factor": 3.0, "rope_theta": 50_000.0}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
KINDS = ["sliding_attention", "full_attention", "full_attention"]
SLIDING = {"use_sliding_window": True, "sliding_window": 8}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in TINY_FAMILIES} | {
    "llama biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5_000.0}}),
    "llama dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "smollm3 windowed": ("smollm3", SLIDING | {"no_rope_layers": [0, 1, 1, 0, 1]}),
    "smollm3 yarn": ("smollm3", {"rope_parameters": YARN}),
    "qwen2 windowed": ("qwen2", SLIDING | {"max_window_layers": 1}),
    "qwen2 listed": ("qwen2", SLIDING | {"layer_types": KINDS}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN | {"rope_theta": 1_000_000.0}}),
    "qwen3 yarn": ("qwen3", SLIDING | {"max_window_layers": 2, "rope_parameters": YARN | SCALES}),
    "qwen3 weighed yarn": ("qwen3", {"rope_parameters": YARN | {"attention_factor": 0.8}}),
    "mixtral windowed": ("mixtral", {"sliding_window": 8, "head_dim": 32}),
    "qwen3_moe partly dense": (
        "qwen3_moe",
        SLIDING | {"num_hidden_layers": 5, "norm_topk_prob": False, "mlp_only_layers": [3], "decoder_sparse_step": 2},
    ),
    "gemma2 capped": (
        "gemma2",
        {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 7},
    ),
    "gemma3_text capped": (
        "gemma3_text",
        {
            "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 7, "num_hidden_layers": 3,
            "rope_parameters": {"full_attention": GLOBAL, "sliding_attention": LOCAL}, "layer_types": KINDS,
        },
    ),
}  # fmt: skip
LENGTHS = (70, 41, 25)  # far beyond windows of 8, and beyond original contexts of 32
TOLERANCE = 1e-4


class Case(NamedTuple):
    """A model as transformers saved it, and what it gives after each token of three prompts."""

    folder: Path
    config: dict[str, Any]
    prompts: list[Tensor]
    logits: list[Tensor]


KEPT = TemporaryDirectory()


@cache
def model_of(variant: str) -> PreTrainedModel:
    family, changes = VARIANTS[variant]
    return tiny_model(family, **changes)


@cache
def case(variant: str, *, fused: bool = False) -> Case:
    model = model_of(variant)
    folder = Path(KEPT.name) / f"{variant} {fused}"
    model.save_pretrained(folder, save_original_format=not fused)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, NUM_VOCAB, (length,), generator=generator) for length in LENGTHS]
    prompts.append(torch.cat([prompts[0][:48], prompts[2]]))  # begins as the first does
    return Case(folder, model.config.to_dict(), prompts, [reference_logits(model, one) for one in prompts])


def decoder_of(variant: str, **changes: Any) -> Decoder:
    """The saved model as we run it; `changes` to its config."""
    found = case(variant)
    with ExitStack() as files:
        source = SafetensorsSource(found.folder, files)
        return Decoder(found.config | changes, lambda name: source.tensor(name, torch.float32))


def loaded(variant: str, backend: Backend = "torch", device: str = "cpu", *, fused: bool = False) -> Decoder:
    decoder = weights.load(case(variant, fused=fused).folder, torch.float32, device, backend=backend).decoder
    assert isinstance(decoder, Decoder)
    return decoder


def at_once(decoder: Decoder, tokens_T: Tensor) -> Tensor:
    return decoder.forward(tokens_T, DenseCache(decoder), torch.arange(len(tokens_T)))


def worst(decoder: Decoder, variant: str) -> float:
    """The largest difference to transformers over the longest prompt, in one pass."""
    found = case(variant)
    return float((at_once(decoder, found.prompts[0]) - found.logits[0]).abs().max())


class Pool:
    """Requests in pages that hold NaN until they are written, and the logits of all positions as they are computed."""

    def __init__(self, decoder: Decoder, prompts: list[Tensor], page_size: int) -> None:
        self.decoder, self.prompts, self.page_size = decoder, prompts, page_size
        num_pages = 3 * sum(-(-len(one) // page_size) for one in prompts)
        self.kv = PagedKV(decoder.shape, Memory(num_pages, page_size, 256), torch.float32, decoder.device)
        self.kv.pages_LPMSD.fill_(torch.nan)
        self.free = list(range(num_pages))
        random.Random(0).shuffle(self.free)
        self.tables = [self.pages(len(one)) for one in prompts]
        self.done = [0] * len(prompts)
        self.logits = [torch.full((len(one), NUM_VOCAB), torch.nan) for one in prompts]

    def pages(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self.free.pop() for _ in range(-(-num_tokens // self.page_size)))

    def step(self, sizes: dict[int, int]) -> None:
        """So many more tokens of each of these requests."""
        decoder = self.decoder
        ids = list(sizes)
        spans = [RowSpan(self.done[i], sizes[i], self.tables[i]) for i in ids]
        order = layout_order(spans)
        ids, rows = [ids[k] for k in order], [spans[k] for k in order]
        tokens_T = torch.cat([self.prompts[i][row.start : row.context] for i, row in zip(ids, rows, strict=True)]).to(
            decoder.device
        )
        layout = decoder.ops.layout(rows, self.kv, decoder.attention)
        logits_TV = decoder.forward(tokens_T, layout.attend, torch.arange(len(tokens_T), device=decoder.device)).cpu()
        for i, row, part_TV in zip(ids, rows, logits_TV.split([row.num_positions for row in rows]), strict=True):
            self.logits[i][row.start : row.context] = part_TV
            self.done[i] = row.context

    def run(self, ids: list[int], seed: int, until: int = 256) -> None:
        """All of these requests' tokens up to `until`, in steps of any mix of decodes and chunks cut at odd places."""
        draw = random.Random(seed)
        while left := [i for i in ids if self.done[i] < min(until, len(self.prompts[i]))]:
            chosen = draw.sample(left, draw.randint(1, len(left)))
            ends = {i: min(until, len(self.prompts[i])) for i in chosen}
            self.step({i: min(draw.choice((1, 1, 3, 7, 19)), ends[i] - self.done[i]) for i in chosen})

    def evict(self, i: int) -> None:
        """Its pages are lost: it begins anew, in others, which hold NaN."""
        self.kv.pages_LPMSD[:, list(self.tables[i])] = torch.nan
        self.tables[i], self.done[i] = self.pages(len(self.prompts[i])), 0

    def share(self, i: int, other: int, num_tokens: int) -> None:
        """Whole pages of its first tokens are those that `other` has computed."""
        num_pages = num_tokens // self.page_size
        self.tables[i] = self.tables[other][:num_pages] + self.tables[i][num_pages:]
        self.done[i] = num_pages * self.page_size


@pytest.mark.parametrize("variant", ["mistral", "smollm3", "qwen3_moe", "gemma3_text capped"])
def test_an_engine_writes_what_transformers_finds_likeliest(variant: str) -> None:
    """Greedily, in a pool that preempts; windows, caps and experts go through the whole of it."""
    found = case(variant)
    prompts, memory = [one.tolist() for one in found.prompts], Memory(13, 16, 256)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    engine = Engine(found.folder, memory=memory, dtype=torch.float32)
    for prompt, written in zip(prompts, engine.generate(prompts, params), strict=True):
        tokens = [*prompt, *written.tokens]
        likeliest = reference_logits(model_of(variant), torch.tensor(tokens)).argmax(-1).tolist()
        assert list(written.tokens) == likeliest[len(prompt) - 1 : -1]


@pytest.mark.parametrize("page_size", [2, 8, 16])
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_computes_what_transformers_does(variant: str, backend: Backend, page_size: int) -> None:
    """Requests mixed, one preempted and recomputed, one with another's first pages: each logit within 1e-4."""
    if backend == "native":
        needs_kernels(variant)
    assert worst_of_all(variant, loaded(variant, backend), page_size) < TOLERANCE


def worst_of_all(variant: str, decoder: Decoder, page_size: int) -> float:
    """The largest difference to transformers, over all positions of four requests."""
    found = case(variant)
    pool = Pool(decoder, found.prompts, page_size)
    pool.run([0, 1], seed=page_size, until=37)
    pool.evict(1)
    pool.run([0, 1, 2], seed=page_size + 1)
    pool.share(3, 0, 48)
    pool.run([3], seed=page_size + 2)
    differences = [(ours - theirs).abs() for ours, theirs in zip(pool.logits, found.logits, strict=True)]
    differences[3] = differences[3][48:]
    return max(float(one.max()) for one in differences)


def shape_of(variant: str) -> ModelShape:
    return supported_shape(case(variant).config)


def needs_kernels(variant: str, dtype: torch.dtype = torch.float32) -> None:
    if why := native.why_not(dtype, torch.device("cpu"), shape_of(variant)):
        pytest.skip(why)


def forget(patch: pytest.MonkeyPatch, family: str, **changes: Any) -> None:
    """As if a family's facts were others."""
    table = {**facts.FAMILIES, family: replace(facts.FAMILIES[family], **changes)}
    patch.setattr(recipe, "FAMILIES", table)
    patch.setattr(shape, "FAMILIES", table)


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("llama biased", {"attention_bias": False}),
        ("llama biased", {"mlp_bias": False}),
        ("llama linear", {"rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0}}),
        ("llama linear", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
        ("llama llama3", {"rope_parameters": LLAMA3 | {"factor": 3.0}}),
        ("smollm3", {"no_rope_layers": [1] * 5}),
        ("smollm3 windowed", {"use_sliding_window": False, "layer_types": None}),
        ("smollm3 yarn", {"rope_parameters": YARN | {"factor": 2.0, "attention_factor": 1.14}}),
        ("smollm3 yarn", {"rope_parameters": YARN | {"attention_factor": 1.0}}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 9}),
        ("qwen2 windowed", {"layer_types": None, "max_window_layers": 0}),
        ("qwen2 windowed", {"layer_types": None, "use_sliding_window": False}),
        ("qwen2 listed", {"layer_types": KINDS[::-1]}),
        ("qwen3 yarn", {"rope_parameters": YARN | SCALES | {"truncate": True}}),
        ("qwen3 yarn", {"rope_parameters": YARN | SCALES | {"beta_fast": 32}}),
        ("qwen3 yarn", {"rope_parameters": YARN | SCALES | {"beta_slow": 1}}),
        ("qwen3 yarn", {"rope_parameters": YARN | SCALES | {"mscale": None}}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"num_experts_per_tok": 1}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("gemma2", {"hidden_activation": "silu"}),
        ("gemma2", {"layer_types": KINDS[::-1]}),
        ("gemma2 capped", {"attn_logit_softcapping": None}),
        ("gemma2 capped", {"final_logit_softcapping": None}),
        ("gemma2 capped", {"query_pre_attn_scalar": 32}),
        ("gemma3_text capped", {"final_logit_softcapping": None}),
        ("gemma3_text capped", {"query_pre_attn_scalar": 32}),
        ("gemma3_text capped", {"rope_parameters": {"full_attention": GLOBAL, "sliding_attention": GLOBAL}}),
        ("gemma3_text capped", {"rope_parameters": {"full_attention": LOCAL, "sliding_attention": LOCAL}}),
    ],
)
def test_what_a_config_says_is_not_left_out(variant: str, changes: dict[str, Any]) -> None:
    """Another window, cap, scale, routing or rotation shows in the logits, so these tests would see it forgotten."""
    assert worst(decoder_of(variant, **changes), variant) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("mixtral", {"whole_shares": False}),
        ("qwen2", {"qkv_bias": False}),
        ("qwen3", {"qk_norm": False}),
        ("gemma2", {"post_norms": False}),
        ("gemma2", {"offset_norms": False}),
        ("gemma2", {"scaled_embedding": False}),
        ("gemma3_text", {"qk_norm": False}),
        ("gemma3_text", {"offset_norms": False}),
    ],
)
def test_what_a_family_fixes_is_not_left_out(
    variant: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fact of the table shows in the logits."""
    forget(monkeypatch, VARIANTS[variant][0], **changes)
    assert worst(decoder_of(variant), variant) > 10 * TOLERANCE


@pytest.mark.parametrize("family", facts.FAMILIES)
def test_an_absent_key_means_what_it_means_to_transformers(family: str) -> None:
    """A config with nothing but sizes has the rotations, windows, caps, activation and eps of the whole one."""
    sizes = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 30,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "num_experts_per_tok": 2,
        "num_local_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "query_pre_attn_scalar": 9,
    }  # fmt: skip
    whole = recipe_of(AutoConfig.for_model(family, **sizes).to_dict())
    absent = recipe_of({"model_type": family, **sizes})
    for ours, theirs in zip(absent.attention, whole.attention, strict=True):
        assert ours._replace(freq_C=None) == theirs._replace(freq_C=None)
        assert (ours.freq_C is None) == (theirs.freq_C is None)
        assert ours.freq_C is None or theirs.freq_C is None or torch.equal(ours.freq_C, theirs.freq_C)
    assert replace(absent, attention=()) == replace(whole, attention=())


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_taken_is_what_is_listed(variant: str) -> None:
    """The loader holds files against `tensor_shapes`: each is there, is taken once, and nothing else is in them."""
    found, taken = case(variant), list[str]()
    with ExitStack() as files:
        source = SafetensorsSource(found.folder, files)

        def take(name: str) -> Tensor:
            taken.append(name)
            return source.tensor(name, torch.float32)

        Decoder(found.config, take)
        listed = tensor_shapes(shape_of(variant))
        assert sorted(taken) == sorted(listed)
        assert listed == source.shapes


@pytest.mark.parametrize("variant", ["llama", "gemma2", "qwen3_moe"])
def test_hidden_states_and_logits_are_apart(variant: str) -> None:
    """What is asked for later, of fewer rows, or of none, is what one forward gives."""
    decoder, tokens_T = decoder_of(variant), case(variant).prompts[0]
    x_RE = decoder.hidden(tokens_T, DenseCache(decoder), torch.tensor([3, 60, 7]))
    assert x_RE.shape == (3, 64)
    torch.testing.assert_close(decoder.logits(x_RE[1:]), at_once(decoder, tokens_T)[[60, 7]], atol=1e-5, rtol=1e-5)
    assert decoder.hidden(tokens_T, DenseCache(decoder), torch.empty(0, dtype=torch.int64)).shape == (0, 64)
    assert decoder.logits(x_RE[:0]).shape == (0, NUM_VOCAB)


@pytest.mark.parametrize("variant", ["mistral", "smollm3", "gemma3_text capped", "qwen3_moe", "mixtral windowed"])
def test_native_logits_are_the_same_bits_in_any_company(variant: str) -> None:
    """Windows, caps, norms of heads and experts keep what the kernels promise: mixed, cut and shared, or alone."""
    needs_kernels(variant)
    decoder, prompts = loaded(variant, "native"), case(variant).prompts
    mixed, alone = Pool(decoder, prompts, 8), Pool(decoder, prompts, 8)
    mixed.run([0, 1, 2], seed=5)
    mixed.share(3, 0, 48)
    mixed.run([3], seed=6)
    for i, one in enumerate(prompts):
        alone.step({i: len(one)})
    for i, start in enumerate((0, 0, 0, 48)):
        assert torch.equal(mixed.logits[i][start:], alone.logits[i][start:])


@pytest.mark.parametrize("family", [family for family in facts.FAMILIES if facts.FAMILIES[family].experts])
def test_experts_saved_in_one_tensor_load_too(family: str) -> None:
    """As transformers 5 holds them, and may save them."""
    one_by_one, tokens_T = at_once(loaded(family), case(family).prompts[2]), case(family, fused=True).prompts[2]
    assert torch.equal(at_once(loaded(family, fused=True), tokens_T), one_by_one)
    with ExitStack() as files:
        source = unfused(SafetensorsSource(case(family, fused=True).folder, files), shape_of(family))
        assert source.shapes == tensor_shapes(shape_of(family))


def test_fused_experts_of_other_sizes_are_refused() -> None:
    """They are held against the config before any of them is cut."""
    sizes = replace(shape_of("qwen3_moe"), moe_intermediate=16)
    fact = r"experts.gate_up_proj has shape \[4, 64, 64\] but the config implies \[4, 32, 64\]"
    with ExitStack() as files, pytest.raises(BrokenWeights, match=fact):
        unfused(SafetensorsSource(case("qwen3_moe", fused=True).folder, files), sizes)


def test_tokens_are_counted_by_expert_and_layer() -> None:
    """Each token goes to so many experts in each layer that has any; the last layer computes what is asked for."""
    decoder, tokens_T = decoder_of("qwen3_moe partly dense"), case("qwen3_moe partly dense").prompts[0]
    assert decoder.shape.dense_layers == {0, 2, 3, 4}
    decoder.forward(tokens_T, DenseCache(decoder), torch.arange(70))
    first_LX = decoder.expert_tokens_LX
    decoder.forward(tokens_T[:9], DenseCache(decoder), torch.arange(2))
    assert first_LX is not None and decoder.expert_tokens_LX is not None
    assert first_LX.sum(1).tolist() == [0, 2 * 70, 0, 0, 0]
    assert decoder.expert_tokens_LX.sum(1).tolist() == [0, 2 * 9, 0, 0, 0]
    whole = decoder_of("mixtral")
    whole.forward(tokens_T, DenseCache(whole), torch.arange(3))
    assert whole.expert_tokens_LX is not None
    assert whole.expert_tokens_LX.sum(1).tolist() == [140, 140, 6]
    assert decoder_of("llama").expert_tokens_LX is None


def test_tokens_go_where_transformers_sends_them() -> None:
    """The same number to the same experts."""
    model = model_of("mixtral")
    with torch.inference_mode():
        routed = model(case("mixtral").prompts[0][None], output_router_logits=True).router_logits
    expected_LX = torch.stack([logits_TX.topk(2).indices.flatten().bincount(minlength=4) for logits_TX in routed])
    decoder = decoder_of("mixtral")
    at_once(decoder, case("mixtral").prompts[0])
    assert torch.equal(decoder.expert_tokens_LX, expected_LX)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("num_tokens", [1, 2, 31, 200])
def test_a_tokens_experts_do_not_see_its_company(num_tokens: int, quantization: str | None) -> None:
    """First, last or amid others, on operators that are invariant: the same bits."""
    needs_kernels("qwen3_moe")
    sizes = shape_of("qwen3_moe")
    generator = torch.Generator().manual_seed(num_tokens)
    experts = Experts(
        NativeOps(quantization), sizes, 0, lambda name: torch.randn(tensor_shapes(sizes)[name], generator=generator),
        "silu", whole_shares=True,
    )  # fmt: skip
    x_TE, tokens_X = torch.randn(200, 64, generator=generator), torch.zeros(4, dtype=torch.int64)
    together_TE = experts(x_TE, tokens_X)
    assert tokens_X.sum() == 400
    for first in {0, 71, 200 - num_tokens} & set(range(201 - num_tokens)):
        here = slice(first, first + num_tokens)
        assert torch.equal(experts(x_TE[here], tokens_X), together_TE[here])


def test_int8_weights_send_tokens_to_the_same_experts() -> None:
    """The router is held as it is: a token that another expert gets is worse off than by any rounding."""
    sizes, x_TE = shape_of("mixtral"), torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    counts = [torch.zeros(4, dtype=torch.int64) for _ in range(2)]
    for quantization, tokens_X in zip((None, "int8"), counts, strict=True):
        draw = torch.Generator().manual_seed(1)
        weights_of = {name: torch.randn(dims, generator=draw) for name, dims in tensor_shapes(sizes).items()}
        Experts(TorchOps(quantization), sizes, 0, weights_of.__getitem__, "silu", whole_shares=True)(x_TE, tokens_X)
    assert torch.equal(*counts)


@pytest.mark.parametrize("variant", [*facts.FAMILIES, "gemma2 capped", "gemma3_text capped"])
def test_bfloat16_errs_no_more_than_transformers_does(variant: str) -> None:
    """Against float32 logits, our bfloat16 error is at most 1.1 times that of transformers' bfloat16."""
    found = case(variant)
    with ExitStack() as files:
        source = SafetensorsSource(found.folder, files)
        decoder = Decoder(found.config, lambda name: source.tensor(name, torch.bfloat16))
    theirs = AutoModelForCausalLM.from_pretrained(found.folder, dtype=torch.bfloat16, attn_implementation="eager")
    ours_TV = at_once(decoder, found.prompts[0])
    theirs_TV = reference_logits(theirs, found.prompts[0]).float()
    exact_TV = found.logits[0]
    assert (ours_TV - exact_TV).square().mean() < 1.1**2 * (theirs_TV - exact_TV).square().mean()


class WatchedOps(TorchOps):
    """Keeps what the first norm was given, and the dtypes of all weights of norms."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        self.dtypes: set[torch.dtype] = set()

    def norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        self.inputs.append(x_TE.clone())
        self.dtypes.add(weight_E.dtype)
        return super().norm(x_TE, weight_E, eps)


@pytest.mark.parametrize(("family", "dtype"), [("gemma3_text", torch.float32), ("qwen3", torch.bfloat16)])
def test_bfloat16_is_rounded_where_the_reference_rounds(family: str, dtype: torch.dtype) -> None:
    """Gemma adds one to the weights of its norms in float32, but scales embeddings by a root that is rounded."""
    model = tiny_model(family, hidden_size=96).bfloat16()
    ops, tokens_T, state = WatchedOps(), case(family).prompts[2], model.state_dict()
    decoder = Decoder(model.config.to_dict(), lambda name: state[name], ops=ops)
    at_once(decoder, tokens_T)
    assert ops.dtypes == {dtype}
    with torch.inference_mode():
        assert torch.equal(ops.inputs[0], model.get_input_embeddings()(tokens_T))


@pytest.mark.parametrize("ops", [TorchOps, NativeOps])
def test_a_norm_with_a_float32_weight_is_rounded_once(ops: type[TorchOps | NativeOps]) -> None:
    """The whole product is made in float32, whatever `x` is."""
    if ops is NativeOps:
        needs_kernels("gemma2", torch.bfloat16)
    x_TE, weight_E = torch.randn(50, 64).bfloat16(), 1 + 0.1 * torch.randn(64)
    exact_TE = x_TE.double() * (x_TE.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight_E
    found_TE = ops().norm(x_TE, weight_E, 1e-6)
    assert found_TE.dtype == torch.bfloat16
    assert ((found_TE - exact_TE).abs() <= exact_TE.abs() * 2**-8 + 1e-6).all()  # half a step of 8 bits, at most


def test_plain_are_those_that_do_what_llama_does() -> None:
    """Biases and scaled rotations are no more than that; a window, or a single layer that does not rotate, is."""
    plain = {"llama", "llama biased", "llama linear", "llama dynamic", "llama llama3", "qwen2", "qwen2 yarn"}
    assert {variant for variant in VARIANTS if recipe_of(case(variant).config).is_plain} == plain


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"model_type": "gemma3"}, "'gemma3'; supported are llama, smollm3, mistral, mixtral, qwen2"),
        ({"use_bidirectional_attention": True}, "looks ahead"),
        ({"hidden_activation": "gelu"}, "'gelu'; supported are silu, gelu_pytorch_tanh"),
        ({"query_pre_attn_scalar": None}, "query_pre_attn_scalar is None"),
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0"),
    ],
)
def test_what_would_be_another_model_is_refused(changes: dict[str, Any], fact: str) -> None:
    """The error names what is not computed."""
    with pytest.raises(BatchwrightError, match=fact):
        supported_shape(case("gemma2").config | changes)
