"""Rotary position embedding: the frequencies a config asks for, and the rotation of queries and keys.

Pairs of a head's values are rotated as complex numbers, in float32, by angle position * frequency (Su et al. 2021,
RoFormer, eq. 34; Llama-3 scaling as published with Llama 3.1). A Hugging Face checkpoint pairs value i with value
i + D/2; `interleave` reorders the rows of the query and key projections once, at load, so that a pair is adjacent and
the rotation is one complex product instead of a gather, two products and a sum. Both sides of every q.k get the same
order, so scores do not change; whoever reads the keys sees them in pair order.

Shapes: T tokens, C = D/2 complex values per head, G heads (queries and keys together), N rows, K inputs.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from batchwright.errors import BrokenWeights, UnsupportedModel
from batchwright.serve.checkpoint import positive, section

_KNOWN_TYPES = ("default", "llama3")


def frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """freq_C, float32, radians per position. Reads `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

    Raises UnsupportedModel for a scaling it does not know, BrokenWeights for values that are no numbers or give none.
    """
    settings = dict(section(config, "rope_parameters") or section(config, "rope_scaling"))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in _KNOWN_TYPES or settings.get("partial_rotary_factor", 1.0) != 1.0:
        fact = f"its config asks for {settings}; supported are the types {' and '.join(_KNOWN_TYPES)}, over whole heads"
        raise UnsupportedModel("building rotary positions", fact, "use a model with one of these")
    bases = (settings.get("rope_theta"), config.get("rope_theta"), 10_000.0)
    base = positive("rope_theta", next(base for base in bases if base is not None))
    freq_C = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return _finite(_scaled_llama3(freq_C, settings) if kind == "llama3" else freq_C, settings)


def _finite(freq_C: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """An infinite frequency makes every rotation NaN, and so every answer."""
    if not freq_C.isfinite().all():
        fact = f"its rope settings {settings} give infinite frequencies, or none"
        raise BrokenWeights("building rotary positions", fact, "correct the config's rope settings")
    return freq_C


def _scaled_llama3(freq_C: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Divides slow frequencies by `factor`.

    A frequency that turns fewer than `low_freq_factor` times within the original context is divided, one that turns
    more than `high_freq_factor` times is kept; between them the two are mixed, linearly in the number of turns.
    """
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [key for key in keys if settings.get(key) is None]:
        fact = f"its llama3 scaling lacks {', '.join(missing)}"
        raise UnsupportedModel("building rotary positions", fact, "complete the config's rope settings")
    factor, low, high, original = (positive(key, settings[key]) for key in keys)
    turns_C = original * freq_C / (2 * math.pi)
    kept_C = ((turns_C - low) / (high - low)).clamp(0, 1)
    return (1 - kept_C) * freq_C / factor + kept_C * freq_C


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
