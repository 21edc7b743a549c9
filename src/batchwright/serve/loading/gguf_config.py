"""The metadata of a GGUF file in the words of `config.json`, by architecture.

A key that changes what is computed and that has no place in the config is refused, not left out: a model must not
become another one. What llama.cpp takes for granted of an architecture is taken for granted here (its `src/models/` and
`llama-model.cpp`), and what its converter writes is read as what it was made from (its `conversion/`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from batchwright.errors import BrokenWeights, UnsupportedModel
from batchwright.serve.loading.gguf_file import GgufFile


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the files of one `general.architecture` are to be read.

    `family`: its `model_type`; `routed`: the one where it has experts. `in_pair_order`: the converter reordered the
    rows of queries and keys so that rotated pairs are adjacent. `whole_norms`: it added one to the weights of norms
    that checkpoints store less one. `unscaled`: with this many layers scores are divided by the root of hidden / heads
    instead of the root of the head's width. `window_every`: every so many layers have no window. `caps_and_window`:
    the keys of these that it reads.
    """

    family: str | None = None
    routed: str | None = None
    in_pair_order: bool = False
    whole_norms: bool = False
    unscaled: int | None = None
    window_every: int | None = None
    caps_and_window: tuple[str, ...] = ()


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture("llama", "mixtral", in_pair_order=True),
        "mistral3": Architecture("llama", in_pair_order=True),
        "smollm3": Architecture("smollm3", in_pair_order=True),
        "qwen2": Architecture("qwen2"),
        "qwen3": Architecture("qwen3"),
        "qwen3moe": Architecture(routed="qwen3_moe"),
        "gemma2": Architecture(
            "gemma2",
            whole_norms=True,
            unscaled=46,
            window_every=2,
            caps_and_window=("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
        ),
        "gemma3": Architecture(
            "gemma3_text",
            whole_norms=True,
            unscaled=62,
            window_every=6,
            caps_and_window=("attention.sliding_window", "final_logit_softcapping"),
        ),
    }
)

_IGNORED_IF: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "attention.clamp_kqv": (0.0,),
        "attention.max_alibi_bias": (0.0,),
        "attention.scale": (0.0,),
        "attention.shared_kv_layers": (0,),
        "attention.sliding_window": (0,),
        "attention.temperature_length": (0,),
        "attention.temperature_scale": (0.0,),
        "attn_logit_softcapping": (0.0,),
        "embedding_scale": (0.0, 1.0),
        "expert_gating_func": (0, 1),
        "expert_group_count": (0, 1),
        "expert_shared_count": (0,),
        "expert_shared_feed_forward_length": (0,),
        "expert_weights_scale": (0.0, 1.0),
        "final_logit_softcapping": (0.0,),
        "leading_dense_block_count": (0,),
        "logit_scale": (0.0, 1.0),
        "nextn_predict_layers": (0,),
        "pooling_type": (0,),
        "residual_scale": (0.0, 1.0),
        "rope.dimension_sections": (),
        "rope.scale_linear": (0.0, 1.0),
        "rope.scaling.attn_factor": (0.0, 1.0),
        "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
        "rope.scaling.yarn_log_multiplier": (0.0,),
        "use_parallel_residual": (False,),
    }
)
"""Keys that change what is computed, with the values that change nothing; any other value is refused."""

