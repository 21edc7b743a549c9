"""What a decoder of one config computes, beyond its sizes: the family's facts (`facts.families`) as numbers.

Whatever would make the model another one than the reference implementation's is refused here, before a weight is
read. Costs nothing: a few small tensors of frequencies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from batchwright.errors import UnsupportedModel
from batchwright.facts.families import FAMILIES, FULL, SLIDING, ConfigReader, Family
from batchwright.facts.shape import ModelShape
from batchwright.serve.decoders.attention import LayerAttention
from batchwright.serve.decoders.ops import Activation
from batchwright.serve.decoders.rope import Rotation, rotation
from batchwright.serve.loading.checkpoint import positive, section

_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType({"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"})
"""By the names that configs give them."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """`attention[i]` is layer i's; layers that do the same share one object.

    `offset_norms`: weights of norms are stored less one. `embedding_scale`: what embeddings are multiplied by, rounded
    to the model's dtype. `logit_cap`: logits become cap * tanh(logit / cap). `whole_shares`: the shares of a token's
    experts are made to sum to one.
    """

    shape: ModelShape
    attention: tuple[LayerAttention, ...]
    eps: float
    activation: Activation
    offset_norms: bool
    embedding_scale: float | None
    logit_cap: float | None
    whole_shares: bool

    @property
    def is_plain(self) -> bool:
        """Whether it is Llama's: layers all alike, each value rotated, SiLU, two norms, and nothing besides."""
        does, shape = self.attention[0], self.shape
        extras = (self.offset_norms, self.embedding_scale, self.logit_cap, does.cap, does.window, shape.num_experts)
        is_alike = all(other is does for other in self.attention) and does.freq_C is not None
        return is_alike and self.activation == "silu" and not (any(extras) or shape.qk_norm or shape.post_norms)


def recipe_of(config: Mapping[str, Any], freq_C: Tensor | None = None, device: torch.device | str = "cpu") -> Recipe:
    """`freq_C` overrides the config's rotary frequencies; `device` is where they are wanted.

    Raises UnsupportedModel, ConfigError, BrokenWeights.
    """
    family = _family(config)
    shape = ModelShape.from_config(config)
    if shape.head_dim % 2:
        raise _unsupported(f"its head_dim is {shape.head_dim}", "rotary positions need it even")
    return Recipe(
        shape=shape,
        attention=_attention(config, family, shape, freq_C, device),
        eps=positive("rms_norm_eps", config.get("rms_norm_eps", family.eps)),
        activation=_activation(config, family),
        offset_norms=family.offset_norms,
        embedding_scale=shape.hidden**0.5 if family.scaled_embedding else None,
        logit_cap=_cap(config, family, "final_logit_softcapping"),
        whole_shares=family.whole_shares or ConfigReader(config, shape.family).flag("norm_topk_prob"),
    )


def _family(config: Mapping[str, Any]) -> Family:
    name = config.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        fact = f"its model_type is {name!r}; supported are {', '.join(FAMILIES)}"
        raise _unsupported(fact, "use a model of a supported family")
    if method := section(config, "quantization_config").get("quant_method"):
        fact = f"its weights are quantised with {method!r}"
        raise _unsupported(fact, "use the unquantised checkpoint, or a GGUF file")
    if config.get("use_bidirectional_attention"):
        raise _unsupported("its attention looks ahead", "use a model that writes from left to right")
    return family


def _activation(config: Mapping[str, Any], family: Family) -> Activation:
    key, default = family.activation
    name = config.get(key, default)
    if name not in _ACTIVATIONS:
        fact = f"its {key} is {name!r}; supported are {', '.join(_ACTIVATIONS)}"
        raise _unsupported(fact, "use a model whose MLP is gated by one of these")
    return _ACTIVATIONS[name]


def _cap(config: Mapping[str, Any], family: Family, key: str) -> float | None:
    """None also where the family does not read it. Here an absent key and `null` differ."""
    value = config.get(key, dict(family.caps)[key]) if key in dict(family.caps) else None
    return None if value is None else positive(key, value)


def _attention(
    config: Mapping[str, Any], family: Family, shape: ModelShape, freq_C: Tensor | None, device: torch.device | str
) -> tuple[LayerAttention, ...]:
    scored = shape.head_dim if family.score_key is None else positive(family.score_key, config.get(family.score_key))
    still = LayerAttention(shape.num_heads, scored**-0.5, cap=_cap(config, family, "attn_logit_softcapping"))

    def turned(by: Rotation) -> LayerAttention:
        return still._replace(scale=still.scale * by.magnitude**2, freq_C=by.freq_C.to(device))

    if freq_C is not None:
        wide = narrow = turned(Rotation(freq_C))
    elif family.local_base is None:
        wide = narrow = turned(rotation(config, shape.head_dim, family.base))
    else:
        wide = turned(rotation(config, shape.head_dim, family.base, FULL))
        narrow = turned(rotation(config, shape.head_dim, family.local_base, SLIDING))
    read = ConfigReader(config, shape.family)
    kinds = [(shape.window(layer), family.rotates(read, layer)) for layer in range(shape.num_layers)]
    does = {
        (window, rotates): (still if not rotates else narrow if window else wide)._replace(window=window)
        for window, rotates in kinds
    }
    return tuple(does[kind] for kind in kinds)


def _unsupported(fact: str, remedy: str) -> UnsupportedModel:
    return UnsupportedModel("loading a model", fact, remedy)
