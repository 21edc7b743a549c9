"""GGUF files of every architecture, written as llama.cpp's converter writes them, are transformers' models."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from batchwright.errors import BatchwrightError, UnsupportedModel
from batchwright.serve.loading import weights
from batchwright.serve.loading.gguf_file import GgufFile
from tests.serve.conftest import DenseCache
from tests.serve.families import NUM_VOCAB, reference_logits, tiny_model

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
TOKENS_T = torch.randint(0, NUM_VOCAB, (40,), generator=torch.Generator().manual_seed(1))


def permuted(rows: Tensor, num_heads: int) -> Tensor:
    """Halves of each head become neighbours."""
    return rows.view(num_heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def converted(model: PreTrainedModel, family: str) -> dict[str, Tensor]:
    """The model's tensors as the converter changes, splits and stacks them, by the names they have meanwhile."""
    config, found = model.config, {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True):
                found[name.replace("gate_up_proj", f"{part}.weight")] = half
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = tensor
        elif family in ("llama", "mixtral", "smollm3") and ".q_proj." in name:
            found[name] = permuted(tensor, config.num_attention_heads)
        elif family in ("llama", "mixtral", "smollm3") and ".k_proj." in name:
            found[name] = permuted(tensor, config.num_key_value_heads)
        elif family.startswith("gemma") and name.endswith("norm.weight"):
            found[name] = tensor + 1
        else:
            found[name] = tensor
    return found if not config.tie_word_embeddings else found | {"lm_head.weight": None}


def rounded(tensor: Tensor, kind: gguf.GGMLQuantizationType) -> Tensor:
    return torch.tensor(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind))


def write(path: Path, model: PreTrainedModel, family: str, kind: str = "F32", head_dim: int = 16, **extra: Any) -> Path:
    """`extra`: keys of the architecture beside those that every file has."""
    config, architecture = model.config, ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(extra.pop("value_length", head_dim))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for word, value in extra.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        key = word.replace("__", ".")
        key = key if key.startswith("split.") else f"{writer.arch}.{key}"
        (writer.add_string if isinstance(value, str) else add)(key, value)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    quantisation = gguf.GGMLQuantizationType[kind]
    for name, tensor in converted(model, family).items():
        if tensor is not None:
            kept = gguf.GGMLQuantizationType.F32 if tensor.ndim == 1 else quantisation
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(stored, gguf.quantize(tensor.numpy(), kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


EXPERTS = {"expert_count": 4, "expert_used_count": 2}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {"rope__freq_base": 10_000.0, "rope__dimension_count": 16}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
    ),
    "mixtral": ("mixtral", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        EXPERTS | {"rope__freq_base": 1e6},
    ),
    "smollm3": ("smollm3", {}, {"rope__freq_base": 2e6}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2-yarn": (
        "qwen2",
        {"rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
            "attention_factor": 1.25, "rope_theta": 1e6,
        }},
        {
            "rope__freq_base": 1e6, "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 64, "rope__scaling__yarn_attn_factor": 1.25,
            "rope__scaling__yarn_beta_fast": 16.0,
        },
    ),
    "qwen3": ("qwen3", {}, {"head_dim": 32}),
    "qwen3moe": ("qwen3_moe", {}, EXPERTS | {"head_dim": 32, "expert_feed_forward_length": 32}),
    "gemma2": (
        "gemma2",
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        {"head_dim": 32, "attention__sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma2-defaults": ("gemma2", {"sliding_window": 4096}, {"head_dim": 32}),
    "gemma3": ("gemma3_text", {}, {"head_dim": 32, "rope__freq_base": 1e6, "attention__sliding_window": 8}),
    "gemma3-scaled": (
        "gemma3_text",
        {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
        }, "tie_word_embeddings": False},
        {
            "head_dim": 32, "rope__freq_base": 1e6, "rope__freq_base_swa": 20_000.0, "attention__sliding_window": 8,
            "rope__scaling__type": "linear", "rope__scaling__factor": 8.0,
        },
    ),
    "gemma3-whole": (
        "gemma3_text", {"layer_types": ["full_attention"] * 7}, {"head_dim": 32, "rope__freq_base": 1e6},
    ),
}  # fmt: skip
"""Family, what its transformers model is made with, and what its file then says."""


def logits(path: Path) -> Tensor:
    decoder = weights.load(path, torch.float32).decoder
    return decoder.forward(TOKENS_T, DenseCache(decoder), torch.arange(len(TOKENS_T)))


@pytest.mark.parametrize("case", CASES)
def test_a_file_computes_what_transformers_computes(case: str, tmp_path: Path) -> None:
    """Names, orders of rows, shifted norms, stacked experts, and every key of the metadata that changes the numbers."""
    family, changes, extra = CASES[case]
    model = tiny_model(family, **changes)
    theirs_TV = reference_logits(model, TOKENS_T)
    ours_TV = logits(write(tmp_path / "tiny.gguf", model, family, **extra))
    assert (ours_TV - theirs_TV).abs().max() < 1e-4
    assert theirs_TV.std() > 0.1


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("case", ["llama", "mixtral", "qwen3moe", "gemma2"])
def test_a_quantised_file_computes_with_its_own_weights(case: str, kind: str, tmp_path: Path) -> None:
    """The model that transformers runs with the weights that the gguf package reads."""
    family, changes, extra = CASES[case]
    model = tiny_model(family, **changes)
    path = write(tmp_path / "tiny.gguf", model, family, kind, **extra)
    with torch.no_grad():
        for parameter in (parameter for parameter in model.parameters() if parameter.ndim > 1):
            parameter.copy_(rounded(parameter, gguf.GGMLQuantizationType[kind]))
    assert (logits(path) - reference_logits(model, TOKENS_T)).abs().max() < 1e-4


