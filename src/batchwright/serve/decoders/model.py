"""One decoder for all families of `facts.families`, over a flat list of tokens.

A step is T tokens of any mix of requests, prefill chunks and decodes alike. The decoder knows nothing of requests,
pages, positions or masks: it hands each layer's queries, keys and values to `attend`, which rotates, stores and
attends as the executor pleases, and computes with the operators it was given (`ops`), as its `recipe` says. Numerics
follow the reference implementation: norms and rotations in float32, residual in the model's dtype.
Costs 2 FLOPs per weight and token; logits, and the last layer's MLP, are computed only for the rows asked for.

Shapes: T tokens of the step, R rows of them whose logits are wanted, E hidden, H query heads, K key-value heads,
D values per head, I MLP width, L layers, X experts, V vocabulary, F = (H + 2K) * D.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchwright.facts.shape import ModelShape
from batchwright.serve.decoders.adapters import Place, RowAdapters, StepAdapters
from batchwright.serve.decoders.experts import Experts, expert_shapes
from batchwright.serve.decoders.ops import Gated, Linear, Ops, TorchOps
from batchwright.serve.decoders.recipe import Recipe, recipe_of
from batchwright.serve.decoders.rope import interleave

Attend = Callable[[int, Tensor], Tensor]
"""(layer, qkv_TF) -> o_TE' with E' = H * D. Keys and queries are in pair order (see `rope`) and not rotated yet;
`qkv_TF` may be changed."""

Take = Callable[[str], Tensor]
"""Hands over one tensor, by its Hugging Face name, in the dtype and on the device the decoder runs in."""


class Decoder:
    """`forward` runs one step. Weights are taken one by one and joined, so loading peaks at one layer extra.

    `attention[i]` is what layer i's attention does. `expert_tokens_LX`: of the last forward, how many positions each
    expert was given in each layer (in the last one, of those asked for); None where no layer has experts.
    """

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
        self._embedding_VE = take("model.embed_tokens.weight")
        self._recipe = recipe = recipe_of(config, freq_C, self.device)
        self.shape, self.attention = recipe.shape, recipe.attention
        scale = recipe.embedding_scale
        self._embedding_scale = None if scale is None else float(torch.tensor(scale, dtype=self.dtype))
        self.ops = ops or TorchOps()
        taker = _Taker(recipe, take, in_pair_order=in_pair_order)
        self._layers = [_Layer(self.ops, recipe, layer, taker) for layer in range(self.shape.num_layers)]
        self._norm_E = taker.norm("model.norm.weight")
        self._head = self.ops.linear(self._embedding_VE if self.shape.tied_embeddings else take("lm_head.weight"))
        self.expert_tokens_LX = self._no_tokens()

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

        Of a layer that is the residual and its norm, then either queries, keys, values and output, or the MLP's width,
        or experts' inputs, width, outputs and sums, the latter two in float32, should all tokens go to one of them.
        Counted for our kernels; torch's operators keep more (docs/log.md). An adapter of gates or ups adds twice the
        MLP's width.
        """
        shape, size = self.shape, self.dtype.itemsize
        heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        experts = (shape.hidden + shape.moe_intermediate) * size + (2 * shape.hidden + shape.num_experts) * 4
        dense = shape.intermediate * size if shape.dense_layers or not shape.num_experts else 0
        per_position = max(heads * size, dense, experts if shape.num_experts else 0)
        return num_positions * (2 * shape.hidden * size + per_position) + num_rows * shape.vocab * 4

    @torch.inference_mode()
    def forward(
        self,
        tokens_T: Tensor,
        attend: Attend,
        rows_R: Tensor,
        room_RV: Tensor | None = None,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """logits_RV in float32, in the order of `rows_R` (int64, may be empty); perhaps in `room_RV`."""
        return self.logits(self.hidden(tokens_T, attend, rows_R, adapters), room_RV)

    @torch.inference_mode()
    def hidden(self, tokens_T: Tensor, attend: Attend, rows_R: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """x_RE, normed: what logits are made of, at the positions `rows_R` (int64, may be empty).

        `attend` is called once per layer, in order. T is at least 1; all tensors are on the decoder's device.
        """
        x_TE = self._embedded(tokens_T)
        tokens_LX = self.expert_tokens_LX = self._no_tokens()
        last = len(self._layers) - 1
        of_rows = adapters and adapters.all
        for i, layer in enumerate(self._layers):
            o_TE = attend(i, layer.qkv(x_TE, of_rows))
            if i == last:
                if not len(rows_R):
                    return x_TE[:0]
                x_TE, o_TE = x_TE[rows_R], o_TE[rows_R]
                of_rows = adapters and adapters.wanted
            x_TE = layer.add_attention(x_TE, o_TE, of_rows)
            x_TE = layer.add_mlp(x_TE, None if tokens_LX is None else tokens_LX[i], of_rows)
        return self.ops.norm(x_TE, self._norm_E, self._recipe.eps)

    @torch.inference_mode()
    def logits(self, x_RE: Tensor, room_RV: Tensor | None = None) -> Tensor:
        """logits_RV in float32 of what `hidden` gave, or of any of its rows; perhaps in `room_RV`."""
        if not len(x_RE):
            return x_RE.new_empty((0, self.shape.vocab), dtype=torch.float32)
        logits_RV = self._head.floats(x_RE, room_RV)
        cap = self._recipe.logit_cap
        return logits_RV if cap is None else logits_RV.div_(cap).tanh_().mul_(cap)

    def _embedded(self, tokens_T: Tensor) -> Tensor:
        x_TE = F.embedding(tokens_T, self._embedding_VE)
        return x_TE if self._embedding_scale is None else x_TE.mul_(self._embedding_scale)

    def _no_tokens(self) -> Tensor | None:
        shape = self.shape
        if not shape.num_experts:
            return None
        return torch.zeros(shape.num_layers, shape.num_experts, dtype=torch.int64, device=self.device)


class _Taker:
    """Takes weights as a layer wants them."""

    def __init__(self, recipe: Recipe, take: Take, *, in_pair_order: bool) -> None:
        self._recipe, self.plain = recipe, take
        self._in_pair_order = in_pair_order

    def rotated(self, name: str) -> Tensor:
        """In pair order."""
        return self.plain(name) if self._in_pair_order else interleave(self.plain(name), self._recipe.shape.head_dim)

    def norm(self, name: str) -> Tensor:
        return self._whole(self.plain(name))

    def rotated_norm(self, name: str) -> Tensor:
        return self._whole(self.rotated(name))

    def _whole(self, weight_E: Tensor) -> Tensor:
        """In float32 where that was stored less one, as the reference computes it."""
        return 1 + weight_E.float() if self._recipe.offset_norms else weight_E


class _Layer:
    """Attention and MLP with their norms. The methods named `add` change the residual x_TE in place, and return it.

    `_after_attention_E` and `_after_mlp_E` are norms of what is added, where a family has them. One of `_dense` and
    `_experts` is there.
    """

    __slots__ = (
        "_after_attention_E", "_after_mlp_E", "_dense", "_eps", "_experts", "_index", "_norm_heads", "_norm_mlp_E",
        "_norm_qkv_E", "_ops", "_out", "_qkv", "_shape",
    )  # fmt: skip

    def __init__(self, ops: Ops, recipe: Recipe, layer: int, taker: _Taker) -> None:
        self._ops, self._eps, self._shape, self._index = ops, recipe.eps, recipe.shape, layer
        shape, name, take = recipe.shape, f"model.layers.{layer}.", taker.plain
        qkv = [(taker.rotated, "self_attn.q_proj"), (taker.rotated, "self_attn.k_proj"), (take, "self_attn.v_proj")]
        weights, biases = _parts([(how, name + part) for how, part in qkv], has_bias=shape.qkv_bias)
        self._qkv = ops.linear(torch.cat(weights), torch.cat(biases) if biases else None)
        self._out = _linear(ops, take, name + "self_attn.o_proj", has_bias=shape.output_bias)
        self._norm_heads: tuple[Tensor, Tensor] | None = None
        if shape.qk_norm:
            q_D, k_D = (taker.rotated_norm(f"{name}self_attn.{part}_norm.weight") for part in "qk")
            self._norm_heads = q_D, k_D
        before_qkv, after_attention, before_mlp, after_mlp = _norm_names(shape)
        self._norm_qkv_E = taker.norm(name + before_qkv)
        self._norm_mlp_E = taker.norm(name + before_mlp)
        self._after_attention_E = taker.norm(name + after_attention) if after_attention else None
        self._after_mlp_E = taker.norm(name + after_mlp) if after_mlp else None
        self._dense: tuple[Gated, Linear] | None = None
        self._experts: Experts | None = None
        if shape.has_experts(layer):
            self._experts = Experts(ops, shape, layer, take, recipe.activation, whole_shares=recipe.whole_shares)
        else:
            mlp = [(take, name + "mlp.gate_proj"), (take, name + "mlp.up_proj")]
            weights, biases = _parts(mlp, has_bias=shape.mlp_bias)
            down = _linear(ops, take, name + "mlp.down_proj", has_bias=shape.mlp_bias)
            self._dense = ops.gated(weights, biases, recipe.activation), down

    def qkv(self, x_TE: Tensor, adapters: RowAdapters | None) -> Tensor:
        normed_TE = self._ops.norm(x_TE, self._norm_qkv_E, self._eps)
        qkv_TF = self._qkv(normed_TE)
        if adapters is not None:
            adapters.add_to(qkv_TF, normed_TE, self._index, "qkv")
        if self._norm_heads is not None:
            num_heads, num_kv_heads = self._shape.num_heads, self._shape.num_kv_heads
            self._ops.norm_heads(qkv_TF, *self._norm_heads, num_heads, num_kv_heads, self._eps)
        return qkv_TF

    def add_attention(self, x_TE: Tensor, o_TE: Tensor, adapters: RowAdapters | None) -> Tensor:
        return self._add(x_TE, self._out, o_TE, self._after_attention_E, "out", adapters)

    def add_mlp(self, x_TE: Tensor, tokens_X: Tensor | None, adapters: RowAdapters | None) -> Tensor:
        """`tokens_X` gains how many tokens each expert was given."""
        normed_TE = self._ops.norm(x_TE, self._norm_mlp_E, self._eps)
        if self._dense is None:
            assert self._experts is not None and tokens_X is not None
            return x_TE.add_(self._experts(normed_TE, tokens_X))
        gated, down = self._dense
        y_TI = gated(normed_TE) if adapters is None else adapters.gated(gated, normed_TE, self._index)
        return self._add(x_TE, down, y_TI, self._after_mlp_E, "down", adapters)

    def _add(
        self,
        x_TE: Tensor,
        linear: Linear,
        y_TK: Tensor,
        after_E: Tensor | None,
        place: Place,
        adapters: RowAdapters | None,
    ) -> Tensor:
        """`x_TE` with the product of `y_TK`, whose norm is taken by `after_E` if that is there."""
        sum_TE = linear.add_to(x_TE, y_TK) if after_E is None else linear(y_TK)
        if adapters is not None:
            adapters.add_to(sum_TE, y_TK, self._index, place)
        return sum_TE if after_E is None else x_TE.add_(self._ops.norm(sum_TE, after_E, self._eps))

    @property
    def num_bytes(self) -> int:
        mlp = self._dense or (self._experts,)
        return sum(part.num_bytes for part in (self._qkv, self._out, *mlp) if part is not None)


def _norm_names(shape: ModelShape) -> tuple[str, str, str, str]:
    """Before and after attention, before and after the MLP; empty where there is none.

    "post_attention" is behind attention in one case, and behind its sum with the residual in the other.
    """
    if shape.post_norms:
        post = (
            "post_attention_layernorm.weight",
            "pre_feedforward_layernorm.weight",
            "post_feedforward_layernorm.weight",
        )
        return ("input_layernorm.weight", *post)
    return "input_layernorm.weight", "", "post_attention_layernorm.weight", ""


def _linear(ops: Ops, take: Take, name: str, *, has_bias: bool) -> Linear:
    (weight,), biases = _parts([(take, name)], has_bias=has_bias)
    return ops.linear(weight, *biases)


def _parts(takes: Sequence[tuple[Take, str]], *, has_bias: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The weights, and the biases if there are any, of the named projections."""
    weights = [take(f"{name}.weight") for take, name in takes]
    return weights, [take(f"{name}.bias") for take, name in takes] if has_bias else []


def supported_shape(config: Mapping[str, Any]) -> ModelShape:
    """The config's shape, or UnsupportedModel where this decoder would compute something else than the model."""
    return recipe_of(config).shape


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor the decoder takes, by its name in published checkpoints, with its shape (see `experts.unfused`)."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    for layer in range(shape.num_layers):
        found |= {f"model.layers.{layer}.{name}": dims for name, dims in _attention_shapes(shape).items()}
        if shape.has_experts(layer):
            found |= expert_shapes(shape, layer)
        else:
            found |= {f"model.layers.{layer}.{name}": dims for name, dims in _mlp_shapes(shape).items()}
    return found if shape.tied_embeddings else found | {"lm_head.weight": (shape.vocab, shape.hidden)}


def _attention_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """With the norms of a layer."""
    queries, keys, hidden = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.hidden
    norms: dict[str, tuple[int, ...]] = {name: (hidden,) for name in _norm_names(shape) if name}
    if shape.qk_norm:
        norms |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (shape.head_dim,))
    projections = _projections(queries, hidden, ("self_attn.q_proj",), has_bias=shape.qkv_bias)
    projections |= _projections(keys, hidden, ("self_attn.k_proj", "self_attn.v_proj"), has_bias=shape.qkv_bias)
    return norms | projections | _projections(hidden, queries, ("self_attn.o_proj",), has_bias=shape.output_bias)


def _mlp_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden, inner = shape.hidden, shape.intermediate
    wide = _projections(inner, hidden, ("mlp.gate_proj", "mlp.up_proj"), has_bias=shape.mlp_bias)
    return wide | _projections(hidden, inner, ("mlp.down_proj",), has_bias=shape.mlp_bias)


def _projections(rows: int, columns: int, names: Sequence[str], *, has_bias: bool) -> dict[str, tuple[int, ...]]:
    weights: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns) for name in names}
    return weights | {f"{name}.bias": (rows,) for name in names if has_bias}
