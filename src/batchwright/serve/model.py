"""One decoder for Llama 2, Llama 3 and SmolLM2 shapes, over a flat list of tokens.

A step is T tokens of any mix of requests, prefill chunks and decodes alike. The decoder knows nothing of requests,
pages or masks: it hands each layer's queries, keys and values to `attend`, which stores and attends as the executor
pleases. Numerics follow the reference implementation: norms and rotations in float32, residual in the model's dtype.
Costs 2 FLOPs per weight and token; logits, and the last layer's MLP, are computed only for the rows asked for.

Shapes: T tokens of the step, R rows of them whose logits are wanted, E hidden, H query heads, K key-value heads,
D values per head, I MLP width, V vocabulary, F = (H + 2K) * D.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchwright.errors import UnsupportedModel
from batchwright.facts.shape import ModelShape
from batchwright.serve.checkpoint import positive, section
from batchwright.serve.linear import Linear
from batchwright.serve.rope import frequencies, interleave, rotate, rotations

FAMILIES = ("llama",)
"""The `model_type`s this decoder runs: Llama 2 and 3, SmolLM and SmolLM2, and whatever else declares itself so."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_THD, k_TKD, v_TKD) -> o_TE' with E' = H * D. The arguments are views with strided rows; keys and queries
are rotated and in pair order (see `rope`), and scores are not scaled yet: multiply q.k by D ** -0.5."""

Take = Callable[[str], Tensor]
"""Hands over one tensor, by its Hugging Face name, in the dtype and on the device the decoder runs in."""


class Decoder:
    """`forward` runs one step. Weights are taken one by one and joined, so loading peaks at one layer extra."""

    def __init__(
        self, config: Mapping[str, Any], take: Take, freq_C: Tensor | None = None, *, in_pair_order: bool = False
    ) -> None:
        """`config` as in `config.json`; `freq_C` overrides its rotary frequencies.

        `in_pair_order`: query and key rows already come in pair order, as GGUF stores them.
        """
        self.shape = supported_shape(config)
        self._eps = positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6))
        freq_C = frequencies(config, self.shape.head_dim) if freq_C is None else freq_C
        self._embedding_VE = take("model.embed_tokens.weight")
        self._freq_C = freq_C.to(self._embedding_VE.device)
        take_qk = take if in_pair_order else lambda name: interleave(take(name), self.shape.head_dim)
        names = [f"model.layers.{i}." for i in range(self.shape.num_layers)]
        self._layers = [_Layer(self.shape, self._eps, name, take, take_qk) for name in names]
        self._norm_E = take("model.norm.weight")
        self._head = Linear(self._embedding_VE if self.shape.tied_embeddings else take("lm_head.weight"))

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding_VE.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding_VE.device

    @torch.inference_mode()
    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, logit_rows_R: Tensor) -> Tensor:
        """logits_RV in float32, in the order of `logit_rows_R` (int64, may be empty).

        `attend` is called once per layer, in order. T is at least 1; all tensors are on the decoder's device.
        """
        x_TE = F.embedding(tokens_T, self._embedding_VE)
        turn_T1C = rotations(positions_T, self._freq_C)
        for i, layer in enumerate(self._layers[:-1]):
            x_TE = layer.add_mlp(layer.add_attention(x_TE, layer.attended(i, x_TE, turn_T1C, attend)))
        last = self._layers[-1]
        o_TE = last.attended(len(self._layers) - 1, x_TE, turn_T1C, attend)
        if not len(logit_rows_R):
            return x_TE.new_empty((0, self.shape.vocab), dtype=torch.float32)
        x_RE = last.add_mlp(last.add_attention(x_TE[logit_rows_R], o_TE[logit_rows_R]))
        return self._head(F.rms_norm(x_RE, (self.shape.hidden,), self._norm_E, self._eps)).float()


class _Layer:
    """Attention and MLP with their norms. The methods named `add` change the residual x_TE in place, and return it."""

    __slots__ = ("_down", "_eps", "_gate_up", "_norm_mlp_E", "_norm_qkv_E", "_num_rotated", "_out", "_qkv", "_shape")

    def __init__(self, shape: ModelShape, eps: float, name: str, take: Take, take_qk: Take) -> None:
        self._shape, self._eps = shape, eps
        self._num_rotated = shape.num_heads + shape.num_kv_heads
        self._norm_qkv_E = take(name + "input_layernorm.weight")
        self._norm_mlp_E = take(name + "post_attention_layernorm.weight")
        self._qkv = _qkv_projection(shape, name + "self_attn.", take, take_qk)
        self._out = _projection(take, [name + "self_attn.o_proj"], has_bias=shape.output_bias)
        self._gate_up = _projection(take, [name + "mlp.gate_proj", name + "mlp.up_proj"], has_bias=shape.mlp_bias)
        self._down = _projection(take, [name + "mlp.down_proj"], has_bias=shape.mlp_bias)

    def attended(self, index: int, x_TE: Tensor, turn_T1C: Tensor, attend: Attend) -> Tensor:
        """What the heads attended to, not yet projected back to hidden values."""
        shape = self._shape
        qkv_TF = self._qkv(F.rms_norm(x_TE, (shape.hidden,), self._norm_qkv_E, self._eps))
        qkv_TGD = qkv_TF.view(len(qkv_TF), -1, shape.head_dim)
        qk_TGD = rotate(qkv_TGD[:, : self._num_rotated], turn_T1C)
        num_heads = shape.num_heads
        return attend(index, qk_TGD[:, :num_heads], qk_TGD[:, num_heads:], qkv_TGD[:, self._num_rotated :])

    def add_attention(self, x_TE: Tensor, o_TE: Tensor) -> Tensor:
        return x_TE.add_(self._out(o_TE))

    def add_mlp(self, x_TE: Tensor) -> Tensor:
        normed_TE = F.rms_norm(x_TE, (self._shape.hidden,), self._norm_mlp_E, self._eps)
        gate_TI, up_TI = self._gate_up(normed_TE).chunk(2, 1)
        return x_TE.add_(self._down(F.silu(gate_TI).mul_(up_TI)))


def supported_shape(config: Mapping[str, Any]) -> ModelShape:
    """The config's shape, or UnsupportedModel where this decoder would compute something else than the model."""
    family, activation = config.get("model_type"), config.get("hidden_act", "silu")
    if family not in FAMILIES:
        fact = f"its model_type is {family!r}; supported are {', '.join(FAMILIES)} (Llama 2 and 3, SmolLM2)"
        raise UnsupportedModel("loading a model", fact, "use a model of a supported family")
    if activation != "silu":
        fact = f"its hidden_act is {activation!r}; supported is silu"
        raise UnsupportedModel("loading a model", fact, "use a model with a SiLU-gated MLP")
    if method := section(config, "quantization_config").get("quant_method"):
        fact = f"its weights are quantised with {method!r}"
        raise UnsupportedModel("loading a model", fact, "use the unquantised checkpoint, or a GGUF file")
    shape = ModelShape.from_config(config)
    if shape.head_dim % 2:
        raise UnsupportedModel("loading a model", f"its head_dim is {shape.head_dim}", "rotary positions need it even")
    return shape


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor the decoder takes, by Hugging Face name, with its shape."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden, shape.intermediate
    projections = {
        "self_attn.q_proj": (queries, hidden, shape.qkv_bias),
        "self_attn.k_proj": (keys, hidden, shape.qkv_bias),
        "self_attn.v_proj": (keys, hidden, shape.qkv_bias),
        "self_attn.o_proj": (hidden, queries, shape.output_bias),
        "mlp.gate_proj": (inner, hidden, shape.mlp_bias),
        "mlp.up_proj": (inner, hidden, shape.mlp_bias),
        "mlp.down_proj": (hidden, inner, shape.mlp_bias),
    }
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    layer: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (hidden,))
    layer |= {f"{name}.weight": (rows, columns) for name, (rows, columns, _) in projections.items()}
    layer |= {f"{name}.bias": (rows,) for name, (rows, _, has_bias) in projections.items() if has_bias}
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    found |= {f"model.layers.{i}.{name}": dims for i in range(shape.num_layers) for name, dims in layer.items()}
    return found if shape.tied_embeddings else found | {"lm_head.weight": (shape.vocab, hidden)}


def _qkv_projection(shape: ModelShape, name: str, take: Take, take_qk: Take) -> Linear:
    """Query, key and value projections as one; rows of query and key in pair order."""

    def whole(kind: str) -> Tensor:
        rotated = [take_qk(f"{name}{part}_proj.{kind}") for part in "qk"]
        return torch.cat([*rotated, take(f"{name}v_proj.{kind}")])

    return Linear(whole("weight"), whole("bias") if shape.qkv_bias else None)


def _projection(take: Take, names: Sequence[str], *, has_bias: bool) -> Linear:
    """The named projections as one, their outputs side by side."""

    def whole(kind: str) -> Tensor:
        parts = [take(f"{name}.{kind}") for name in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    return Linear(whole("weight"), whole("bias") if has_bias else None)
