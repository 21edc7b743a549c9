"""Laws of the formulas, published sizes of real models, and configs that cannot be believed."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ConfigError, UnsupportedModel
from batchwright.facts.shape import ModelShape

LLAMA_2_7B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
LLAMA_3_8B = LLAMA_2_7B | {
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
SMOLLM2_135M = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
QWEN_2_5_7B = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
QWEN_3_0_6B = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN_3_30B_A3B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
MISTRAL_7B_V01 = LLAMA_3_8B | {
    "model_type": "mistral",
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}
SMOLLM3_3B = {
    "model_type": "smollm3",
    "num_hidden_layers": 36,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 11008,
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
}
GEMMA_2_2B = {
    "model_type": "gemma2",
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
GEMMA_3_1B = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 26,
    "hidden_size": 1152,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 6912,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
}
CONFIGS = {
    "Llama-2-7B": LLAMA_2_7B,
    "Llama-3-8B": LLAMA_3_8B,
    "SmolLM2-135M": SMOLLM2_135M,
    "Qwen2.5-7B": QWEN_2_5_7B,
    "Qwen3-0.6B": QWEN_3_0_6B,
    "Mixtral-8x7B": MIXTRAL_8X7B,
    "Qwen3-30B-A3B": QWEN_3_30B_A3B,
    "Mistral-7B-v0.1": MISTRAL_7B_V01,
    "SmolLM3-3B": SMOLLM3_3B,
    "Gemma-2-2B": GEMMA_2_2B,
    "Gemma-3-1B": GEMMA_3_1B,
    "partly dense Qwen3-30B": QWEN_3_30B_A3B | {"mlp_only_layers": [0, 3], "decoder_sparse_step": 2},
    "biased Gemma-3": GEMMA_3_1B | {"attention_bias": True},
    "windowed Qwen2.5": QWEN_2_5_7B | {"use_sliding_window": True, "sliding_window": 300, "max_window_layers": 20},
    "biased Llama": LLAMA_2_7B | {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True},
}


def shape_of(config: dict[str, Any], **changes: Any) -> ModelShape:
    """The shape of a config with some keys changed."""
    return ModelShape.from_config(config | changes)


shapes = st.sampled_from(sorted(CONFIGS)).map(lambda name: ModelShape.from_config(CONFIGS[name]))


@given(shape=shapes, num_tokens=st.integers(0, 60), start=st.integers(0, 9000), num_sampled=st.integers(0, 3))
def test_prefill_costs_exactly_what_its_tokens_cost_one_by_one(
    shape: ModelShape, num_tokens: int, start: int, num_sampled: int
) -> None:
    """The closed causal sum equals a loop over positions, windowed models included."""
    one_by_one = sum(shape.flops_per_token(position + 1) for position in range(start, start + num_tokens))
    assert shape.prefill_flops(num_tokens, start, num_sampled) == one_by_one + num_sampled * shape.head_flops


@given(shape=shapes, first=st.integers(0, 5000), second=st.integers(0, 5000), start=st.integers(0, 5000))
def test_splitting_a_prefill_into_chunks_costs_the_same(shape: ModelShape, first: int, second: int, start: int) -> None:
    """FLOPs do not depend on where a prompt is cut."""
    whole = shape.prefill_flops(first + second, start)
    assert whole == shape.prefill_flops(first, start, 0) + shape.prefill_flops(second, start + first, 1)


@given(shape=shapes, num_prompt=st.integers(1, 3000), num_output=st.integers(1, 40))
def test_a_request_costs_its_prefill_and_its_decode_steps(shape: ModelShape, num_prompt: int, num_output: int) -> None:
    """One sampled prefill, then one step per further output token, each with the LM head."""
    decode = sum(shape.flops_per_token(num_prompt + step) + shape.head_flops for step in range(1, num_output))
    assert shape.request_flops(num_prompt, num_output) == shape.prefill_flops(num_prompt) + decode


@given(shape=shapes, context=st.integers(1, 10_000))
def test_attending_to_more_never_costs_less(shape: ModelShape, context: int) -> None:
    """FLOPs per token grow with context, up to the window."""
    assert shape.flops_per_token(0) < shape.flops_per_token(context) <= shape.flops_per_token(context + 1)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_parameters_equal_those_of_the_reference_implementation(name: str) -> None:
    """The formula counts what transformers allocates, to the last weight."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    settings = dict(CONFIGS[name])
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert ModelShape.from_config(CONFIGS[name]).num_parameters == model.num_parameters()


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("Llama-2-7B", 6_738_415_616),
        ("Llama-3-8B", 8_030_261_248),
        ("SmolLM2-135M", 134_515_008),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Qwen3-0.6B", 596_049_920),
        ("Mixtral-8x7B", 46_702_792_704),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("SmolLM3-3B", 3_075_098_624),
        ("Gemma-2-2B", 2_614_341_888),
        ("Gemma-3-1B", 999_885_952),
    ],
)
def test_parameters_of_published_models(name: str, num_parameters: int) -> None:
    """The totals that the weights of these models have."""
    assert ModelShape.from_config(CONFIGS[name]).num_parameters == num_parameters


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [("Llama-2-7B", 524_288), ("Llama-3-8B", 131_072), ("Qwen2.5-7B", 57_344), ("Qwen3-0.6B", 114_688)],
)
def test_kv_bytes_per_token_of_published_models(name: str, num_bytes: int) -> None:
    """At 16 bit; grouped heads shrink it, an explicit head_dim is used."""
    assert ModelShape.from_config(CONFIGS[name]).kv_bytes_per_token() == num_bytes


