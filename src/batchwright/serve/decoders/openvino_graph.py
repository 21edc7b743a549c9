"""A decoder's config and weights as an OpenVINO graph around its paged-attention operator; nothing is exported to disk.

The graph takes a step as `openvino_executor` lays it out: token ids of any mix of rows, their rotations, and for each
row how much of it is in pages already and in which. It is written in float32, and the plugin computes it in the
precision it is compiled for; weights keep their own type up to the product that reads them, so that no wider copy is
made. Keys are in the order of Hugging Face checkpoints, which the plugin's rotation wants. Constants share memory with
the tensors they were made of, and the plugin packs a copy of each weight when it first multiplies with it.

Shapes: T positions of the step, R of them with logits, S rows, E hidden, H query heads, K key-value heads, D head_dim,
N outputs and I inputs of a product, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from openvino.op import Constant, _PagedAttentionExtension
from torch import Tensor

from batchwright.serve.decoders.linear import quantized
from batchwright.serve.decoders.model import Take
from batchwright.serve.decoders.recipe import recipe_of

_EXACT_INPUTS = 64
"""Float32 products are taken in slices of this many inputs and added up, for a chain over a whole row rounds too far.

SmolLM2's logits are then within 6e-5 of those in float64; with slices of 192 1.1e-4, with whole rows 2e-4.
"""


_TYPES = {
    torch.float32: (ov.Type.f32, torch.float32),
    torch.bfloat16: (ov.Type.bf16, torch.int16),
    torch.int8: (ov.Type.i8, torch.int8),
}
"""OpenVINO's type, and the type of equal size as which numpy knows it."""

Value = Any
"""What one output of a node carries."""


class Graph(NamedTuple):
    """`held`: the tensors whose memory the model reads, to be kept as long as it is used."""

    model: Any
    held: list[Tensor]


def decoder_graph(
    config: Mapping[str, Any], take: Take, *, in_pair_order: bool = False, quantization: str | None = None
) -> Graph:
    """The graph of the decoder that `config` describes, with the weights that `take` hands over.

    Inputs: `tokens` (T,) int32; `cos` and `sin` (T, 1, 1, D) float32; `past_lens` (S,), `subsequence_begins` (S + 1,),
    `block_indices` and `block_indices_begins` (S + 1,), `max_context_len` (), all int32: rows, and the pages of each;
    `rows` (R,) int32: the positions whose logits are wanted; for each layer i `key_cache.i` and `value_cache.i`, whose
    type and shape the plugin decides. Output: logits_RV, float32.
    `in_pair_order`: query and key rows come in pair order, as GGUF stores them. `quantization`: "int8" holds weights of
    products as int8 with a scale for each output. Raises UnsupportedModel, BrokenWeights.
    """
    return _Builder(config, take, in_pair_order=in_pair_order, quantization=quantization).build()


