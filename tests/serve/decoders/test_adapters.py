"""Adapters give what PEFT gives, each row its own in any company; files that would give something else are refused."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from batchwright.errors import BatchwrightError, BrokenWeights, InputError, UnsupportedModel
from batchwright.serve.decoders import native
from batchwright.serve.decoders.adapters import Adapter, StepAdapters
from batchwright.serve.decoders.model import Decoder
from batchwright.serve.decoders.rope import interleave
from batchwright.serve.loading import weights
from batchwright.serve.loading.adapter_file import CONFIG, WEIGHTS, load_adapter
from batchwright.serve.loading.adapter_scale import Scaling
from batchwright.serve.loading.checkpoint import read_json
from tests.serve.conftest import SOME_TOKENS_T as TOKENS_T
from tests.serve.conftest import TINY, DenseCache, MakeAdapter, MakeCheckpoint
from tests.serve.mixed import logits_of, random_jobs

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT uses the old name

CPU = torch.device("cpu")
NO_KERNELS = native.why_not(torch.float32, CPU)
needs_kernels = pytest.mark.skipif(bool(NO_KERNELS), reason=f"no kernels here: {NO_KERNELS}")
BACKENDS = ["torch", pytest.param("native", marks=needs_kernels)]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "rank 1 of queries and values": {"r": 1, "target_modules": ["q_proj", "v_proj"]},
    "rank 4 of everything": {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"},
    "rank 8, rank-stabilised": {"r": 8, "use_rslora": True, "target_modules": ["k_proj", "o_proj", "down_proj"]},
    "rank 17 of the MLP": {"r": 17, "lora_alpha": 3, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "one half of a gate": {"r": 3, "target_modules": ["up_proj"]},
    "some layers": {"r": 8, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2]},
    "the last layer": {"r": 8, "target_modules": "all-linear", "exclude_modules": r".*layers\.[01]\..*"},
    "a pattern of names": {"r": 2, "target_modules": r".*\.(self_attn\.[qk]|mlp\.gate)_proj"},
    "ranks and alphas by pattern": {
        "r": 8,
        "target_modules": [*ATTENTION, "gate_proj"],
        "use_rslora": True,
        "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.gate_proj": 20, "^model.layers.2.self_attn.o_proj": 1},
        "alpha_pattern": {r"layers\.(0|2)\..*": 32, "v_proj": 2, "model.layers.1.self_attn.k_proj": 0.5},
    },
}


def run(decoder: Decoder, adapter: Adapter | None, wanted: Sequence[int] = range(len(TOKENS_T))) -> Tensor:
    adapters = StepAdapters.of([adapter] * len(TOKENS_T), wanted, CPU)
    return decoder.forward(TOKENS_T, DenseCache(decoder), torch.tensor(wanted), adapters=adapters)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", CONFIGS)
def test_logits_equal_pefts(
    config: str, backend: str, make_checkpoint: MakeCheckpoint, make_adapter: MakeAdapter
) -> None:
    """In float32 within 1e-4, and far from the base model's; also where few positions are wanted."""
    path = make_checkpoint(head_dim=16, attention_bias=True, mlp_bias=True)
    made = make_adapter(path, **CONFIGS[config])
    decoder = weights.load(path, torch.float32, backend=backend).decoder
    adapter = load_adapter(made.path, decoder)
    assert (run(decoder, adapter) - made.logits_TV).abs().max() < 1e-4
    assert (run(decoder, adapter, [39, 7]) - made.logits_TV[[39, 7]]).abs().max() < 1e-4
    assert (run(decoder, None) - made.logits_TV).abs().max() > 0.01


FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24},
    "gemma3_text": {"head_dim": 16, "sliding_window": 9, "sliding_window_pattern": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_pefts_in_every_family(
    family: str, backend: str, tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    """Of all linear layers, or of attention's where a layer has experts; norms come after what an adapter adds."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **TINY | {"hidden_size": 96} | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / family)
    made = make_adapter(tmp_path / family, r=5, target_modules=ATTENTION if family == "mixtral" else "all-linear")
    decoder = weights.load(tmp_path / family, torch.float32, backend=backend).decoder
    adapter = load_adapter(made.path, decoder)
    assert (run(decoder, adapter) - made.logits_TV).abs().max() < 1e-4
    assert (run(decoder, None) - made.logits_TV).abs().max() > 0.01


def three_adapters(path: Path, decoder: Decoder, make_adapter: MakeAdapter) -> list[Adapter]:
    names = ["rank 4 of everything", "rank 17 of the MLP", "some layers"]
    made = [make_adapter(path, str(seed), seed, **CONFIGS[name]) for seed, name in enumerate(names)]
    return [load_adapter(one.path, decoder) for one in made]


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs_kernels
def test_each_row_gets_the_bits_it_gets_alone(
    dtype: torch.dtype, quantization: Any, make_checkpoint: MakeCheckpoint, make_adapter: MakeAdapter
) -> None:
    """Three adapters and the base model, chunks of prompts and decodes in steps of all kinds."""
    path = make_checkpoint(head_dim=16)
    decoder = weights.load(path, dtype, backend="native", quantization=quantization).decoder
    one, two, three = three_adapters(path, decoder, make_adapter)
    for seed in range(8):
        mix = random.Random(seed).choices([one, two, three, None], k=9)
        jobs = random_jobs(seed, mix)
        together = logits_of(decoder, jobs)
        for job, logits_SV in zip(jobs, together, strict=True):
            assert torch.equal(logits_of(decoder, [job])[0], logits_SV)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_row_gets_its_own_adapter(
    backend: str, make_checkpoint: MakeCheckpoint, make_adapter: MakeAdapter
) -> None:
    """Within 1e-4 of what it gets alone; and rows without one get the bits of a step without adapters."""
    path = make_checkpoint(head_dim=16)
    decoder = weights.load(path, torch.float32, backend=backend).decoder
    one, two, three = three_adapters(path, decoder, make_adapter)
    mix = [None, one, two, None, three, one, None]
    jobs = random_jobs(0, mix)
    together = logits_of(decoder, jobs)
    of_base = logits_of(decoder, [job._replace(adapter=None) for job in jobs])
    for job, logits_SV, base_SV in zip(jobs, together, of_base, strict=True):
        assert (logits_of(decoder, [job])[0] - logits_SV).abs().max() < 1e-4
        assert torch.equal(logits_SV, base_SV) == (job.adapter is None)


def test_a_base_in_pair_order_takes_the_same_adapter(
    make_checkpoint: MakeCheckpoint, make_adapter: MakeAdapter
) -> None:
    """A GGUF file stores queries and keys in pair order already; an adapter is in Hugging Face's order all the same."""
    path = make_checkpoint()
    made = make_adapter(path, r=4, target_modules=["q_proj", "k_proj"])
    state = load_file(path / "model.safetensors")

    def take(name: str) -> Tensor:
        is_rotated = name.endswith(("q_proj.weight", "k_proj.weight"))
        return (
            interleave(state[name], TINY["hidden_size"] // TINY["num_attention_heads"]) if is_rotated else state[name]
        )

    decoder = Decoder(read_json(path / "config.json"), take, in_pair_order=True)
    assert (run(decoder, load_adapter(made.path, decoder)) - made.logits_TV).abs().max() < 1e-4


def test_an_adapter_is_not_quantised_with_its_base(make_checkpoint: MakeCheckpoint, make_adapter: MakeAdapter) -> None:
    """What it adds over an int8 base is what it adds over the plain one, up to the base's own rounding."""
    path = make_checkpoint()
    made = make_adapter(path, r=4, lora_alpha=64, target_modules=["gate_proj", "v_proj"])
    plain, int8 = (weights.load(path, torch.float32, quantization=q, backend="torch").decoder for q in (None, "int8"))
    adapters = [load_adapter(made.path, decoder) for decoder in (plain, int8)]
    assert adapters[0].num_bytes == adapters[1].num_bytes
    base = run(plain, None)
    added = run(int8, adapters[1]) - run(int8, None)
    assert (added - (made.logits_TV - base)).norm() < 0.05 * (made.logits_TV - base).norm()


def test_it_says_what_memory_it_takes(make_checkpoint: MakeCheckpoint, make_adapter: MakeAdapter) -> None:
    """Of a rank of 20, filled up to 24: 24 * (K + N) values of each projection."""
    path = make_checkpoint()
    made = make_adapter(path, r=20, target_modules=["gate_proj", "down_proj"])
    decoder = weights.load(path, torch.bfloat16, backend="torch").decoder
    per_layer = 24 * (48 + 80) + 24 * (80 + 48)
    assert load_adapter(made.path, decoder).num_bytes == 3 * per_layer * 2


def test_a_step_without_adapters_is_the_base_models() -> None:
    """So it costs nothing: there is no object to ask."""
    assert StepAdapters.of([None, None], [1], CPU) is None


# ---- what is refused


@pytest.fixture
def tiny(make_checkpoint: MakeCheckpoint, make_adapter: MakeAdapter) -> tuple[Path, Decoder]:
    path = make_checkpoint()
    made = make_adapter(path, r=4, target_modules=["q_proj", "up_proj"])
    return made.path, weights.load(path, torch.float32, backend="torch").decoder


def edit(path: Path, changes: Mapping[str, Any]) -> None:
    (path / CONFIG).write_text(json.dumps(json.loads((path / CONFIG).read_text()) | changes))


def edit_tensors(path: Path, changes: Mapping[str, Tensor | None]) -> None:
    tensors = load_file(path / WEIGHTS) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / WEIGHTS)


def named(module: str, half: str = "A", layer: int = 0) -> str:
    return f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight"


def pair(module: str, num_inputs: int = 48, num_outputs: int = 48) -> dict[str, Tensor]:
    """A module's two tensors, by the name within the base model."""
    names = (f"base_model.model.{module}.lora_{half}.weight" for half in "AB")
    return dict(zip(names, (torch.ones(4, num_inputs), torch.ones(num_outputs, 4)), strict=True))


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"use_dora": True}, "sets use_dora to True"),
        ({"bias": "all"}, "sets bias to 'all'"),
        ({"lora_bias": True}, "sets lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "sets target_parameters"),
        ({"trainable_token_indices": [1]}, "sets trainable_token_indices"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "sets layer_replication"),
        ({"alora_invocation_tokens": [5]}, "sets alora_invocation_tokens"),
        ({"invented_in_2030": {"x": 1}}, "sets invented_in_2030"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; supported is LORA"),
        ({"peft_type": "PREFIX_TUNING"}, "peft_type is 'PREFIX_TUNING'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', for which PEFT changes"),
        ({"rank_pattern": {"(a+)+": 4}}, "could take long to match"),
        ({"alpha_pattern": {".*.*.*.*x": 4}}, "could take long to match"),
    ],
)
def test_what_is_not_plain_lora_is_refused(changes: dict[str, Any], fact: str, tiny: tuple[Path, Decoder]) -> None:
    """By the name of the setting; one that nobody here knows could mean anything."""
    edit(tiny[0], changes)
    assert_refused(*tiny, fact, UnsupportedModel)


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"r": 8}, "has shape [4, 48], but the model and rank 8 imply [8, 48]"),
        ({"r": 10**12}, "rank 1000000000000 imply"),
        ({"rank_pattern": {"up_proj": 5}}, "rank 5 imply"),
        ({"r": 0}, "r holds 0, which is not a positive whole number"),
        ({"r": "4"}, "r holds '4'"),
        ({"r": True}, "r holds True"),
        ({"r": None}, "r holds None"),
        ({"lora_alpha": "x"}, "lora_alpha holds 'x', which is not a finite number"),
        ({"lora_alpha": float("nan")}, "lora_alpha holds nan"),
        ({"lora_alpha": 1e300}, "q_proj holds infinities"),
        ({"use_rslora": "yes"}, "use_rslora holds 'yes'"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is"),
        ({"alpha_pattern": {"q_proj": [1]}}, "alpha_pattern holds [1]"),
        ({"alpha_pattern": {"q_proj[": 1}}, "is no regular expression"),
        ({"alpha_pattern": {"q{99999999999999999999}": 1}}, "is no regular expression"),
    ],
)
def test_a_config_that_contradicts_its_tensors_or_itself_is_refused(
    changes: dict[str, Any], fact: str, tiny: tuple[Path, Decoder]
) -> None:
    """Ranks, scales and patterns are held against what is there, and huge claims cost nothing."""
    edit(tiny[0], changes)
    assert_refused(*tiny, fact, BrokenWeights)