def test_a_mixture_of_experts_is_active_in_part() -> None:
    """Mixtral runs 12.9 of its 46.7 billion weights per token; a dense model runs all it has."""
    mixtral, llama = shape_of(MIXTRAL_8X7B), shape_of(LLAMA_2_7B)
    assert mixtral.num_active_parameters == 12_879_925_248
    assert llama.num_active_parameters == llama.num_parameters


def test_flops_of_a_token_by_hand() -> None:
    """Llama-2-7B: 2 per weight of its 32 layers' matrices, and 4 * 32 * 4096 per attended position."""
    shape = shape_of(LLAMA_2_7B)
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    assert shape.flops_per_token() == 2 * matrices
    assert shape.flops_per_token(1000) == 2 * matrices + 4 * 32 * 4096 * 1000
    assert shape.head_flops == 2 * 4096 * 32000


def test_flops_agree_with_pytorchs_counter() -> None:
    """A small model's prefill costs what torch counts, once torch's uncausal attention is corrected for."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    num_tokens = 16
    shape = shape_of(SMOLLM2_135M, num_hidden_layers=2)
    settings = {key: value for key, value in SMOLLM2_135M.items() if key != "model_type"}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings | {"num_hidden_layers": 2}))
        with FlopCounterMode(display=False) as counter:
            model.model.layers[0](
                torch.zeros(1, num_tokens, 576),
                position_embeddings=(torch.zeros(1, num_tokens, 64), torch.zeros(1, num_tokens, 64)),
                attention_mask=torch.zeros(1, 1, num_tokens, num_tokens),
            )
    every_pair = 2 * shape.flops_per_token() * num_tokens // 4 + 4 * 9 * 64 * num_tokens * num_tokens
    assert counter.get_total_flops() == every_pair


def test_cached_prompt_tokens_are_not_paid_for() -> None:
    """A cached prefix saves exactly its own prefill."""
    shape = shape_of(LLAMA_3_8B)
    saved = shape.request_flops(1000, 10) - shape.request_flops(1000, 10, num_cached=600)
    assert saved == shape.prefill_flops(600, num_sampled=0)


def test_weights_take_two_bytes_each_unless_said_otherwise() -> None:
    """16 bit by default; 4 bit is half a byte."""
    shape = shape_of(LLAMA_2_7B)
    assert shape.weight_bytes() == 2 * shape.num_parameters
    assert shape.weight_bytes(0.5) == shape.num_parameters // 2


def test_step_activations_follow_the_mlp_or_the_logits() -> None:
    """Many tokens are bound by the MLP's width, many sampled rows by the vocabulary."""
    shape = shape_of(LLAMA_2_7B)
    assert shape.step_activation_bytes(2048, 1) == 2048 * (2 * 4096 + 3 * 11008) * 2
    assert shape.step_activation_bytes(256, 256) == 256 * 4096 * 2 + 256 * 32000 * 6