class _Builder:
    """Emits one node after another; `_held` grows with the weights."""

    def __init__(self, config: Mapping[str, Any], take: Take, *, in_pair_order: bool, quantization: str | None) -> None:
        recipe = recipe_of(config)
        assert recipe.is_plain, "the caller has asked"
        self._shape, self._eps, self._scale = recipe.shape, recipe.eps, recipe.attention[0].scale
        self._take = take
        self._in_pair_order = in_pair_order
        self._quantization = quantization
        self._held: list[Tensor] = []
        self._inputs: list[Any] = []

    def build(self) -> Graph:
        embedding_VE = self._take("model.embed_tokens.weight")
        tokens_T = self._input("tokens", ov.Type.i32, [-1])
        rows_R = self._input("rows", ov.Type.i32, [-1])
        step = _Step(
            cos=self._input("cos", ov.Type.f32, [-1, 1, 1, self._shape.head_dim]),
            sin=self._input("sin", ov.Type.f32, [-1, 1, 1, self._shape.head_dim]),
            paging=[self._input(name, ov.Type.i32, [-1]) for name in _PAGING],
            max_context_len=self._input("max_context_len", ov.Type.i32, []),
        )
        x_TE = _float(ops.gather(self._constant(embedding_VE), tokens_T, _int(0)))
        last = self._shape.num_layers - 1
        for layer in range(self._shape.num_layers):
            o_TE = self._attended(layer, x_TE, step)
            if layer == last:
                x_TE, o_TE = (ops.gather(value, rows_R, _int(0)) for value in (x_TE, o_TE))
            x_TE = self._projected(layer, x_TE, o_TE)
        head_VE = embedding_VE if self._shape.tied_embeddings else self._take("lm_head.weight")
        logits_RV = ops.result(self._product(self._normed(x_TE, "model.norm"), head_VE))
        return Graph(ov.Model([logits_RV], self._inputs, "decoder"), self._held)

    # ---- a layer

    def _attended(self, layer: int, x_TE: Value, step: "_Step") -> Value:
        """What the heads of `layer` attended to, not yet projected back to hidden values."""
        shape, name = self._shape, f"model.layers.{layer}."
        q, k, v = self._queries_keys_values(self._normed(x_TE, name + "input_layernorm"), name + "self_attn.")
        caches = [self._input(f"{kind}_cache.{layer}", ov.Type.dynamic, [-1, -1, -1, -1]) for kind in ("key", "value")]
        queries, keys = self._rotated(q, shape.num_heads, step), self._rotated(k, shape.num_kv_heads, step)
        inputs = [queries, keys, v, *caches, *step.paging, *_attention_settings(self._scale, step.max_context_len)]
        attention = _PagedAttentionExtension([_output(value) for value in inputs])
        for kind in "kv":
            attention.get_rt_info()[f"num_{kind}_heads"] = shape.num_kv_heads
            attention.get_rt_info()[f"{kind}_head_size"] = shape.head_dim
        return attention.output(0)

    def _queries_keys_values(self, x_TE: Value, name: str) -> list[Value]:
        """One product, whose outputs are cut in three: that is faster than three, though the cut copies."""
        shape = self._shape
        widths = [heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]

        def whole(kind: str) -> Tensor:
            rotated = [self._in_halves(self._take(f"{name}{part}_proj.{kind}")) for part in "qk"]
            return torch.cat([*rotated, self._take(f"{name}v_proj.{kind}")])

        y_TF = self._biased(self._product(x_TE, whole("weight")), whole("bias") if shape.qkv_bias else None)
        cut: list[Value] = ops.variadic_split(y_TF, _int(1), _int(widths)).outputs()
        return cut

    def _projected(self, layer: int, x_RE: Value, o_RE: Value) -> Value:
        """The residual behind `layer`: attention projected and added, then the MLP."""
        shape, name = self._shape, f"model.layers.{layer}."
        x_RE = ops.add(x_RE, self._linear(o_RE, name + "self_attn.o_proj", has_bias=shape.output_bias))
        normed_RE = self._normed(x_RE, name + "post_attention_layernorm")
        gate = ops.swish(self._linear(normed_RE, name + "mlp.gate_proj", has_bias=shape.mlp_bias), np.float32(1))
        up = self._linear(normed_RE, name + "mlp.up_proj", has_bias=shape.mlp_bias)
        return ops.add(x_RE, self._linear(ops.multiply(gate, up), name + "mlp.down_proj", has_bias=shape.mlp_bias))

    def _normed(self, x_TE: Value, name: str) -> Value:
        weight_E = self._constant(self._take(name + ".weight").float())
        mean_T1 = ops.reduce_mean(ops.power(x_TE, np.float32(2)), _int([-1]), keep_dims=True)
        scale_T1 = ops.divide(np.float32(1), ops.sqrt(ops.add(mean_T1, np.float32(self._eps))))
        return ops.multiply(weight_E, ops.multiply(x_TE, scale_T1))

    def _rotated(self, x_TF: Value, num_heads: int, step: "_Step") -> Value:
        """Value i of each head paired with value i + D/2, in the form that the plugin knows as one operator."""
        half = self._shape.head_dim // 2
        x_TG1D = ops.reshape(x_TF, _int([-1, num_heads, 1, 2 * half]), special_zero=False)
        first, second = ops.variadic_split(x_TG1D, _int(3), _int([half, half])).outputs()
        turned = ops.concat([ops.multiply(second, np.float32(-1)), first], -1)
        rotated = ops.add(ops.multiply(x_TG1D, step.cos), ops.multiply(turned, step.sin))
        return ops.reshape(rotated, _int([-1, num_heads * 2 * half]), special_zero=False)

    # ---- products

    def _linear(self, x_TI: Value, name: str, *, has_bias: bool) -> Value:
        """The named projection."""
        y_TN = self._product(x_TI, self._take(name + ".weight"))
        return self._biased(y_TN, self._take(name + ".bias") if has_bias else None)

    def _biased(self, y_TN: Value, bias_N: Tensor | None) -> Value:
        return y_TN if bias_N is None else ops.add(y_TN, self._constant(bias_N.float()))

    def _in_halves(self, rows: Tensor) -> Tensor:
        """The rows of each head as Hugging Face has them: the inverse of `rope.interleave`, where that was applied."""
        if not self._in_pair_order:
            return rows
        pairs = rows.view(-1, self._shape.head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)

    def _product(self, x_TI: Value, weight_NI: Tensor) -> Value:
        if self._quantization == "int8":
            return self._int8_product(x_TI, weight_NI)
        if weight_NI.dtype == torch.float32:
            return self._exact_product(x_TI, weight_NI)
        narrow = ops.convert(x_TI, _TYPES[weight_NI.dtype][0])
        return _float(ops.matmul(narrow, self._constant(weight_NI), transpose_a=False, transpose_b=True))

    def _exact_product(self, x_TI: Value, weight_NI: Tensor) -> Value:
        """The sum over slices of the inputs."""
        slices = weight_NI.split(_EXACT_INPUTS, 1)
        parts = ops.variadic_split(x_TI, _int(1), _int([part.shape[1] for part in slices])).outputs()
        products = [
            ops.matmul(part, self._constant(weight.contiguous()), transpose_a=False, transpose_b=True)
            for part, weight in zip(parts, slices, strict=True)
        ]
        total = products[0]
        for product in products[1:]:
            total = ops.add(total, product)
        return total

    def _int8_product(self, x_TI: Value, weight_NI: Tensor) -> Value:
        """Convert and multiply are how the plugin recognises a weight that it may keep as int8."""
        steps_NI, scale_N = quantized(weight_NI)
        weight = ops.multiply(_float(self._constant(steps_NI)), self._constant(scale_N[:, None]))
        return ops.matmul(x_TI, weight, transpose_a=False, transpose_b=True)

    # ---- leaves

    def _input(self, name: str, kind: Any, dims: Sequence[int]) -> Value:
        parameter = ops.parameter(ov.PartialShape(list(dims)), kind, name)
        parameter.output(0).get_tensor().set_names({name})
        self._inputs.append(parameter)
        return parameter

    def _constant(self, tensor: Tensor) -> Value:
        self._held.append(tensor)
        return Constant(as_openvino(tensor), shared_memory=True)


