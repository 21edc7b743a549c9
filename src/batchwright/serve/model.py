"""One decoder for Llama 2, Llama 3 and SmolLM2 shapes, over a flat list of tokens.

A step is T tokens of any mix of requests, prefill chunks and decodes alike. The decoder knows nothing of requests,
pages, positions or masks: it hands each layer's queries, keys and values to `attend`, which rotates, stores and
attends as the executor pleases, and computes with the operators it was given (`ops`). Numerics follow the reference
implementation: norms and rotations in float32, residual in the model's dtype.
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
from batchwright.serve.attention import LayerAttention
from batchwright.serve.checkpoint import positive, section
from batchwright.serve.ops import Ops, TorchOps
from batchwright.serve.rope import frequencies, interleave

FAMILIES = ("llama",)
"""The `model_type`s this decoder runs: Llama 2 and 3, SmolLM and SmolLM2, and whatever else declares itself so."""

Attend = Callable[[int, Tensor], Tensor]
"""(layer, qkv_TF) -> o_TE' with E' = H * D. Keys and queries are in pair order (see `rope`) and not rotated yet;
`qkv_TF` may be changed."""

Take = Callable[[str], Tensor]
"""Hands over one tensor, by its Hugging Face name, in the dtype and on the device the decoder runs in."""


class Decoder:
    """`forward` runs one step. Weights are taken one by one and joined, so loading peaks at one layer extra."""

    def __init__(
        self,
        config: Mapping[str, Any],
        take: Take,
        freq_C: Tensor | None = None,
        *,
        in_pair_order: bool = False,
        ops: Ops | None = None,
    ) -> None:
        """`config` as in `config.json`; `freq_C` overrides its rotary frequencies; `ops` are torch's by default.

        `in_pair_order`: query and key rows already come in pair order, as GGUF stores them.
        """
        self.shape = supported_shape(config)
        self.ops = ops or TorchOps()
        self._eps = positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6))
        freq_C = frequencies(config, self.shape.head_dim) if freq_C is None else freq_C
        self._embedding_VE = take("model.embed_tokens.weight")
        does = LayerAttention(
            self.shape.num_heads, self.shape.head_dim**-0.5, freq_C=freq_C.to(self._embedding_VE.device)
        )
        self.attention = (does,) * self.shape.num_layers
        take_qk = take if in_pair_order else lambda name: interleave(take(name), self.shape.head_dim)
        names = [f"model.layers.{i}." for i in range(self.shape.num_layers)]
        self._layers = [_Layer(self.ops, self.shape, self._eps, name, take, take_qk) for name in names]
        self._norm_E = take("model.norm.weight")
        self._head = self.ops.linear(self._embedding_VE if self.shape.tied_embeddings else take("lm_head.weight"))

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding_VE.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding_VE.device

    @property
    def num_bytes(self) -> int:
        """Of the weights, as they are held. The embedding is held plain, for look-ups, also where the head is tied."""
        return self._embedding_VE.nbytes + self._head.num_bytes + sum(layer.num_bytes for layer in self._layers)

    def workspace_bytes(self, num_positions: int, num_rows: int) -> int:
        """Most that a forward holds beside weights and pages, for `num_positions`, and logits for `num_rows` of them.

        Of a layer that is the residual and its norm, then either queries, keys, values and output, or the MLP's width.
        Counted for our kernels; torch's operators keep more (docs/log.md).
        """
        shape = self.shape
        heads = 2 * shape.num_heads + 2 * shape.num_kv_heads
        per_position = 2 * shape.hidden + max(heads * shape.head_dim, shape.intermediate)
        return num_positions * per_position * self.dtype.itemsize + num_rows * shape.vocab * 4

    @torch.inference_mode()
    def forward(self, tokens_T: Tensor, attend: Attend, rows_R: Tensor, room_RV: Tensor | None = None) -> Tensor:
        """logits_RV in float32, in the order of `rows_R` (int64, may be empty); perhaps in `room_RV`."""
        return self.logits(self.hidden(tokens_T, attend, rows_R), room_RV)

    @torch.inference_mode()
    def hidden(self, tokens_T: Tensor, attend: Attend, rows_R: Tensor) -> Tensor:
        """x_RE, normed: what logits are made of, at the positions `rows_R` (int64, may be empty).

        `attend` is called once per layer, in order. T is at least 1; all tensors are on the decoder's device.
        """
        x_TE = F.embedding(tokens_T, self._embedding_VE)
        for i, layer in enumerate(self._layers[:-1]):
            x_TE = layer.add_mlp(layer.add_attention(x_TE, attend(i, layer.qkv(x_TE))))
        last = self._layers[-1]
        o_TE = attend(len(self._layers) - 1, last.qkv(x_TE))
        if not len(rows_R):
            return x_TE[:0]
        x_RE = last.add_mlp(last.add_attention(x_TE[rows_R], o_TE[rows_R]))
        return self.ops.norm(x_RE, self._norm_E, self._eps)

    @torch.inference_mode()
    def logits(self, x_RE: Tensor, room_RV: Tensor | None = None) -> Tensor:
        """logits_RV in float32 of what `hidden` gave, or of any of its rows; perhaps in `room_RV`."""
        if not len(x_RE):
            return x_RE.new_empty((0, self.shape.vocab), dtype=torch.float32)
        return self._head.floats(x_RE, room_RV)


class _Layer:
    """Attention and MLP with their norms. The methods named `add` change the residual x_TE in place, and return it."""

    __slots__ = ("_down", "_eps", "_gated", "_norm_mlp_E", "_norm_qkv_E", "_ops", "_out", "_qkv")

    def __init__(self, ops: Ops, shape: ModelShape, eps: float, name: str, take: Take, take_qk: Take) -> None:
        self._ops, self._eps = ops, eps
        self._norm_qkv_E = take(name + "input_layernorm.weight")
        self._norm_mlp_E = take(name + "post_attention_layernorm.weight")
        qkv = [(take_qk, "self_attn.q_proj"), (take_qk, "self_attn.k_proj"), (take, "self_attn.v_proj")]
        weights, biases = _parts([(how, name + part) for how, part in qkv], has_bias=shape.qkv_bias)
        self._qkv = ops.linear(torch.cat(weights), torch.cat(biases) if biases else None)
        weights, biases = _parts([(take, name + "self_attn.o_proj")], has_bias=shape.output_bias)
        self._out = ops.linear(weights[0], biases[0] if biases else None)
        mlp = [(take, name + "mlp.gate_proj"), (take, name + "mlp.up_proj")]
        self._gated = ops.gated(*_parts(mlp, has_bias=shape.mlp_bias))
        weights, biases = _parts([(take, name + "mlp.down_proj")], has_bias=shape.mlp_bias)
        self._down = ops.linear(weights[0], biases[0] if biases else None)

    def qkv(self, x_TE: Tensor) -> Tensor:
        return self._qkv(self._ops.norm(x_TE, self._norm_qkv_E, self._eps))

    def add_attention(self, x_TE: Tensor, o_TE: Tensor) -> Tensor:
        return self._out.add_to(x_TE, o_TE)

    def add_mlp(self, x_TE: Tensor) -> Tensor:
        return self._down.add_to(x_TE, self._gated(self._ops.norm(x_TE, self._norm_mlp_E, self._eps)))

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in (self._qkv, self._out, self._gated, self._down))


def _parts(takes: Sequence[tuple[Take, str]], *, has_bias: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The weights, and the biases if there are any, of the named projections."""
    weights = [take(f"{name}.weight") for take, name in takes]
    return weights, [take(f"{name}.bias") for take, name in takes] if has_bias else []


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