def test_key_value_heads_default_to_attention_heads() -> None:
    """A config from before grouped-query attention is multi-head."""
    config = {key: value for key, value in LLAMA_2_7B.items() if key != "num_key_value_heads"}
    assert ModelShape.from_config(config) == shape_of(LLAMA_2_7B)


WINDOWED_QWEN = QWEN_2_5_7B | {"use_sliding_window": True, "sliding_window": 512, "num_hidden_layers": 5}
GEMMA = GEMMA_2_2B | {"num_hidden_layers": 5, "sliding_window": 512}
SMOLLM3 = SMOLLM3_3B | {"num_hidden_layers": 5, "sliding_window": 512}
LAYER_TYPES = ["full_attention", "sliding_attention", "full_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("config", "changes", "sliding"),
    [
        (MISTRAL_7B_V01, {"num_hidden_layers": 3, "sliding_window": 512}, [0, 1, 2]),
        (MISTRAL_7B_V01, {"sliding_window": None}, []),
        (LLAMA_2_7B, {"sliding_window": 512, "layer_types": LAYER_TYPES}, []),
        (QWEN_2_5_7B, {}, []),
        (WINDOWED_QWEN, {}, []),
        (WINDOWED_QWEN, {"max_window_layers": 3}, [3, 4]),
        (WINDOWED_QWEN, {"max_window_layers": 0}, [0, 1, 2, 3, 4]),
        (WINDOWED_QWEN, {"layer_types": LAYER_TYPES}, [1, 4]),
        (WINDOWED_QWEN, {"sliding_window": None, "max_window_layers": 0}, []),
        (QWEN_3_30B_A3B, {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 512}, [0, 1]),
        (SMOLLM3, {}, []),
        (SMOLLM3, {"use_sliding_window": True}, [3]),
        (SMOLLM3, {"use_sliding_window": True, "no_rope_layer_interval": 2}, [1, 3]),
        (SMOLLM3, {"use_sliding_window": True, "no_rope_layers": [0, 1, 1, 0, 1]}, [0, 3]),
        (GEMMA, {}, [0, 2, 4]),
        (GEMMA, {"layer_types": LAYER_TYPES}, [1, 4]),
        (GEMMA, {"model_type": "gemma3_text"}, [0, 1, 2, 3, 4]),
        (GEMMA, {"model_type": "gemma3_text", "sliding_window_pattern": 3}, [0, 1, 3, 4]),
    ],
)
def test_windows_are_in_the_layers_where_the_family_has_them(
    config: dict[str, Any], changes: dict[str, Any], sliding: list[int]
) -> None:
    """All layers, those above a bound, every so many, those that do not rotate, or those that are listed."""
    shape = shape_of(config, **changes)
    assert [layer for layer in range(shape.num_layers) if shape.window(layer) == 512] == sliding
    assert [layer for layer in range(shape.num_layers) if shape.window(layer)] == sliding


def test_an_absent_window_is_the_familys_own() -> None:
    """Mistral's 4,096 tokens; `null` is none."""
    without = {key: value for key, value in MISTRAL_7B_V01.items() if key != "sliding_window"}
    assert set(ModelShape.from_config(without).windows) == {4096}


def test_windows_bound_the_flops_of_their_own_layers() -> None:
    """Gemma 2 attends to 1,000 positions in half of its layers and to 512 in the others."""
    shape = shape_of(GEMMA, num_hidden_layers=6)
    attention = shape.flops_per_token(1000) - shape.flops_per_token()
    assert attention == 4 * 8 * 256 * (3 * 1000 + 3 * 512)


