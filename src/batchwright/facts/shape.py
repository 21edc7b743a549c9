"""What a decoder's shape implies: parameters, FLOPs, KV cache and weight bytes, exactly and without the weights.

Covers the decoders of `families`: blocks of grouped-query attention, windowed or not, and a gated MLP (or top-k
experts of one), RMSNorm without bias, rotary positions. Everything is a closed formula derived in its docstring; counts
are integers, and parameter counts equal those of the reference implementations. FLOPs are those of matrix products at
2 per multiply-accumulate; norms, rotations, softmax and activations are not counted (below 1% in real shapes).
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchwright.errors import ConfigError, UnsupportedModel
from batchwright.facts.families import FAMILIES, ConfigReader, Family, layer_windows
from batchwright.units import format_tokens

MAX_LAYERS = 10_000
"""A config that claims more is not believed, before anything is made for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of one decoder. `hidden`, `intermediate` and `head_dim` are widths; `context` is in tokens.

    `qkv_bias`, `output_bias`, `mlp_bias`: whether those projections have biases. `qk_norm`: RMSNorm over each
    head's queries and keys. `post_norms`: RMSNorm of what attention and MLP give, beside that of what they get.
    `windows`: positions a token attends to in each layer, itself included; None is all of them, and so is no tuple
    at all. `num_experts` 0 is a dense MLP of width `intermediate`; otherwise every layer but the `dense_layers`
    routes each token to `num_experts_per_token` experts of width `moe_intermediate`. Raises ConfigError where sizes
    contradict.
    """

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    windows: tuple[int | None, ...] = ()
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate: int = 0
    dense_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """The shape that a Hugging Face `config.json` describes. Raises UnsupportedModel, ConfigError."""
        return _from_config(config)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def num_parameters(self) -> int:
        """All weights, counted once where input and output embedding are tied."""
        return self._num_parameters(self.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """The weights one token meets: without the experts it is not routed to, with both embeddings.

        This is the convention of model cards (Mixtral-8x7B: 12.9 billion). The input embedding is a lookup of one
        row, so for arithmetic use `num_matmul_parameters`.
        """
        return self._num_parameters(self.num_experts_per_token)

    @property
    def num_matmul_parameters(self) -> int:
        """Weights of matrix products that every computed token goes through: no embeddings, norms, biases, LM head.

        Per layer: queries h*H*d, keys and values 2*h*K*d, output H*d*h, and an MLP of 3*h*i (gate, up, down), or a
        router h*E and k experts of 3*h*m. h hidden, H heads, K KV heads, d head_dim, i and m the MLP widths.
        """
        return self.num_layers * self._attention_weights + self._mlp_weights(self.num_experts_per_token)

    def weight_bytes(self, bytes_per_parameter: float = 2) -> int:
        """Bytes of all weights; the default is 16 bit."""
        return math.ceil(self.num_parameters * bytes_per_parameter)

    def kv_bytes_per_token(self, bytes_per_element: float = 2) -> int:
        """Bytes one token's keys and values take: 2 (K and V) * layers * KV heads * head_dim * bytes."""
        return math.ceil(2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_element)

    @property
    def head_flops(self) -> int:
        """FLOPs of the LM head for one row of logits: 2*h*vocab. It runs only where a token is sampled."""
        return 2 * self.hidden * self.vocab

    def flops_per_token(self, context: int = 0) -> int:
        """FLOPs to compute one token that attends to `context` positions, itself included, without the LM head.

        Every weight of a matrix product does one multiply-accumulate: 2 * `num_matmul_parameters`. Attention adds,
        per layer, head and attended position, d MACs for the score (q.k) and d for the weighted sum of v, so
        4 * H * d * context, or the layer's window where that is less. `context=0` leaves attention out.
        """
        assert context >= 0
        attended = sum(n * (context if w is None else min(context, w)) for w, n in self._num_layers_by_window)
        return 2 * self.num_matmul_parameters + self._attention_flops(attended)

    def prefill_flops(self, num_tokens: int, start: int = 0, num_sampled: int = 1) -> int:
        """FLOPs to compute positions `start .. start + num_tokens` and sample at `num_sampled` of them.

        The token at position p attends to p + 1 positions (causal), so attention costs the sum of p + 1, which
        is n*start + n*(n+1)/2; with a window each term is at most the window. A kernel that also computes masked
        scores does up to twice the attention work; that is not counted.
        """
        assert min(num_tokens, start, num_sampled) >= 0
        end = start + num_tokens
        attended = sum(n * (_sum_attended(end, w) - _sum_attended(start, w)) for w, n in self._num_layers_by_window)
        linear = 2 * self.num_matmul_parameters * num_tokens
        return linear + self._attention_flops(attended) + num_sampled * self.head_flops

    def request_flops(self, num_prompt: int, num_output: int, num_cached: int = 0) -> int:
        """FLOPs to serve one request whose first `num_cached` prompt tokens need no computing.

        Each output token is sampled once and all but the last are computed again as input, whatever the chunks
        in which this happens: positions `num_cached .. num_prompt + num_output - 1`, sampled `num_output` times.
        """
        assert 0 <= num_cached < num_prompt
        assert num_output >= 1
        return self.prefill_flops(num_prompt + num_output - 1 - num_cached, num_cached, num_output)

    def step_activation_bytes(self, num_tokens: int, num_sampled: int, bytes_per_element: float = 2) -> int:
        """An estimate of what one inference step holds at its widest besides weights and KV cache.

        Either inside a layer, per token: residual and normed input (2h) plus the wider of attention's q, k, v and
        output (2*H*d + 2*K*d) and the MLP's gate, up and product (3i; k times h + 3m for experts); or at the
        end: residual and, per sampled row, logits in `bytes_per_element` and in 32 bit. Attention is taken to be
        fused (no score matrix). Allocator slack and kernel workspace come on top, so measure before relying on it.
        """
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        expert = self.num_experts_per_token * (self.hidden + 3 * self.moe_intermediate)
        dense = 3 * self.intermediate if self._num_dense_layers else 0
        mlp = max(expert, dense)
        in_layer = num_tokens * (2 * self.hidden + max(attention, mlp)) * bytes_per_element
        at_end = num_tokens * self.hidden * bytes_per_element + num_sampled * self.vocab * (bytes_per_element + 4)
        return math.ceil(max(in_layer, at_end))

    def _attention_flops(self, num_attended: int) -> int:
        """`num_attended` positions, counted once per layer."""
        return 4 * self.num_heads * self.head_dim * num_attended

    @property
    def _num_layers_by_window(self) -> list[tuple[int | None, int]]:
        return list(Counter(self.windows).items()) if self.windows else [(None, self.num_layers)]

    @property
    def _num_dense_layers(self) -> int:
        return len(self.dense_layers) if self.num_experts else self.num_layers

    @property
    def _attention_weights(self) -> int:
        return 2 * self.hidden * (self.num_heads + self.num_kv_heads) * self.head_dim

    def _mlp_weights(self, num_experts: int) -> int:
        """Of all layers, counting so many experts in each that has any."""
        dense = 3 * self.hidden * self.intermediate
        routed = self.hidden * self.num_experts + num_experts * 3 * self.hidden * self.moe_intermediate
        return self._num_dense_layers * dense + (self.num_layers - self._num_dense_layers) * routed

    @property
    def _biases_and_norms(self) -> int:
        """Per layer: two or four RMSNorms of h, two of d where queries and keys are normed, and any biases."""
        norms = (4 if self.post_norms else 2) * self.hidden + 2 * self.head_dim * self.qk_norm
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.qkv_bias
        mlp = (2 * self.intermediate + self.hidden) * self.mlp_bias
        return norms + qkv + self.hidden * self.output_bias + mlp

    def _num_parameters(self, num_experts: int) -> int:
        per_layer = self._attention_weights + self._biases_and_norms
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab * self.hidden
        return self.num_layers * per_layer + self._mlp_weights(num_experts) + embeddings + self.hidden