NAN = torch.full((4, 48), torch.nan)


@pytest.mark.parametrize(
    ("changes", "kind", "fact"),
    [
        ({named("self_attn.q_proj", "B"): None}, BrokenWeights, "q_proj.lora_B.weight is missing"),
        ({named("mlp.up_proj", "A", 2): None}, BrokenWeights, "up_proj.lora_A.weight is missing"),
        ({named("self_attn.q_proj"): NAN}, BrokenWeights, "holds infinities or NaNs"),
        ({named("self_attn.q_proj"): torch.ones(4, 40)}, BrokenWeights, "shape [4, 40], but"),
        ({named("mlp.up_proj", "B"): torch.ones(81, 4)}, BrokenWeights, "shape [81, 4], but"),
        ({named("mlp.up_proj", "B"): torch.ones(4)}, BrokenWeights, "shape [4], but"),
        ({named("mlp.up_proj"): torch.ones(4, 48, dtype=torch.int8)}, UnsupportedModel, "stored as torch.int8"),
        (
            pair("model.layers.3.self_attn.q_proj"),
            BrokenWeights,
            "layers.3.self_attn.q_proj, and the model has 3 layers",
        ),
        (pair("model.layers.0.mlp.experts.7.up_proj"), UnsupportedModel, "of dense layers"),
        (pair("model.layers.0.mlp.shared_expert.up_proj"), BrokenWeights, "the model has no"),
        (pair("model.layers.0.self_attn.qkv_proj"), BrokenWeights, "the model has no"),
        (pair("lm_head"), UnsupportedModel, "it adapts lm_head; supported are q_proj"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 97)}, UnsupportedModel, "no lora_A"),
        ({"base_model.model.lm_head.weight": torch.ones(97, 48)}, UnsupportedModel, "no lora_A"),
        ({named("self_attn.q_proj").replace("lora_A", "lora_magnitude_vector"): NAN}, UnsupportedModel, "no lora_A"),
        ({"model.layers.0.self_attn.q_proj.lora_A.weight": NAN}, UnsupportedModel, "no lora_A"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    changes: dict[str, Tensor | None], kind: type[BatchwrightError], fact: str, tiny: tuple[Path, Decoder]
) -> None:
    """Halves of pairs, other shapes, modules that the base model lacks or that we do not adapt."""
    edit_tensors(tiny[0], changes)
    assert_refused(*tiny, fact, kind)