@pytest.mark.parametrize(("layers", "divisor"), [(46, 16), (3, 32)])
def test_gemmas_largest_models_scale_scores_differently(layers: int, divisor: int, tmp_path: Path) -> None:
    """No key says so; llama.cpp knows them by their number of layers."""
    model = tiny_model("gemma2", num_hidden_layers=layers, query_pre_attn_scalar=divisor)
    extra = {"head_dim": 32, "attention__sliding_window": 8}
    loaded = weights.load(write(tmp_path / "tiny.gguf", model, "gemma2", **extra), torch.float32)
    assert {does.scale for does in loaded.decoder.attention} == {divisor**-0.5}


@pytest.mark.parametrize(
    ("case", "extra", "fact"),
    [
        ("llama", {"attention__scale": 0.5}, r"0\.5 for llama\.attention\.scale, which no config holds"),
        ("llama", {"logit_scale": 0.5}, "for llama.logit_scale, which no config holds"),
        ("qwen3moe", {"expert_gating_func": 2}, "2 for qwen3moe.expert_gating_func, which no config holds"),
        ("qwen3moe", {"expert_shared_count": 1}, "1 for qwen3moe.expert_shared_count, which no config holds"),
        ("qwen2", {"attention__sliding_window": 8}, "8 for qwen2.attention.sliding_window, which no config holds"),
        ("gemma3", {"attn_logit_softcapping": 5.0}, "for gemma3.attn_logit_softcapping, which no config holds"),
        ("gemma3", {"attention__sliding_window_pattern": 4}, "4 for gemma3.attention.sliding_window_pattern"),
        ("qwen2", {"expert_count": 4}, "4 experts, which its architecture lets no config have"),
        ("qwen2", {"rope__scaling__type": "longrope"}, "by 'longrope'; supported are linear and yarn"),
        ("qwen2", {"value_length": 8}, "keys of 16 and values of 8 numbers"),
        ("llama", {"split__count": 3}, "one of 3 files that hold the model together"),
    ],
)
def test_what_would_make_it_another_model_is_refused(case: str, extra: dict, fact: str, tmp_path: Path) -> None:
    """A key that changes what is computed is never left out."""
    family, changes, usual = CASES[case]
    path = write(tmp_path / "tiny.gguf", tiny_model(family, **changes), family, **usual | extra)
    with pytest.raises(UnsupportedModel, match=fact):
        weights.load(path)


@pytest.mark.parametrize(
    ("case", "extra", "fact"),
    [
        ("mixtral", {"expert_count": 5}, r"gate\.weight has shape \[4, 64\] but the config implies \[5, 64\]"),
        ("mixtral", {"expert_count": 2**16}, "claims 196,608 experts in its layers but its files hold 60 tensors"),
        ("mixtral", {"expert_count": 2**31}, "num_local_experts is more than 65,536"),
        ("mixtral", {"expert_count": 3}, r"gate\.weight has shape \[4, 64\] but the config implies \[3, 64\]"),
        ("qwen3moe", {"expert_feed_forward_length": 64}, r"has shape \[32, 64\] but the config implies \[64, 64\]"),
        ("qwen3moe", {"expert_used_count": 9}, "9 experts per token of 4"),
        ("qwen3", {"head_dim": 16}, r"q_norm\.weight has shape \[32\] but the config implies \[16\]"),
    ],
)
def test_metadata_that_contradicts_the_tensors_is_told(case: str, extra: dict, fact: str, tmp_path: Path) -> None:
    """Experts that are not there, or not all of them, other widths, other heads."""
    family, changes, usual = CASES[case]
    path = write(tmp_path / "tiny.gguf", tiny_model(family, **changes), family, **usual | extra)
    with pytest.raises(BatchwrightError, match=fact):
        weights.load(path)


VALUES = st.recursive(
    st.booleans()
    | st.sampled_from([0, 1, -1, 3, 7, 64, 2**31, 2**63])
    | st.sampled_from([0.0, 0.5, -1.0, 1e-45, 3e38, float("nan"), float("inf")])
    | st.sampled_from(["", "x", "yarn", "linear", "longrope", "llama", "gemma3", "qwen3moe"]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=5,
)
EXTRA = (
    "attention.sliding_window", "attention.scale", "rope.scaling.type", "rope.scaling.factor", "expert_count",
    "rope.scaling.original_context_length", "expert_used_count", "expert_feed_forward_length", "vocab_size",
    "rope.freq_base", "rope.dimension_count", "attn_logit_softcapping", "final_logit_softcapping",
)  # fmt: skip


@pytest.mark.parametrize("case", ["llama", "mixtral", "smollm3", "qwen2-yarn", "qwen3moe", "gemma2", "gemma3"])
def test_any_metadata_loads_or_is_one_of_our_errors(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of every key of the wrong kind, huge, negative, listed, or absent."""
    family, changes, extra = CASES[case]
    read = GgufFile(write(tmp_path / "tiny.gguf", tiny_model(family, **changes), family, **extra))
    whole, prefix = dict(read.metadata), read.metadata["general.architecture"]
    keys = sorted({*whole, *(f"{prefix}.{key}" for key in EXTRA), "split.count"})
    monkeypatch.setattr(weights, "GgufFile", lambda path: read)

    @settings(max_examples=60, deadline=None)
    @given(changed=st.dictionaries(st.sampled_from(keys), st.none() | VALUES, min_size=1, max_size=3))
    def check(changed: dict[str, Any]) -> None:
        read.metadata = {key: value for key, value in (whole | changed).items() if value is not None}
        with suppress(BatchwrightError):
            weights.load(read.path)

    check()