def _sum_attended(end: int, window: int | None) -> int:
    """Positions attended to by the tokens at positions 0 .. end: the sum of min(p + 1, window)."""
    full = end if window is None else min(end, window)
    return full * (full + 1) // 2 + (end - full) * (window or 0)


def _check(shape: ModelShape) -> None:
    sizes = {
        "num_layers": shape.num_layers,
        "hidden": shape.hidden,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate": shape.intermediate,
        "vocab": shape.vocab,
        "context": shape.context,
    }
    for name, size in sizes.items():
        if size < 1:
            raise _contradiction(shape.family, f"{name} is {size}", "give it a positive value")
    if shape.num_heads % shape.num_kv_heads:
        raise _contradiction(
            shape.family,
            f"{shape.num_heads} attention heads cannot share {shape.num_kv_heads} key-value heads evenly",
            "make the number of heads a multiple of the number of key-value heads",
        )
    _check_layers(shape)
    if shape.num_experts:
        _check_experts(shape)
    elif shape.num_experts_per_token or shape.moe_intermediate or shape.dense_layers:
        raise _contradiction(
            shape.family,
            f"it routes to {shape.num_experts_per_token} experts of width {shape.moe_intermediate} but has none",
            "give num_experts, or leave the others out",
        )


def _check_layers(shape: ModelShape) -> None:
    if len(shape.windows) not in (0, shape.num_layers):
        fact = f"{shape.num_layers} layers have {len(shape.windows)} attention windows"
        raise _contradiction(shape.family, fact, "give each layer one, which may be None")
    if narrow := [window for window in shape.windows if window is not None and window < 1]:
        raise _contradiction(shape.family, f"an attention window is {narrow[0]} tokens", "give at least 1 or none")
    if not shape.dense_layers <= set(range(shape.num_layers)):
        fact = f"dense_layers are {sorted(shape.dense_layers)} of {shape.num_layers} layers"
        raise _contradiction(shape.family, fact, "count layers from 0")