def test_files_that_are_not_there_are_named(tiny: tuple[Path, Decoder]) -> None:
    """No directory, no config, no weights, pickles, no tensors."""
    path, decoder = tiny
    assert_refused(path / "nowhere", decoder, "no such directory", InputError)
    tensors, config = (path / WEIGHTS).read_bytes(), (path / CONFIG).read_text()
    save_file({}, path / WEIGHTS)
    assert_refused(path, decoder, "holds no tensors", BrokenWeights)
    (path / WEIGHTS).write_bytes(tensors[:-5])
    assert_refused(path, decoder, "truncated", BrokenWeights)
    (path / WEIGHTS).rename(path / "adapter_model.bin")
    assert_refused(path, decoder, "pickle (adapter_model.bin)", UnsupportedModel)
    (path / "adapter_model.bin").unlink()
    assert_refused(path, decoder, f"no {WEIGHTS}", BrokenWeights)
    (path / CONFIG).unlink()
    assert_refused(path, decoder, f"no {CONFIG} and no {WEIGHTS}", BrokenWeights)
    (path / WEIGHTS).write_bytes(tensors)
    (path / CONFIG).write_text(config[:50])
    assert_refused(path, decoder, CONFIG, BrokenWeights)


def assert_refused(path: Path, decoder: Decoder, fact: str, kind: type[BatchwrightError]) -> None:
    with pytest.raises(kind) as error:
        load_adapter(path, decoder)
    assert fact in str(error.value)
    assert error.value.asked and error.value.fact and error.value.remedy


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(["peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "other"])
NAMES = st.sampled_from([named("self_attn.q_proj"), named("mlp.up_proj", "B"), named("x.y"), "x", ""])
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool])
TENSORS = st.builds(lambda dims, dtype: torch.ones(dims).to(dtype), st.lists(st.integers(0, 50), max_size=3), DTYPES)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(KEYS, JSON, max_size=3),
    tensors=st.dictionaries(NAMES, st.none() | TENSORS, max_size=2),
    data=st.data(),
)
def test_whatever_the_files_hold_it_loads_or_is_refused(
    changes: dict[str, Any], tensors: dict[str, Tensor | None], data: st.DataObject, tiny: tuple[Path, Decoder]
) -> None:
    """Random values in the config, random tensors, and a byte of the file changed."""
    path, decoder = tiny
    backup = {file: (path / file).read_bytes() for file in (CONFIG, WEIGHTS)}
    try:
        edit(path, changes)
        edit_tensors(path, tensors)
        content = bytearray((path / WEIGHTS).read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        (path / WEIGHTS).write_bytes(content)
        load_adapter(path, decoder)
    except BatchwrightError:
        pass
    finally:
        for file, content in backup.items():
            (path / file).write_bytes(content)


# ---- patterns

MODULES = [f"model.layers.{i}.{name}" for i in (0, 1, 11) for name in ("self_attn.q_proj", "mlp.up_proj")]
PIECES = [
    "model",
    "layers",
    "q_proj",
    "up_proj",
    "1",
    ".",
    r"\.",
    "^",
    ".*",
    r"\d+",
    "(0|1)",
    "[qu]p?",
    "?",
    "|",
    "$",
    "(?:a|b)",
]


@settings(max_examples=300)
@given(st.dictionaries(st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join), st.integers(1, 99)))
def test_patterns_match_as_pefts_do(patterns: dict[str, int]) -> None:
    """The first that matches counts; what PEFT cannot compile either is refused, and so is what could take long."""
    try:
        scaling = Scaling("x", {"r": 1000, "rank_pattern": patterns})
    except BatchwrightError:
        return
    for module in MODULES:
        assert scaling.rank(module) == patterns.get(get_pattern_key(patterns, module), 1000)


HARD = st.sampled_from(
    [".*", "a+", "(a|a)", "(a?)", "[a-z]*", "(a|b|ab)", "(.*)", "a{0,9}", "x", r"\w+?", "(a+)+", "(?=a)", "(?x) (a*) *"]
)


@settings(max_examples=200)
@given(st.lists(HARD, max_size=12).map("".join))
def test_no_pattern_takes_long(pattern: str) -> None:
    """What is let through is done with a name at once; a search without bounds ends this run by its timeout."""
    try:
        scaling = Scaling("x", {"rank_pattern": {pattern + "!": 2}})
    except BatchwrightError:
        return
    assert scaling.rank("a" * 36 + ".b") == 8
