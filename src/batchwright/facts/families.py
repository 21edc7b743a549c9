"""The families of models: what each one fixes, and what it takes for granted where a config is silent.

A family is a `model_type`. One table serves sizes (`shape`) and what is computed with them (`serve/recipe`), so a
family of a known kind is one more line. Its facts are those of the reference implementation (`configuration_*.py` and
`modeling_*.py` of transformers 5.24), which likewise ignores what a config says beyond what its family reads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from batchwright.errors import ConfigError, UnsupportedModel

SLIDING, FULL = "sliding_attention", "full_attention"
"""What `layer_types` calls layers with and without a window."""


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Typed look-ups in a family's config; an absent key and `null` are the same."""

    config: Mapping[str, Any]
    family: str

    def count(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"its config has no {key}", f"add {key} to the config")
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            kind = "positive whole number" if at_least else "whole number"
            raise self.error(f"{key} is {value!r}", f"make {key} a {kind}")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{key} is {value!r}", f"make {key} true or false")
        return default if value is None else value

    def listed(self, key: str, kind: type, at_least: int = 0) -> list[Any] | None:
        """A list of `at_least` so many values of one kind, or None."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(one, kind) for one in value) or len(value) < at_least:
            raise self.error(f"{key} is {value!r}", f"make {key} a list of {at_least or 'any'} {kind.__name__} values")
        return value

    def error(self, fact: str, remedy: str) -> ConfigError:
        return ConfigError(f"read the shape of a {self.family} model", fact, remedy)


OfLayer = Callable[[ConfigReader, int], bool]
"""Whether something is so in a layer, counted from 0."""


def _never(read: ConfigReader, layer: int) -> bool:
    return False


def _always(read: ConfigReader, layer: int) -> bool:
    return True


def _rotates_most(read: ConfigReader, layer: int) -> bool:
    """SmolLM3 leaves every fourth layer without positions; its list holds 0 for those."""
    listed = read.listed("no_rope_layers", int, at_least=layer + 1)
    if listed is None:
        return (layer + 1) % read.count("no_rope_layer_interval", 4) != 0
    return bool(listed[layer])


def _slides_unrotated(read: ConfigReader, layer: int) -> bool:
    return not _rotates_most(read, layer)


def _slides_above(read: ConfigReader, layer: int) -> bool:
    return layer >= read.count("max_window_layers", 28, at_least=0)


def _slides_alternately(read: ConfigReader, layer: int) -> bool:
    return layer % 2 == 0


def _slides_mostly(read: ConfigReader, layer: int) -> bool:
    return (layer + 1) % read.count("sliding_window_pattern", 6) != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the configs of one `model_type` mean.

    `tied`, `eps`, `base`, `window`: what an absent key stands for. `base` is that of rotations, and `local_base` of
    those in layers with a window, where these have their own. `caps`: the same by key, of the caps that it reads.
    `bias_flags`: the keys of optional biases that it reads; `qkv_bias`: it has those always.
    `own_head_dim`: heads are not hidden / heads wide unless the config says so.
    `qk_norm`: queries and keys are normed head by head. `post_norms`: what attention and MLP give is normed too.
    `offset_norms`: weights of norms are stored less one. `scaled_embedding`: by sqrt(hidden).
    `score_key`: names what scores are divided by the root of, where that is not the head's width.
    `activation`: its key, and what absence means.
    `window_flag`: there are windows only where `use_sliding_window` is set. `slides`: which layers have them.
    `layer_types`: whether a config may say so itself. `rotates`: which layers rotate queries and keys.
    `experts`: the keys of how many there are, under its own name and the one that transformers 5 may save, and of how
    wide they are; None where layers have none. `whole_shares`: the shares of a token's experts always sum to one.
    """

    tied: bool = False
    eps: float = 1e-6
    base: float = 10_000.0
    local_base: float | None = None
    bias_flags: tuple[str, ...] = ()
    qkv_bias: bool = False
    own_head_dim: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    offset_norms: bool = False
    scaled_embedding: bool = False
    score_key: str | None = None
    activation: tuple[str, str] = ("hidden_act", "silu")
    caps: tuple[tuple[str, float | None], ...] = ()
    window: int | None = None
    window_flag: bool = False
    slides: OfLayer = _never
    layer_types: bool = False
    rotates: OfLayer = _always
    experts: tuple[str, str, str] | None = None
    whole_shares: bool = False