def test_experts_are_in_the_layers_that_are_not_dense() -> None:
    """`decoder_sparse_step` counts from one, `mlp_only_layers` from zero."""
    shape = shape_of(QWEN_3_30B_A3B, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [layer for layer in range(6) if shape.has_experts(layer)] == [1, 5]
    assert not any(shape_of(LLAMA_2_7B).has_experts(layer) for layer in range(32))


def test_the_number_of_experts_is_read_under_either_key() -> None:
    """transformers 5 saves Qwen's as `num_local_experts`."""
    config = {key: value for key, value in QWEN_3_30B_A3B.items() if key != "num_experts"}
    assert ModelShape.from_config(config | {"num_local_experts": 128}) == shape_of(QWEN_3_30B_A3B)


def test_embeddings_are_tied_where_the_family_ties_them() -> None:
    """Published Gemma configs say nothing about it."""
    assert shape_of(GEMMA_2_2B).tied_embeddings and not shape_of(LLAMA_2_7B).tied_embeddings
    assert not shape_of(GEMMA_2_2B, tie_word_embeddings=False).tied_embeddings


@pytest.mark.parametrize("key", [key for key in LLAMA_2_7B if key not in ("model_type", "num_key_value_heads")])
def test_a_missing_size_is_named(key: str) -> None:
    """No size is guessed: the error says which key to add."""
    with pytest.raises(ConfigError, match=f"no {key}") as caught:
        ModelShape.from_config({name: value for name, value in LLAMA_2_7B.items() if name != key})
    assert key in caught.value.remedy


@pytest.mark.parametrize(
    ("config", "changes", "complaint"),
    [
        (LLAMA_2_7B, {"model_type": None}, "no model_type"),
        (LLAMA_2_7B, {"hidden_size": "4096"}, "hidden_size is '4096'"),
        (LLAMA_2_7B, {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (MISTRAL_7B_V01, {"num_hidden_layers": 10**12}, "num_hidden_layers is 1,000,000,000,000"),
        (LLAMA_2_7B, {"hidden_size": True}, "hidden_size is True"),
        (LLAMA_2_7B, {"num_key_value_heads": 5}, "cannot share 5 key-value heads"),
        (LLAMA_2_7B, {"hidden_size": 4100}, "not a multiple"),
        (LLAMA_2_7B, {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        (QWEN_3_0_6B, {"head_dim": None}, "no head_dim"),
        (GEMMA_2_2B, {"head_dim": None}, "no head_dim"),
        (GEMMA_2_2B, {"layer_types": LAYER_TYPES}, "26 layers have 5 layer_types"),
        (GEMMA_2_2B, {"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        (WINDOWED_QWEN, {"use_sliding_window": False, "layer_types": LAYER_TYPES}, "no sliding_window is in force"),
        (WINDOWED_QWEN, {"sliding_window": 0}, "sliding_window is 0"),
        (SMOLLM3, {"no_rope_layers": [1, 0], "use_sliding_window": True}, "no_rope_layers is"),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "9 experts per token of 8"),
        (MIXTRAL_8X7B, {"num_local_experts": None}, "no num_local_experts"),
        (QWEN_3_30B_A3B, {"num_experts": None}, "no num_experts"),
        (QWEN_3_30B_A3B, {"mlp_only_layers": 3}, "mlp_only_layers is 3"),
    ],
)
def test_contradictory_configs_are_refused(config: dict[str, Any], changes: dict[str, Any], complaint: str) -> None:
    """What cannot be true is said, with the value."""
    with pytest.raises(ConfigError, match=complaint):
        shape_of(config, **changes)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (LLAMA_2_7B, {"model_type": "mamba"}),
        (WINDOWED_QWEN, {"layer_types": ["chunked_attention"] * 5}),
    ],
)
def test_models_the_formulas_do_not_cover_are_unsupported(config: dict[str, Any], changes: dict[str, Any]) -> None:
    """A model of another kind is refused, not approximated."""
    with pytest.raises(UnsupportedModel):
        shape_of(config, **changes)


def test_expert_settings_without_experts_are_an_error() -> None:
    """A setting without effect is an error."""
    with pytest.raises(ConfigError, match="has none"):
        replace(shape_of(SMOLLM2_135M), num_experts_per_token=2)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"windows": (8, None)}, "30 layers have 2 attention windows"),
        ({"windows": (0,) * 30}, "window is 0"),
        ({"dense_layers": frozenset({30})}, "dense_layers are"),
    ],
)
def test_what_is_said_of_layers_must_fit_them(changes: dict[str, Any], complaint: str) -> None:
    """One window for each, and no dense layer beyond the last."""
    with pytest.raises(ConfigError, match=complaint):
        replace(shape_of(SMOLLM2_135M), **changes)
