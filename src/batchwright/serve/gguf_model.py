"""A GGUF file of the llama architecture in Hugging Face's words: its config, and its tensors by name.

What the file asks for and the decoder does not compute (another architecture, experts, other rotary scalings) is
refused. llama.cpp's converter reorders query and key rows so that rotated pairs are adjacent; they stay as they lie.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from batchwright.errors import BrokenWeights, UnsupportedModel
from batchwright.serve.gguf_file import GgufFile
from batchwright.serve.rope import frequencies

_NAMES_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GgufSource:
    """A GGUF file of the llama architecture, whose query and key rows lie in pair order (see `rope`)."""

    in_pair_order = True

    def __init__(self, file: GgufFile, config: Mapping[str, Any]) -> None:
        self._file, self._config = file, config
        self._head_dim = int(config["head_dim"])
        self._stored = {hugging_face_name(name): name for name in file.tensors}
        self.shapes = {name: file.tensors[stored].shape for name, stored in self._stored.items()}

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """The named tensor dequantised in float32 and rounded once, in a new buffer."""
        return self._file.tensor(self._stored[name], dtype)

    def scaled_frequencies(self) -> Tensor | None:
        """freq_C of a Llama 3.1 file, which holds a divisor per frequency in `rope_freqs.weight`; else None."""
        if "rope_freqs.weight" not in self._file.tensors:
            return None
        divisor_C = self._file.tensor("rope_freqs.weight")
        tiniest = torch.finfo(torch.float32).tiny  # what is smaller than that divides to infinity
        if divisor_C.shape != (self._head_dim // 2,) or not (divisor_C >= tiniest).all():
            fact = f"rope_freqs.weight of shape {list(divisor_C.shape)} is not {self._head_dim // 2} positive divisors"
            raise BrokenWeights(f"loading {self._file.path}", fact, "fetch the file again")
        return frequencies(self._config, self._head_dim) / divisor_C


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name without a counterpart is kept."""
    part = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if part and part[1] and part[2] in _NAMES_IN_LAYER:
        return f"model.layers.{part[1]}.{_NAMES_IN_LAYER[part[2]]}.{part[3]}"
    if part and not part[1] and part[2] in _NAMES_OUTSIDE:
        return f"{_NAMES_OUTSIDE[part[2]]}.{part[3]}"
    return name


def config_of_gguf(file: GgufFile) -> dict[str, Any]:
    """The metadata in the words of `config.json`. Raises UnsupportedModel, or BrokenWeights where a size is missing."""
    metadata = file.metadata
    _check_architecture(file)

    def count(key: str, default: int | None = None) -> int:
        value = metadata.get(f"llama.{key}", default)
        if not isinstance(value, int) or value < 1:
            fact = f"its metadata says {value!r} for llama.{key}"
            raise BrokenWeights(
                f"loading {file.path}", fact, "it must be a positive whole number: fetch the file again"
            )
        return value

    hidden, num_heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", hidden // num_heads)
    if (num_rotated := count("rope.dimension_count", head_dim)) != head_dim:
        fact = f"it rotates {num_rotated} of the {head_dim} values per head; supported is rotating all of them"
        raise UnsupportedModel(f"loading {file.path}", fact, "load a model of a supported kind")
    embedding = file.tensors.get("token_embd.weight")
    return {
        "model_type": "llama",
        "num_hidden_layers": count("block_count"),
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0] if embedding else count("vocab_size"),
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": metadata.get("llama.attention.layer_norm_rms_epsilon", 1e-5),
        "rope_parameters": {"rope_type": "default", "rope_theta": metadata.get("llama.rope.freq_base", 10_000.0)},
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _check_architecture(file: GgufFile) -> None:
    """Raise UnsupportedModel for a file that the decoder would compute otherwise than it was made for."""
    architecture = file.metadata.get("general.architecture")
    num_experts = file.metadata.get("llama.expert_count", 0)
    scaling = file.metadata.get("llama.rope.scaling.type", "none")
    if architecture != "llama":
        fact = f"its architecture is {architecture!r}; supported is llama (Llama 2 and 3, SmolLM2)"
    elif num_experts:
        fact = f"it has {num_experts} experts; supported are dense models"
    elif scaling not in ("none", ""):
        fact = f"it scales rotary positions by {scaling!r}; supported are plain ones and Llama 3's"
    else:
        return
    raise UnsupportedModel(f"loading {file.path}", fact, "load a model of a supported kind")
