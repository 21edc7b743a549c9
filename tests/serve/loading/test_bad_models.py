"""Models that lie, lack or overflow: in every family each is one of our errors, in three parts, or it loads."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Core
from tokenizers import models

from batchwright.errors import BatchwrightError, BrokenWeights, ConfigError, RequestError, UnsupportedModel
from batchwright.serve.loading import weights
from batchwright.serve.prompts import token_ids
from tests.serve.families import NUM_VOCAB, TINY_FAMILIES, tiny_model

ROUTED = ("mixtral", "qwen3_moe")
WINDOWED = ("mistral", "gemma2", "gemma3_text")
LISTED = ("smollm3", "qwen2", "qwen3", "gemma2", "gemma3_text")  # may say the type of each layer

MakeFamily = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family."""
    found = {}
    for family in TINY_FAMILIES:
        found[family] = tmp_path_factory.mktemp(family)
        tiny_model(family).save_pretrained(found[family])
    return found


@pytest.fixture
def make(saved: dict[str, Path], tmp_path: Path) -> MakeFamily:
    """A copy of a family's checkpoint with changes to its config; `tensors` changes, or takes away, its weights."""

    def make_one(family: str, tensors: dict[str, torch.Tensor | None] | None = None, **changes: Any) -> Path:
        config = json.loads((saved[family] / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        stored = load_file(saved[family] / "model.safetensors") | (tensors or {})
        save_file(
            {name: tensor for name, tensor in stored.items() if tensor is not None}, tmp_path / "model.safetensors"
        )
        return tmp_path

    return make_one


def refusal(path: Path, *kinds: type[BatchwrightError]) -> BatchwrightError:
    with pytest.raises(kinds or BatchwrightError) as caught:
        weights.load(path)
    assert caught.value.asked and caught.value.fact and caught.value.remedy
    return caught.value


def read(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_checkpoint_itself_loads(family: str, make: MakeFamily) -> None:
    """What the other tests damage is sound before."""
    assert weights.load(make(family)).decoder.shape.family == family


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_an_unknown_kind_of_rotation_is_named(family: str, make: MakeFamily) -> None:
    rotation = {"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0}
    is_split = family == "gemma3_text"
    nested = {"full_attention": rotation, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    error = refusal(make(family, rope_parameters=nested if is_split else rotation), UnsupportedModel)
    assert "spiral" in error.fact and "default, linear" in error.fact


LIES: tuple[tuple[str, Callable[[int], int]], ...] = (
    ("hidden_size", lambda size: size + 16),
    ("intermediate_size", lambda size: size + 1),
    ("moe_intermediate_size", lambda size: size + 1),
    ("vocab_size", lambda size: size + 1),
    ("vocab_size", lambda size: size - 1),
    ("num_attention_heads", lambda heads: 2 * heads),
    ("num_key_value_heads", lambda heads: heads // 2),
    ("head_dim", lambda size: 2 * size),
    ("num_hidden_layers", lambda layers: layers + 1),
    ("num_local_experts", lambda experts: experts - 1),
    ("num_local_experts", lambda experts: experts + 1),
)
UNUSED = {"qwen3_moe": {"intermediate_size"}}  # every layer has experts


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_config_that_lies_about_a_size_is_broken(family: str, make: MakeFamily) -> None:
    """Whatever it lies about shows in a tensor's shape, or in one that is missing."""
    config = read(make(family))
    lies = [(key, change) for key, change in LIES if config.get(key) and key not in UNUSED.get(family, ())]
    assert len(lies) >= 7
    for key, change in lies:
        changes = {key: change(config[key])}
        if key == "num_hidden_layers":  # a kind for it too, so that this is no error of its own
            lists = {"layer_types": "full_attention", "no_rope_layers": 1}
            changes |= {name: [*config[name], kind] for name, kind in lists.items() if name in config}
        fact = refusal(make(family, **changes), BrokenWeights).fact
        assert "but the config implies" in fact or "is missing" in fact


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_no_number_is_found(family: str, value: float, make: MakeFamily, saved: dict) -> None:
    """One value of the last tensor, by the order of names."""
    name, tensor = max(load_file(saved[family] / "model.safetensors").items())
    tensor.view(-1)[-1] = value
    assert "holds infinities or NaNs" in refusal(make(family, {name: tensor}), BrokenWeights).fact


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_tensor_is_called_for(family: str, make: MakeFamily, saved: dict) -> None:
    """Without any one of them the model is not complete, and the error names what is missing."""
    names = sorted(load_file(saved[family] / "model.safetensors"))
    for name in (name for name in names if "layers" not in name or "layers.1." in name):
        if name == "lm_head.weight" and read(saved[family])["tie_word_embeddings"]:
            continue
        assert "is missing" in refusal(make(family, {name: None}), BrokenWeights).fact


@pytest.mark.parametrize("family", ROUTED)
@pytest.mark.parametrize("count", [0, -1, 5, 10**9, "2", None])
def test_tokens_go_to_some_and_not_more_than_all_experts(family: str, count: Any, make: MakeFamily) -> None:
    refusal(make(family, num_experts_per_tok=count), ConfigError)


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("window", [0, -1, "8", 1.5, True])
def test_a_window_without_a_position_is_refused(family: str, window: Any, make: MakeFamily) -> None:
    """Its own position is the least that a query sees."""
    error = refusal(make(family, sliding_window=window), ConfigError)
    assert "sliding_window" in error.fact or "window" in error.fact


@pytest.mark.parametrize("family", LISTED)
@pytest.mark.parametrize(
    "kinds", [[], ["full_attention"], ["full_attention"] * 100, ["linear_attention"] * 3, "full_attention", [0] * 3]
)
def test_types_that_are_not_one_for_each_layer_are_refused(family: str, kinds: Any, make: MakeFamily) -> None:
    error = refusal(make(family, layer_types=kinds), ConfigError, UnsupportedModel)
    assert "layer_types" in error.fact or "linear_attention" in error.fact


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_method_of_quantisation_that_is_not_read_is_named(family: str, make: MakeFamily) -> None:
    error = refusal(make(family, quantization_config={"quant_method": "bitsandbytes"}), UnsupportedModel)
    assert "'bitsandbytes'" in error.fact


HUGE = (
    "num_hidden_layers", "num_local_experts", "num_experts", "num_experts_per_tok", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size",
)  # fmt: skip


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("size", [10**9, 2**63, 10**300])
def test_a_huge_claim_costs_nothing(family: str, size: int, make: MakeFamily) -> None:
    """It is refused before anything of that size is made: otherwise this test would never end."""
    config = read(make(family))
    for key in HUGE:
        if key in config and key not in UNUSED.get(family, ()):
            refusal(make(family, **{key: size}))
    refusal(make(family, **{key: size for key in HUGE if key in config}))


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("kept", [0.3, 0.999])
def test_a_truncated_file_is_told_by_its_bytes(family: str, kept: float, make: MakeFamily) -> None:
    path = make(family)
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[: int(kept * len(content))])
    assert f"need {len(content):,} bytes but the file has" in refusal(path, BrokenWeights).fact


def with_words(path: Path, num_words: int, num_added: int = 0) -> Path:
    core = Core(models.WordLevel({f"w{i}": i for i in range(num_words)}, unk_token="w0"))
    core.add_special_tokens([f"<{i}>" for i in range(num_added)])
    core.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_without_a_tokenizer_only_token_ids_are_served(family: str, make: MakeFamily) -> None:
    """And whoever sends text learns why."""
    model = weights.load(make(family))
    assert token_ids([1, 2, 3], model) == [1, 2, 3]
    with pytest.raises(RequestError, match=r"has no tokenizer: there is no tokenizer\.json in"):
        token_ids("text", model)


def test_a_vocabulary_larger_than_the_embedding_is_told(make: MakeFamily) -> None:
    """Such a tokenizer belongs to another model; one that is smaller may not fill a padded embedding."""
    path = make("llama")
    assert "of 98 tokens but its embedding has 97 rows" in refusal(with_words(path, NUM_VOCAB + 1), BrokenWeights).fact
    assert weights.load(with_words(path, NUM_VOCAB)).tokenizer
    assert weights.load(with_words(path, NUM_VOCAB - 10)).tokenizer


def test_a_token_added_beyond_the_embedding_costs_only_who_writes_it(make: MakeFamily) -> None:
    """Gemma 3 of a billion parameters has such a token, for images."""
    model = weights.load(with_words(make("gemma3_text"), NUM_VOCAB, num_added=2))
    assert token_ids("w3", model) == [3]
    with pytest.raises(RequestError, match=f"holds {NUM_VOCAB}; token ids are integers from 0 to {NUM_VOCAB - 1}"):
        token_ids("<0>", model)


@pytest.mark.parametrize("value", [-1, NUM_VOCAB, 10**20, [3, NUM_VOCAB]])
def test_an_end_of_text_outside_the_vocabulary_is_told(value: Any, make: MakeFamily) -> None:
    """It would never come, and a reply would have no end."""
    path = make("qwen2")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert f"is no token id of {NUM_VOCAB}" in refusal(path, BrokenWeights).fact


SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, -1, 2, 3, 7, 64, 2**31, 2**63, 10**18, 10**300, -(10**9)])
    | st.sampled_from([0.0, 0.5, -1.0, 1e-300, 1e308, float("nan"), float("inf")])
    | st.sampled_from(
        ["", "x", "silu", "yarn", "linear", "llama3", "dynamic", "full_attention", "sliding_attention", "1"]
    )
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["rope_type", "rope_theta", "factor", "full_attention", "sliding_attention", "quant_method"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=6,
)
EXTRA = (
    "head_dim", "rope_scaling", "rope_theta", "quantization_config", "sliding_window", "use_sliding_window",
    "sliding_window_pattern", "max_window_layers", "attention_bias", "mlp_bias", "partial_rotary_factor",
    "rope_local_base_freq", "decoder_sparse_step", "mlp_only_layers", "original_max_position_embeddings",
    "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "no_rope_layer_interval",
)  # fmt: skip


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_any_config_loads_or_is_one_of_our_errors(family: str, saved: dict[str, Path], tmp_path: Path) -> None:
    """Values of every key, and within its objects, of the wrong kind, huge, negative, absent, nested."""
    config = read(saved[family])
    (tmp_path / "model.safetensors").symlink_to(saved[family] / "model.safetensors")
    keys = st.sampled_from(sorted({*config, *EXTRA}))

    @settings(max_examples=80, deadline=None)
    @given(changes=st.dictionaries(keys, VALUES, min_size=1, max_size=3), inner=st.data())
    def check(changes: dict[str, Any], inner: Any) -> None:
        changed = config | changes
        rotations = changed.get("rope_parameters")
        if isinstance(rotations, dict) and rotations:
            key = inner.draw(st.sampled_from(sorted(rotations, key=str)))
            changed["rope_parameters"] = rotations | {key: inner.draw(VALUES)}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with suppress(BatchwrightError):
            assert weights.load(tmp_path).decoder.shape.num_layers == config["num_hidden_layers"]

    check()