_PAGING = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")


class _Step(NamedTuple):
    """What all layers share of a step; `paging` in the order of `_PAGING`."""

    cos: Value
    sin: Value
    paging: list[Value]
    max_context_len: Value


def as_openvino(tensor: Tensor) -> Any:
    """The same memory as an OpenVINO tensor, to be kept alive by the caller. `tensor` is contiguous."""
    kind, known_to_numpy = _TYPES[tensor.dtype]
    return ov.Tensor(tensor.view(known_to_numpy).numpy(), ov.Shape(list(tensor.shape)), kind)


def _attention_settings(scale: float, max_context_len: Value) -> list[Value]:
    """The operator's inputs behind the pages, in its order; all but the scale and the longest context are off."""
    floats, ints, off = _empty(np.float32), _empty(np.int32), Constant(np.array(0, np.int32))
    eviction = [off, ints, ints, ints]  # start size, evictable sizes, diversity sets and where they begin
    return [
        Constant(np.array(scale, np.float32)),
        off,  # sliding window
        floats,  # slopes of linear biases
        max_context_len,
        ints,  # window over which scores are summed up
        *(ints, ints, floats),  # blocks to rotate anew, by how much, and the table for it
        *(floats, off, off),  # sparse attention: threshold, block size, stride
        floats,  # sinks
        *eviction,
        ints,  # types of tokens
        *(_empty(np.uint8), ints),  # biases between queries, and where they begin
    ]


def _empty(dtype: Any) -> Value:
    return Constant(np.zeros(0, dtype))


def _int(value: int | Sequence[int]) -> Value:
    return Constant(np.array(value, np.int64))


def _float(value: Value) -> Value:
    """As float32; nothing where it is that already."""
    return ops.convert(value, ov.Type.f32)


def _output(value: Value) -> Value:
    """A node's first output; an output is itself."""
    return value.output(0) if hasattr(value, "output") else value
