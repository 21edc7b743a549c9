"""LoRA adapters beside one base model: every row of a step may have its own, and one step computes them all.

An adapter adds (x A^T) B^T to what some projections give (Hu et al. 2021, LoRA, section 4.1); its scale is folded into
B. A step's rows are sorted by adapter once; in each layer those that have one are taken out, added to, adapter by
adapter, and put back. Rows without one are not touched, and what a row gets depends on its own adapter alone, bit for
bit where the operators are invariant.
Costs 2 * r * (K + N) FLOPs per token of an adapter and adapted projection. A step without adapters costs nothing.

Shapes: T positions of the step, M of its rows in any number, K inputs and N outputs of a projection, R rank, A = 2I
gates and ups.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from batchwright.serve.decoders.ops import Gated, Linear, Ops

Place = Literal["qkv", "out", "gated", "down"]

PLACES: Mapping[Place, tuple[str, ...]] = MappingProxyType(
    {
        "qkv": ("q_proj", "k_proj", "v_proj"),
        "out": ("o_proj",),
        "gated": ("gate_proj", "up_proj"),
        "down": ("down_proj",),
    }
)
"""Where a layer multiplies, and the projections whose outputs lie side by side there."""

_RANK_MULTIPLE = 8
"""Ranks are filled up with zeros to a multiple: kernels, ours and a GPU's, take inputs by 16 bytes."""


class Factors(NamedTuple):
    """One projection's A and B. B has the scale in it, and its rows in the decoder's order."""

    a_RK: Tensor
    b_NR: Tensor


class LowRank:
    """What one adapter adds at one place of one layer. The A of its projections are one product."""

    __slots__ = ("_downs", "_ups", "_widths")

    def __init__(self, ops: Ops, widths: Sequence[int], factors: Sequence[Factors | None]) -> None:
        """Of each of the place's projections: its outputs, and what is added to them, if anything is."""
        filled = [pair and _filled(pair) for pair in factors]
        ends = accumulate(len(pair.a_RK) if pair else 0 for pair in filled)
        self._widths = list(widths)
        self._downs = ops.linear(torch.cat([pair.a_RK for pair in filled if pair]), exact=True)
        self._ups: list[tuple[int, slice, Linear]] = [
            (part, slice(end - len(pair.a_RK), end), ops.linear(pair.b_NR, exact=True))
            for part, (pair, end) in enumerate(zip(filled, ends, strict=True))
            if pair
        ]

    def add_to(self, y_MN: Tensor, x_MK: Tensor) -> None:
        """`y_MN`: the outputs of all the place's projections side by side. M is at least 1."""
        low_MR = self._downs(x_MK)
        parts = y_MN.split(self._widths, 1)
        for part, ranks, up in self._ups:
            up.add_to(parts[part], low_MR[:, ranks])

    @property
    def num_outputs(self) -> int:
        return sum(self._widths)

    @property
    def num_bytes(self) -> int:
        return self._downs.num_bytes + sum(up.num_bytes for _, _, up in self._ups)


def _filled(pair: Factors) -> Factors:
    missing = -len(pair.a_RK) % _RANK_MULTIPLE
    return Factors(F.pad(pair.a_RK, (0, 0, 0, missing)), F.pad(pair.b_NR, (0, missing)))


class Adapter:
    """`layers[i]`: what is added at the places of layer i. Equal only to itself."""

    def __init__(self, name: str, layers: Sequence[Mapping[Place, LowRank]]) -> None:
        self.name = name
        self._layers = tuple(layers)

    def at(self, layer: int, place: Place) -> LowRank | None:
        return self._layers[layer].get(place)

    @property
    def num_bytes(self) -> int:
        """Of its weights, as they are held."""
        return sum(low.num_bytes for places in self._layers for low in places.values())


class RowAdapters:
    """Which rows have which adapter; made once per step. Rows of one adapter that lie side by side are not copied."""

    def __init__(self, adapters_M: Sequence[Adapter | None], device: torch.device) -> None:
        rows_of: dict[Adapter, list[int]] = {}
        for row, adapter in enumerate(adapters_M):
            if adapter is not None:
                rows_of.setdefault(adapter, []).append(row)
        rows = [row for group in rows_of.values() for row in group]
        ends = list(accumulate(map(len, rows_of.values())))
        self._spans = [
            (adapter, slice(end - len(rows_of[adapter]), end)) for adapter, end in zip(rows_of, ends, strict=True)
        ]
        self._run = slice(rows[0], rows[0] + len(rows)) if rows else slice(0)
        is_run = rows == list(range(len(adapters_M)))[self._run]
        self._index = None if is_run else torch.tensor(rows, device=device)

    def add_to(self, y_MN: Tensor, x_MK: Tensor, layer: int, place: Place) -> Tensor:
        """`y_MN`, to which what the place's projections give for `x_MK` was added, now with the adapters' part."""
        found = [(low, span) for adapter, span in self._spans if (low := adapter.at(layer, place))]
        if not found:
            return y_MN
        y_part, x_part = self._taken(y_MN), self._taken(x_MK)
        for low, span in found:
            low.add_to(y_part[span], x_part[span])
        return y_MN if self._index is None else y_MN.index_copy_(0, self._index, y_part)

    def gated(self, gated: Gated, x_MK: Tensor, layer: int) -> Tensor:
        """y_MI of the layer's gate and up."""
        lows = (low for adapter, _ in self._spans if (low := adapter.at(layer, "gated")))
        first = next(lows, None)
        if first is None:
            return gated(x_MK)
        added_MA = x_MK.new_zeros(len(x_MK), first.num_outputs)
        return gated(x_MK, self.add_to(added_MA, x_MK, layer, "gated"))

    def _taken(self, x_MN: Tensor) -> Tensor:
        return x_MN[self._run] if self._index is None else x_MN.index_select(0, self._index)


class StepAdapters(NamedTuple):
    """Of all positions of a step, and of those that come out of its last layer."""

    all: RowAdapters
    wanted: RowAdapters

    @classmethod
    def of(
        cls, adapters_T: Sequence[Adapter | None], wanted: Sequence[int], device: torch.device
    ) -> "StepAdapters | None":
        """`wanted`: the positions `rows_R` of `Decoder.hidden`. None where the step is the base model's alone."""
        if not any(adapters_T):
            return None
        return cls(RowAdapters(adapters_T, device), RowAdapters([adapters_T[row] for row in wanted], device))
