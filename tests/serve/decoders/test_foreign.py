"""Families that we do not define give transformers' logits over our pages, and what can't be run so is refused."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from batchwright.errors import BatchwrightError, BrokenWeights, ConfigError, MissingDependency, UnsupportedModel
from batchwright.policy.pages import Memory
from batchwright.serve.decoders.backend import Target
from batchwright.serve.decoders.foreign import ForeignDecoder
from batchwright.serve.engine import Engine
from batchwright.serve.loading import foreign_load
from batchwright.serve.loading.foreign_load import load_foreign
from batchwright.serve.loading.weights import LoadedModel
from tests.serve.conftest import TINY
from tests.serve.mixed import logits_of, random_jobs
from tests.serve.scripted import forced

CPU = torch.device("cpu")
NO_ENDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
ALTERNATELY = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    "olmo2": {},  # norms behind attention and MLP, and of all queries at once
    "phi": {},  # rotates half of each head; attention beside the MLP
    "phi3": {"sliding_window": 9},  # fused projections
    "starcoder2": {"sliding_window": 9},  # an MLP that is not gated
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"sliding_window": 9, "layer_types": ALTERNATELY},  # layers without positions
    "gpt_neox": {"num_key_value_heads": None},
    "gpt2": {},  # learned positions, and other names for everything
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 48},  # learned positions that begin at 2
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}

Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without bars of progress."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A random checkpoint of a family, as transformers saves it."""

    def make(family: str, **changes: Any) -> Path:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TINY | NO_ENDS | changes))
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / family)
        return tmp_path / family

    return make


@pytest.fixture
def olmo2(make: Make) -> Path:
    return make("olmo2")


def loaded(path: Path, dtype: torch.dtype = torch.float32, **target: Any) -> ForeignDecoder:
    return load_foreign(path, json.loads((path / "config.json").read_text()), Target(dtype, CPU, **target))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, make: Make) -> None:
    """Within 1e-4 at the end of every chunk, of requests mixed in steps, over pages of other requests' remains."""
    path = make(family, **FAMILIES[family])
    jobs = random_jobs(1, [None] * 5)
    found = logits_of(loaded(path), jobs)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    for job, logits_SV in zip(jobs, found, strict=True):
        with torch.inference_mode():
            expected_TV = model(torch.tensor([job.tokens])).logits[0]
        ends = torch.tensor(job.sizes).cumsum(0) - 1
        assert (logits_SV - expected_TV[ends]).abs().max() < 1e-4


def test_windows_and_scales_are_what_transformers_asks_for(make: Make) -> None:
    """So attention is ours in every layer."""
    decoder = loaded(make("cohere2", **FAMILIES["cohere2"]))
    assert [does.window for does in decoder.attention] == [9, None, 9]
    assert decoder.shape.windows == (9, None, 9)
    granite = loaded(make("granite", **FAMILIES["granite"]))
    assert [does.scale for does in granite.attention] == [0.3] * 3


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_engine_runs_it(deterministic: bool, make: Make) -> None:
    """Four requests at once, through pages for two: the tokens that transformers generates for each alone."""
    path = make("olmo2")
    config = json.loads((path / "config.json").read_text())
    model = LoadedModel("olmo2", loaded(path), None, "it is random", (), config)
    prompts = [job.tokens[:20] for job in random_jobs(0, [None] * 4)]
    engine = Engine(model, memory=Memory(10, 8, 64), deterministic=deterministic)
    completions = engine.generate(prompts, forced(12))
    theirs = AutoModelForCausalLM.from_pretrained(path)
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert list(completion.tokens) == tokens.tolist()


def test_it_says_what_memory_it_takes(make: Make) -> None:
    """Every weight once, in the dtype it was loaded in."""
    path = make("olmo2")
    num_weights = sum(tensor.numel() for tensor in load_file(path / "model.safetensors").values())
    for dtype in (torch.float32, torch.bfloat16):
        decoder = loaded(path, dtype)
        assert 0 <= decoder.num_bytes - num_weights * dtype.itemsize < 100  # the frequencies of rotations
        assert decoder.workspace_bytes(10, 1) > 10 * 3 * 80 * dtype.itemsize


def test_contexts_end_where_rotations_would_change_with_the_company(make: Make) -> None:
    """Under "longrope" one request beyond the original context would turn all others' keys."""
    factors = [1.0, 1.5, 2.0, 3.0]
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": factors, "long_factor": factors}
    path = make("phi3", rope_parameters=rope, original_max_position_embeddings=128)
    assert loaded(path).shape.context == 128


# ---- what is refused