_QWEN_3 = Family(bias_flags=("attention_bias",), qk_norm=True, window=4096, window_flag=True)
_GEMMA_2 = Family(
    tied=True,
    bias_flags=("attention_bias",),
    own_head_dim=True,
    post_norms=True,
    offset_norms=True,
    scaled_embedding=True,
    score_key="query_pre_attn_scalar",
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    caps=(("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)),
    window=4096,
    slides=_slides_alternately,
    layer_types=True,
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(bias_flags=("attention_bias", "mlp_bias")),
        "smollm3": Family(
            tied=True,
            base=2_000_000.0,
            bias_flags=("attention_bias", "mlp_bias"),
            window_flag=True,
            slides=_slides_unrotated,
            layer_types=True,
            rotates=_rotates_most,
        ),
        "mistral": Family(window=4096, slides=_always),
        "mixtral": Family(
            eps=1e-5,
            base=1_000_000.0,
            slides=_always,
            experts=("num_local_experts", "num_experts", "intermediate_size"),
            whole_shares=True,
        ),
        "qwen2": Family(qkv_bias=True, window=4096, window_flag=True, slides=_slides_above, layer_types=True),
        "qwen3": replace(_QWEN_3, own_head_dim=True, slides=_slides_above, layer_types=True),
        "qwen3_moe": replace(
            _QWEN_3, slides=_always, experts=("num_experts", "num_local_experts", "moe_intermediate_size")
        ),
        "gemma2": _GEMMA_2,
        "gemma3_text": replace(
            _GEMMA_2,
            base=1_000_000.0,
            local_base=10_000.0,
            qk_norm=True,
            caps=(("final_logit_softcapping", None),),
            slides=_slides_mostly,
        ),
    }
)
"""By `model_type`: Llama 2 and 3 and SmolLM2, SmolLM3, Mistral, Mixtral, Qwen 2 and 2.5, Qwen 3, Gemma 2 and 3."""


def layer_windows(read: ConfigReader, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Positions that each layer's queries see, themselves included; None is all. Empty where no layer has a window."""
    window = _window(read, family)
    slides = _sliding_layers(read, num_layers) if family.layer_types else None
    if slides is None:
        slides = [window is not None and family.slides(read, layer) for layer in range(num_layers)]
    if window is None and any(slides):
        raise read.error("its layer_types have windows but no sliding_window is in force", "say how wide they are")
    return tuple(window if slide else None for slide in slides) if any(slides) else ()


def _window(read: ConfigReader, family: Family) -> int | None:
    """Here an absent key and `null` differ: `null` is no window."""
    if family.window_flag and not read.flag("use_sliding_window"):
        return None
    value = read.config.get("sliding_window", family.window)
    return None if value is None else read.count("sliding_window", family.window)


def _sliding_layers(read: ConfigReader, num_layers: int) -> list[bool] | None:
    kinds = read.listed("layer_types", str)
    if kinds is None:
        return None
    if odd := [kind for kind in kinds if kind not in (SLIDING, FULL)]:
        asked, fact = f"read the shape of a {read.family} model", f"it has layers of the type {odd[0]!r}"
        raise UnsupportedModel(asked, fact, f"use a model whose layers are {SLIDING} or {FULL}")
    if len(kinds) != num_layers:
        raise read.error(f"its {num_layers} layers have {len(kinds)} layer_types", "give each layer one")
    return [kind == SLIDING for kind in kinds]
