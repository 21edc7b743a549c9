"""A GGUF file's tensors by the names that Hugging Face checkpoints give them.

llama.cpp's converter reorders the query and key rows of some architectures so that rotated pairs are adjacent; they
stay as they lie. It adds one to the weights of Gemma's norms, which is taken off again, and stacks the experts of a
layer, of which one at a time is read.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchwright.errors import BrokenWeights, UnsupportedModel
from batchwright.serve.decoders.rope import frequencies
from batchwright.serve.loading.gguf_config import architecture_of
from batchwright.serve.loading.gguf_file import GgufFile

_NAMES_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NAMES_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
}
_OF_FAMILY = {"gemma2": _GEMMA, "gemma3_text": _GEMMA, "mixtral": _MIXTRAL}


class _Stored(NamedTuple):
    """A tensor of the file, or one expert's part of it."""

    name: str
    part: int | None
    shape: tuple[int, ...]


class GgufSource:
    """`config`: what `config_of_gguf` made of the file. `in_pair_order`: how query and key rows lie (see `rope`)."""

    def __init__(self, file: GgufFile, config: Mapping[str, Any]) -> None:
        architecture = architecture_of(file)
        self._file, self._config = file, config
        self.in_pair_order, self._has_whole_norms = architecture.in_pair_order, architecture.whole_norms
        names = _NAMES_IN_LAYER | _OF_FAMILY.get(config["model_type"], {})
        self._stored = {name: stored for tensor in file.tensors for name, stored in _named(file, tensor, names)}
        self.shapes = {name: stored.shape for name, stored in self._stored.items()}

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """The named tensor dequantised in float32 and rounded once, in a new buffer."""
        stored = self._stored[name]
        if self._has_whole_norms and name.endswith("norm.weight"):
            return self._file.tensor(stored.name).sub_(1).to(dtype)
        return self._file.tensor(stored.name, dtype, stored.part)

    def scaled_frequencies(self) -> Tensor | None:
        """freq_C of a Llama 3.1 file, which holds a divisor per frequency in `rope_freqs.weight`; else None."""
        if "rope_freqs.weight" not in self._file.tensors:
            return None
        asked, num_pairs = f"loading {self._file.path}", int(self._config["head_dim"]) // 2
        if (kind := self._config["rope_parameters"].get("rope_type")) != "default":
            fact = f"it scales rotary positions by {kind!r}, and by rope_freqs.weight too"
            raise UnsupportedModel(asked, fact, "load a model that does one of these")
        divisor_C = self._file.tensor("rope_freqs.weight")
        tiniest = torch.finfo(torch.float32).tiny  # what is smaller than that divides to infinity
        if divisor_C.shape != (num_pairs,) or not (divisor_C >= tiniest).all():
            fact = f"rope_freqs.weight of shape {list(divisor_C.shape)} is not {num_pairs} positive divisors"
            raise BrokenWeights(asked, fact, "fetch the file again")
        return frequencies(self._config, 2 * num_pairs) / divisor_C


def _named(file: GgufFile, tensor: str, names: Mapping[str, str]) -> Iterator[tuple[str, _Stored]]:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`; what has no counterpart is left out."""
    shape = file.tensors[tensor].shape
    part = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", tensor)
    if not part or part[2] not in (names if part[1] else _NAMES_OUTSIDE):
        return
    if not part[1]:
        yield f"{_NAMES_OUTSIDE[part[2]]}.{part[3]}", _Stored(tensor, None, shape)
        return
    name = f"model.layers.{part[1]}.{names[part[2]]}.{part[3]}"
    if "*" not in name:
        yield name, _Stored(tensor, None, shape)
    elif len(shape) == 3:
        for expert in range(shape[0]):
            yield name.replace("*", str(expert)), _Stored(tensor, expert, shape[1:])