def assert_refused(
    path: Path, fact: str, kind: type[BatchwrightError] = UnsupportedModel, **target: Any
) -> BatchwrightError:
    with pytest.raises(kind) as error:
        loaded(path, **target)
    assert fact in str(error.value)
    assert error.value.asked and error.value.fact and error.value.remedy
    return error.value


@pytest.mark.parametrize(
    ("family", "changes", "fact"),
    [
        ("mamba", {}, "does not use transformers' AttentionInterface"),
        ("bloom", {}, "does not use transformers' AttentionInterface"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "those that attend, in this order, are [1]"),
        ("diffllama", {}, "those that attend, in this order, are [0, 0, 1, 1, 2, 2]"),
        ("llama4_text", {}, "layers of the type chunked_attention"),
        ("gpt_oss", {}, "its attention takes s_aux"),
        ("deepseek_v3", {"num_key_value_heads": 6, "first_k_dense_replace": 3}, "have the shapes"),
        ("doge", {}, "off those of transformers' own attention"),
    ],
)
def test_a_family_that_attends_otherwise_is_refused(
    family: str, changes: dict[str, Any], fact: str, make: Make
) -> None:
    """With the reason, and the families that can be had."""
    error = assert_refused(make(family, **changes), fact)
    assert family in error.asked and "llama" in error.remedy


def edit(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "kind", "fact"),
    [
        ({"is_encoder_decoder": True}, UnsupportedModel, "it has an encoder"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModel, "its weights are quantised"),
        ({"model_type": "nobodys", "auto_map": {"AutoConfig": "x.Y"}}, UnsupportedModel, "transformers fails"),
        ({"model_type": "t5"}, UnsupportedModel, "does not use transformers' AttentionInterface"),
        ({"num_hidden_layers": 10**9}, BrokenWeights, "claims 1,000,000,000 layers"),
        ({"num_hidden_layers": 4}, BrokenWeights, "is missing"),
        ({"hidden_size": 96}, UnsupportedModel, "transformers fails"),
        ({"hidden_size": "x"}, UnsupportedModel, "transformers fails"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused(
    changes: dict[str, Any], kind: type[BatchwrightError], fact: str, make: Make
) -> None:
    """Before the weights are read, where that can be seen. No code of the checkpoint's own is run."""
    path = make("olmo2")
    edit(path, **changes)
    assert_refused(path, fact, kind)


KEYS = [
    "model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "layer_types",
    "rope_parameters", "rope_theta", "tie_word_embeddings", "sliding_window", "attention_bias", "dtype", "is_decoder",
]  # fmt: skip
VALUES = st.sampled_from(
    [None, True, 0, -1, 3, 97, 10**9, 10**400, 0.5, float("nan"), "x", "llama", [], ["x"], {"x": 1}]
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=2))
@pytest.mark.filterwarnings("ignore")  # what transformers warns of is its own affair
def test_whatever_a_config_holds_it_loads_or_is_refused(changes: dict[str, Any], olmo2: Path) -> None:
    before = (olmo2 / "config.json").read_text()
    try:
        edit(olmo2, **changes)
        loaded(olmo2)
    except BatchwrightError:
        pass
    finally:
        (olmo2 / "config.json").write_text(before)


def test_weights_that_are_not_there_are_not_made_up(make: Make) -> None:
    """transformers would draw them at random, and would unpickle."""
    path = make("olmo2")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path / "model.safetensors")
    assert_refused(path, f"tensor {name} is missing", BrokenWeights)
    save_file(tensors | {name: torch.full_like(tensors[name], torch.nan)}, path / "model.safetensors")
    assert_refused(path, f"tensor {name} holds infinities or NaNs", BrokenWeights)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert_refused(path, "pickles")


def test_an_adapter_beside_the_weights_is_not_joined_in(make: Make) -> None:
    """transformers would, if it finds one, whatever it is."""
    path = make("olmo2")
    (path / "adapter_config.json").write_text("{}")
    assert_refused(path, "an adapter lies beside")


def test_what_only_our_own_decoder_does_is_refused(make: Make) -> None:
    """Kernels, OpenVINO and int8 are for families that are defined here."""
    path = make("olmo2")
    assert_refused(path, 'using backend "native"', ConfigError, backend="native")
    assert_refused(path, "leave quantization out", ConfigError, quantization="int8")


def test_without_transformers_its_command_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy can be pasted."""
    path = make("olmo2")
    monkeypatch.setattr(foreign_load, "find_spec", lambda name: None)
    assert_refused(path, "pip install 'batchwright[transformers]'", MissingDependency)