def _check_experts(shape: ModelShape) -> None:
    if not 1 <= shape.num_experts_per_token <= shape.num_experts:
        raise _contradiction(
            shape.family,
            f"{shape.num_experts_per_token} experts per token of {shape.num_experts}",
            "route each token to between 1 and all experts",
        )
    if shape.moe_intermediate < 1:
        raise _contradiction(
            shape.family, f"its experts have width {shape.moe_intermediate}", "give moe_intermediate a positive value"
        )
    if shape.mlp_bias:
        raise _contradiction(shape.family, "it has experts and mlp_bias", "leave mlp_bias off: experts have no biases")


def _contradiction(family: str, fact: str, remedy: str) -> ConfigError:
    return ConfigError(f"describe the shape of a {family} model", fact, remedy)


def _from_config(config: Mapping[str, Any]) -> ModelShape:
    family = config.get("model_type")
    if family is None:
        raise ConfigError("read a model's shape", "its config has no model_type", f"add one of {', '.join(FAMILIES)}")
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"read the shape of a {family!r} model",
            f"the families known are {', '.join(FAMILIES)}",
            "use one of those, or describe the model with ModelShape(...)",
        )
    read, facts = ConfigReader(config, family), FAMILIES[family]
    num_heads = read.count("num_attention_heads")
    num_layers = read.count("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise read.error(f"num_hidden_layers is {num_layers:,}", f"give what it has: no model has {MAX_LAYERS:,}")
    attention_bias = "attention_bias" in facts.bias_flags and read.flag("attention_bias")
    return ModelShape(
        family=family,
        num_layers=num_layers,
        hidden=read.count("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=read.count("num_key_value_heads", num_heads),
        head_dim=_head_dim(read, facts, num_heads),
        intermediate=read.count("intermediate_size"),
        vocab=read.count("vocab_size"),
        context=read.count("max_position_embeddings"),
        tied_embeddings=read.flag("tie_word_embeddings", default=facts.tied),
        qkv_bias=attention_bias or facts.qkv_bias,
        output_bias=attention_bias,
        mlp_bias="mlp_bias" in facts.bias_flags and read.flag("mlp_bias"),
        qk_norm=facts.qk_norm,
        post_norms=facts.post_norms,
        windows=layer_windows(read, facts, num_layers),
        **_experts(read, facts, num_layers),
    )


def _head_dim(read: ConfigReader, facts: Family, num_heads: int) -> int:
    """Explicit, else hidden / heads; families that do not derive it from them must say it."""
    hidden = read.count("hidden_size")
    if facts.own_head_dim:
        return read.count("head_dim")
    if read.config.get("head_dim") is None and hidden % num_heads:
        raise _contradiction(
            read.family,
            f"hidden_size {format_tokens(hidden)} is not a multiple of num_attention_heads {num_heads}",
            "add head_dim to the config",
        )
    return read.count("head_dim", hidden // num_heads)


def _experts(read: ConfigReader, facts: Family, num_layers: int) -> dict[str, Any]:
    if facts.experts is None:
        return {}
    key, other_key, width_key = facts.experts
    if read.config.get(key) is None and read.config.get(other_key) is not None:
        key = other_key
    step, dense = read.count("decoder_sparse_step", 1), read.listed("mlp_only_layers", int) or []
    return {
        "num_experts": read.count(key),
        "num_experts_per_token": read.count("num_experts_per_tok"),
        "moe_intermediate": read.count(width_key),
        "dense_layers": frozenset(layer for layer in range(num_layers) if layer in dense or (layer + 1) % step),
    }
