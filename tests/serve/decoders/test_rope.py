"""Rotations: the frequencies and magnitudes that transformers computes, for every kind of scaling we claim."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from batchwright.errors import BrokenWeights, UnsupportedModel
from batchwright.facts.shape import ModelShape
from batchwright.serve.decoders.rope import Rotation, frequencies, interleave, rotate, rotation, rotations
from tests.serve.conftest import LLAMA3_ROPE, TINY

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 3.1": LLAMA3_ROPE | {"original_max_position_embeddings": 8192},
    "Qwen 2.5 of a million tokens": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768,
    },
    "Gemma 3, global": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "DeepSeek's YaRN": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40, "original_max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 1.0,
    },
    "GPT-OSS's YaRN": {
        "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "a YaRN that is told its magnitude": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
    },
    "a YaRN that narrows": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 0.5, "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def theirs(settings: dict[str, Any], head_dim: int) -> Rotation:
    config = LlamaConfig(**TINY | {"head_dim": head_dim, "rope_parameters": dict(settings)})
    freq_C, magnitude = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config)
    return Rotation(freq_C, magnitude)


def assert_same(ours: Rotation, expected: Rotation) -> None:
    torch.testing.assert_close(ours.freq_C, expected.freq_C, rtol=1e-6, atol=0)
    assert ours.magnitude == pytest.approx(expected.magnitude, rel=1e-12)


@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_give_what_transformers_gives(name: str, head_dim: int) -> None:
    """Frequencies to the last bits of float32."""
    assert_same(rotation(TINY | {"rope_parameters": PUBLISHED[name]}, head_dim), theirs(PUBLISHED[name], head_dim))


numbers = st.floats(0.5, 64)


@given(
    base=st.floats(100, 1e7), factor=numbers, original=st.integers(16, 10_000), fast=st.floats(2, 64),
    slow=st.floats(0.1, 2), truncate=st.booleans(), mscale=st.none() | numbers, mscale_all_dim=st.none() | numbers,
)  # fmt: skip
def test_any_yarn_is_transformers_yarn(base: float, original: int, fast: float, slow: float, **others: Any) -> None:
    """Whatever its settings, and whatever of them is left out."""
    settings = {
        "rope_type": "yarn", "rope_theta": base, "original_max_position_embeddings": original, "beta_fast": fast,
        "beta_slow": slow, **{key: value for key, value in others.items() if value is not None},
    }  # fmt: skip
    assert_same(rotation(TINY | {"rope_parameters": settings}, 32), theirs(settings, 32))


@pytest.mark.parametrize("scaling", [{"rope_scaling": LLAMA3_ROPE}, {"rope_parameters": LLAMA3_ROPE}])
def test_both_spellings_of_rope_settings_are_read(scaling: dict[str, Any]) -> None:
    """Configs from before transformers 5 keep the base outside the scaling, and may call the type `type`."""
    freq_C = frequencies({"rope_parameters": LLAMA3_ROPE}, 32)
    assert torch.equal(frequencies({"rope_theta": 500_000.0} | scaling, 32), freq_C)
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert torch.equal(frequencies(old, 32), frequencies({"rope_theta": 5e5}, 32) / 2)


def test_what_is_not_said_of_the_original_context_is_the_context() -> None:
    """As transformers fills it in; beside the settings it wins."""
    silent = {key: value for key, value in LLAMA3_ROPE.items() if key != "original_max_position_embeddings"}
    said = frequencies({"rope_parameters": LLAMA3_ROPE}, 32)
    assert torch.equal(frequencies({"rope_parameters": silent, "max_position_embeddings": 64}, 32), said)
    beside = {"rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 9}}
    assert torch.equal(frequencies(beside | {"original_max_position_embeddings": 64}, 32), said)


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 2e6, "rope_local_base_freq": 2e4},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }},
        {},
    ],
)  # fmt: skip
def test_layers_with_a_window_may_rotate_otherwise(settings: dict[str, Any]) -> None:
    """Gemma 3's global layers are scaled, its local ones have a base of their own; old and new spelling."""
    config = Gemma3TextConfig(**settings)
    for kind, default in (("full_attention", 1e6), ("sliding_attention", 1e4)):
        expected = config.rope_parameters[kind]
        plain = 1 / expected["rope_theta"] ** (torch.arange(0, 32, 2) / 32)
        ours = rotation(settings, 32, default, kind)
        torch.testing.assert_close(ours.freq_C, plain / expected.get("factor", 1))