_YARN = {
    "original_max_position_embeddings": "original_context_length",
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def architecture_of(file: GgufFile) -> Architecture:
    """Raises UnsupportedModel for one that is not in the table, and for a file that is only a part of a model."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        fact = f"its architecture is {name!r}; supported are {', '.join(ARCHITECTURES)}"
        raise _unsupported(file, fact)
    if (num_files := file.metadata.get("split.count", 0)) not in (0, 1):
        fact = f"it is one of {num_files} files that hold the model together"
        raise UnsupportedModel(f"loading {file.path}", fact, "join them: llama-gguf-split --merge FIRST JOINED")
    return ARCHITECTURES[name]


def config_of_gguf(file: GgufFile) -> dict[str, Any]:
    """Raises UnsupportedModel, or BrokenWeights where a size is missing or is no number."""
    architecture, read = architecture_of(file), _Reader(file)
    _check_ignored(read, architecture)
    hidden, num_heads = read.count("embedding_length"), read.count("attention.head_count")
    head_dim = read.count("attention.key_length", hidden // num_heads)
    _check_heads(read, head_dim)
    embedding = file.tensors.get("token_embd.weight")
    config = {
        "model_type": architecture.family,
        "num_hidden_layers": read.count("block_count"),
        "hidden_size": hidden,
        "intermediate_size": read.count("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": read.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0] if embedding else read.count("vocab_size"),
        "max_position_embeddings": read.count("context_length"),
        "rms_norm_eps": read.value("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_parameters": _rotations(read),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    config |= _experts(read, architecture)
    return config | (_caps_and_window(read, architecture, config) if architecture.caps_and_window else {})


@dataclass(frozen=True, slots=True)
class _Reader:
    """Look-ups of the architecture's own keys."""

    file: GgufFile

    def key(self, key: str) -> str:
        return f"{self.file.metadata['general.architecture']}.{key}"

    def value(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(self.key(key), default)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            fact = f"its metadata says {value!r} for {self.key(key)}"
            remedy = "it must be a positive whole number: fetch the file again"
            raise BrokenWeights(f"loading {self.file.path}", fact, remedy)
        return value


def _unsupported(file: GgufFile, fact: str) -> UnsupportedModel:
    return UnsupportedModel(f"loading {file.path}", fact, "load a model of a supported kind")


def _check_ignored(read: _Reader, architecture: Architecture) -> None:
    ignored = {**_IGNORED_IF, "attention.sliding_window_pattern": (0, architecture.window_every)}
    for key, values in ignored.items():
        value = read.value(key)
        if key not in architecture.caps_and_window and value is not None and value not in values:
            raise _unsupported(read.file, f"its metadata says {value!r} for {read.key(key)}, which no config holds")


def _check_heads(read: _Reader, head_dim: int) -> None:
    if (num_rotated := read.count("rope.dimension_count", head_dim)) != head_dim:
        fact = f"it rotates {num_rotated} of the {head_dim} values per head; supported is rotating all of them"
        raise _unsupported(read.file, fact)
    if (wide := read.count("attention.value_length", head_dim)) != head_dim:
        raise _unsupported(read.file, f"its heads have keys of {head_dim} and values of {wide} numbers")


def _rotations(read: _Reader) -> dict[str, Any]:
    """For Gemma 3 one for each kind of layer, of which only those without a window are scaled."""
    kind, factor = read.value("rope.scaling.type", "linear"), read.value("rope.scaling.factor")
    plain = {"rope_type": "default", "rope_theta": read.value("rope.freq_base", 10_000.0)}
    found = dict(plain)
    if kind == "yarn":
        given = {word: read.value(f"rope.scaling.{key}") for word, key in _YARN.items()}
        found |= {"rope_type": kind, "factor": factor}
        found |= {word: value for word, value in given.items() if value is not None}
    elif kind == "linear" and factor not in (None, 0, 1):
        found |= {"rope_type": kind, "factor": factor}
    elif kind not in ("linear", "none", ""):
        raise _unsupported(read.file, f"it scales rotary positions by {kind!r}; supported are linear and yarn")
    if read.file.metadata["general.architecture"] != "gemma3":
        return found
    local = plain | {"rope_theta": read.value("rope.freq_base_swa", 10_000.0)}
    return {"full_attention": found, "sliding_attention": local}


def _experts(read: _Reader, architecture: Architecture) -> dict[str, Any]:
    """Shares always sum to one, unless the file says otherwise."""
    num_experts = read.value("expert_count", 0)
    if not num_experts and architecture.family:
        return {}
    if not architecture.routed:
        raise _unsupported(read.file, f"it has {num_experts} experts, which its architecture lets no config have")
    found = {
        "model_type": architecture.routed,
        "num_experts_per_tok": read.count("expert_used_count"),
        "norm_topk_prob": read.value("expert_weights_norm", default=True),
    }
    if architecture.routed == "mixtral":
        return found | {"num_local_experts": read.count("expert_count")}
    wide = read.count("expert_feed_forward_length", read.value("feed_forward_length"))
    return found | {"num_experts": read.count("expert_count"), "moe_intermediate_size": wide}


def _caps_and_window(read: _Reader, architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """What only Gemma has. Zero is none; what is absent is what llama.cpp takes for granted, as transformers does."""
    found = {key.removeprefix("attention."): read.value(key) for key in architecture.caps_and_window}
    if architecture.family == "gemma2":
        found = {word: value for word, value in found.items() if value is not None}
    is_unscaled = config["num_hidden_layers"] == architecture.unscaled
    divisor = config["hidden_size"] // config["num_attention_heads"] if is_unscaled else config["head_dim"]
    return {word: value or None for word, value in found.items()} | {"query_pre_attn_scalar": divisor}
