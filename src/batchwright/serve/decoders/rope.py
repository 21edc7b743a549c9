"""Rotary position embedding: the frequencies a config asks for, and the rotation of queries and keys.

Pairs of a head's values are rotated as complex numbers, in float32, by angle position * frequency (Su et al. 2021,
RoFormer, eq. 34; scalings as in transformers' `modeling_rope_utils.py`). A Hugging Face checkpoint pairs value i with
value i + D/2; `interleave` reorders the rows of the query and key projections once, at load, so that a pair is
adjacent and the rotation is one complex product instead of a gather, two products and a sum. Both sides of every q.k
get the same order, so scores do not change; whoever reads the keys sees them in pair order.

Frequencies never depend on how long a request has become, so that pages can be shared and kept.

Shapes: T tokens, C = D/2 complex values per head, G heads (queries and keys together), N rows, K inputs.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchwright.errors import BrokenWeights, UnsupportedModel
from batchwright.facts.families import FULL, SLIDING
from batchwright.serve.loading.checkpoint import positive, section


class Rotation(NamedTuple):
    """`freq_C`: float32, radians per position. `magnitude`: what rotated queries, and keys, are multiplied by."""

    freq_C: Tensor
    magnitude: float = 1.0


class _Asked(NamedTuple):
    """What a config asks for. `settings` are those of its rotations."""

    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    base: float

    def number(self, key: str) -> float:
        if self.settings.get(key) is None:
            fact = f"its rope settings {dict(self.settings)} lack {key}"
            raise UnsupportedModel("building rotary positions", fact, "complete the config's rope settings")
        return positive(key, self.settings[key])

    def optional(self, key: str, default: float) -> float:
        """Zero counts as absent."""
        return positive(key, self.settings.get(key) or default)

    @property
    def original_context(self) -> float:
        """Positions the model was first trained on; if nothing is said of them, those it has now."""
        key = "original_max_position_embeddings"
        now = self.config.get("max_position_embeddings")
        values = (self.config.get(key), self.settings.get(key), now)
        return positive(key, next((value for value in values if value is not None), None))


def rotation(
    config: Mapping[str, Any], head_dim: int, default_base: float = 10_000.0, layer_type: str | None = None
) -> Rotation:
    """Reads `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

    `layer_type`: of the layers it is for, in families whose layers with and without windows rotate differently.
    "dynamic" scales beyond `max_position_embeddings` only, by the length a request has come to; contexts here end
    there, so it is exact and plain. Raises UnsupportedModel for another kind than `_SCALED` knows, BrokenWeights for
    values that are no numbers or give none.
    """
    settings = _settings(config, layer_type)
    kind = settings.get("rope_type", settings.get("type", "default"))
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    scaled = _SCALED.get(kind) if isinstance(kind, str) else None
    if scaled is None or partial not in (None, 1):
        known = ", ".join(_SCALED)
        fact = f"its config asks for {dict(settings)}; supported are the types {known}, over whole heads"
        raise UnsupportedModel("building rotary positions", fact, "use a model with one of these")
    key = "rope_local_base_freq" if layer_type == SLIDING else "rope_theta"
    bases = (settings.get("rope_theta"), config.get(key), default_base)
    base = positive(key, next(base for base in bases if base is not None))
    freq_C = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return _finite(scaled(freq_C, _Asked(config, settings, base)), settings)


def frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """freq_C of a model whose layers all rotate alike."""
    return rotation(config, head_dim).freq_C


def _settings(config: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    """Where layers differ, what is older than transformers 5 scales those without a window only."""
    scaling, parameters = section(config, "rope_scaling"), section(config, "rope_parameters")
    whole = scaling or parameters if layer_type is None else parameters
    if whole and (layer_type is None) == bool({FULL, SLIDING} & set(whole)):
        fact = f"its rope settings are {dict(whole)}, in a form that its family does not read"
        raise UnsupportedModel("building rotary positions", fact, "correct the config's rope settings")
    if layer_type is None:
        return dict(whole)
    return {**section(parameters, layer_type), **(scaling if layer_type == FULL else {})}


def _finite(found: Rotation, settings: Mapping[str, Any]) -> Rotation:
    """An infinite frequency makes every rotation NaN, and so every answer."""
    if not found.freq_C.isfinite().all():
        fact = f"its rope settings {dict(settings)} give infinite frequencies, or none"
        raise BrokenWeights("building rotary positions", fact, "correct the config's rope settings")
    return found


def _plain(freq_C: Tensor, asked: _Asked) -> Rotation:
    return Rotation(freq_C)


def _linear(freq_C: Tensor, asked: _Asked) -> Rotation:
    return Rotation(freq_C / asked.number("factor"))


def _llama3(freq_C: Tensor, asked: _Asked) -> Rotation:
    """Divides slow frequencies by `factor`.

    A frequency that turns fewer than `low_freq_factor` times within the original context is divided, one that turns
    more than `high_freq_factor` times is kept; between them the two are mixed, linearly in the number of turns.
    """
    factor, low, high = (asked.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns_C = asked.original_context * freq_C / (2 * math.pi)
    kept_C = ((turns_C - low) / (high - low)).clamp(0, 1)
    return Rotation((1 - kept_C) * freq_C / factor + kept_C * freq_C)


def _yarn(freq_C: Tensor, asked: _Asked) -> Rotation:
    """Divides slow frequencies by `factor`, and multiplies what is rotated (Peng et al. 2023, YaRN, sections 3.2, 3.4).

    Between the pairs that turn `beta_fast` and `beta_slow` times within the original context, frequencies kept and
    divided are mixed, linearly in the number of the pair.
    """
    factor = asked.number("factor")
    if asked.base <= 1:
        fact = f"its rope_theta is {asked.base}, with which no pair turns more slowly than another"
        raise BrokenWeights("building rotary positions", fact, "correct the config's rope settings")
    ends = [_pair_that_turns(asked.optional(*beta), len(freq_C), asked) for beta in _BETAS]
    if asked.settings.get("truncate", True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], 2 * len(freq_C) - 1)
    divided_C = ((torch.arange(len(freq_C)) - first) / ((last - first) or 0.001)).clamp(0, 1)
    return Rotation(freq_C / factor * divided_C + freq_C * (1 - divided_C), _yarn_magnitude(factor, asked))


_BETAS = (("beta_fast", 32.0), ("beta_slow", 1.0))


def _pair_that_turns(num_times: float, num_pairs: int, asked: _Asked) -> float:
    """The number of the pair, mostly between two whole ones."""
    return num_pairs * math.log(asked.original_context / (num_times * 2 * math.pi)) / math.log(asked.base)


def _yarn_magnitude(factor: float, asked: _Asked) -> float:
    """`attention_factor`, or 0.1 ln(factor) + 1, of which `mscale` and `mscale_all_dim` make a quotient."""

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    scales = [asked.settings.get(key) for key in ("mscale", "mscale_all_dim")]
    if asked.settings.get("attention_factor") is not None:
        return asked.number("attention_factor")
    if all(scales):
        return grown(asked.number("mscale")) / grown(asked.number("mscale_all_dim"))
    return grown(1)


_SCALED: Mapping[str, Callable[[Tensor, _Asked], Rotation]] = MappingProxyType(
    {"default": _plain, "linear": _linear, "dynamic": _plain, "llama3": _llama3, "yarn": _yarn}
)
"""What becomes of plain frequencies, by `rope_type`."""


def interleave(rows_NK: Tensor, head_dim: int) -> Tensor:
    """The rows of each head in pair order: 0, D/2, 1, D/2 + 1, ... A new tensor. Also for a bias, which has N only."""
    halves = rows_NK.view(-1, 2, head_dim // 2, *rows_NK.shape[1:])
    return halves.transpose(1, 2).reshape(rows_NK.shape)


def rotations(positions_T: Tensor, freq_C: Tensor) -> Tensor:
    """turn_T1C, complex64: the rotation of each pair at each position.

    The angle is rounded to float32, as in training; a more exact one would differ by up to 5e-4 rad at position 8,192.
    """
    angle_T1C = (positions_T[:, None] * freq_C)[:, None, :]
    return torch.complex(angle_T1C.cos(), angle_T1C.sin())


def rotate(x_TGD: Tensor, turn_T1C: Tensor) -> Tensor:
    """x_TGD rotated, in its dtype; float32 is rotated in place."""
    num_tokens, num_heads, head_dim = x_TGD.shape
    x_TGC = torch.view_as_complex(x_TGD.float().view(num_tokens, num_heads, head_dim // 2, 2))
    return torch.view_as_real(x_TGC.mul_(turn_T1C)).view(num_tokens, num_heads, head_dim).to(x_TGD.dtype)