def test_a_dynamic_scaling_is_exact_up_to_the_context() -> None:
    """It begins beyond `max_position_embeddings`, which is where requests end here."""
    config = {"model_type": "llama", **TINY, "rope_parameters": PUBLISHED["dynamic"]}
    assert ModelShape.from_config(config).context == TINY["max_position_embeddings"]
    assert torch.equal(frequencies(config, 32), frequencies({}, 32))


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, "types default, linear, dynamic, llama3, yarn"),
        ({"rope_parameters": {"rope_type": ["linear"]}}, "supported are the types"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lack low_freq_factor"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "lack factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lack factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "over whole heads"),
        ({"partial_rotary_factor": 0.5}, "over whole heads"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "in a form that its family does not read"),
    ],
)
def test_unknown_or_incomplete_rope_settings_are_refused(config: dict[str, Any], fact: str) -> None:
    """A rotary scaling that we do not compute is an error, not the default."""
    with pytest.raises(UnsupportedModel, match=fact):
        frequencies(config, 32)


def test_one_rotation_for_layers_that_want_two_is_refused() -> None:
    """A flat dictionary, which Gemma 3 would not read."""
    with pytest.raises(UnsupportedModel, match="in a form"):
        rotation({"rope_parameters": {"rope_type": "default"}}, 32, 1e6, "full_attention")


@pytest.mark.parametrize(
    "settings",
    [
        LLAMA3_ROPE | {"factor": 0},
        LLAMA3_ROPE | {"factor": "x"},
        LLAMA3_ROPE | {"factor": -1.0},
        LLAMA3_ROPE | {"low_freq_factor": 4.0, "high_freq_factor": "4"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "yarn", "factor": 0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 32, "attention_factor": 0},
    ],
)
def test_a_scaling_that_makes_every_answer_nan_is_refused(settings: dict[str, Any]) -> None:
    """Factor 0 divides slow frequencies to infinity."""
    with pytest.raises(BrokenWeights, match="factor is"):
        frequencies({"rope_parameters": settings}, 32)


@pytest.mark.parametrize("base", [1, 0.5])
def test_a_base_that_gives_a_yarn_no_pair_is_refused(base: float) -> None:
    """With base 1 all pairs turn equally often, so none is the last that is kept."""
    settings = {"rope_type": "yarn", "rope_theta": base, "factor": 2.0, "original_max_position_embeddings": 32}
    with pytest.raises(BrokenWeights, match="no pair turns more slowly"):
        frequencies({"rope_parameters": settings}, 32)


def test_a_base_so_small_that_frequencies_are_infinite_is_refused() -> None:
    """Each setting is a positive number, and still their quotient is not finite in 32 bits."""
    tiny = dict.fromkeys(("factor", "rope_theta", "original_max_position_embeddings"), 1e-37)
    with pytest.raises(BrokenWeights, match="infinite"):
        frequencies({"rope_parameters": LLAMA3_ROPE | tiny}, 32)


def test_pairs_that_lie_apart_rotate_as_those_that_lie_together() -> None:
    """`interleave` puts value i beside value i + D/2; rotating pairs is then rotating halves."""
    x_TGD, freq_C = torch.randn(5, 3, 16), frequencies({}, 16)
    positions_T = torch.arange(7, 12)
    angle_T1C = (positions_T[:, None] * freq_C)[:, None]
    first, second = x_TGD.split(8, -1)
    cos, sin = angle_T1C.cos(), angle_T1C.sin()
    halves = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def paired(x_TGD: torch.Tensor) -> torch.Tensor:
        return interleave(x_TGD.flatten(1).T, 16).T.reshape(x_TGD.shape).contiguous()

    torch.testing.assert_close(rotate(paired(x_TGD), rotations(positions_T, freq_C)), paired(halves))
