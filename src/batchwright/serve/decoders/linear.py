"""Linear layers on torch's operators: in the model's dtype, or with int8 weights.

`TorchLinear` packs its weight once, at load, into the layout the CPU's matrix kernel wants.

oneDNN otherwise reorders the weight on every call, which for the few rows of a decode step costs more than the product
itself (docs/log.md). One packed copy serves every number of rows: hints from 32 to 512 choose the same layout. The
plain weight is not kept. In float32 the inputs are taken in slices, each added to the sum of those before: oneDNN
adds all products of a row in one chain, whose rounding is twice as far off as with blocks of 192, which is what MKL
adds up. Where torch lacks the operators or the dtype, and on other devices, it is an ordinary `F.linear`.

`Int8Linear` holds whole numbers from -127 to 127, with one scale per output, and rounds its inputs to as many steps
(dynamic activations), with one scale for each 64 of a row: one for a whole row would let its few large values, which
decoders have, leave nothing of the others (docs/log.md has the figures). The products of a group add up exactly.

Shapes: M rows, K inputs, N outputs.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 64
"""Inputs that share a scale in an int8 product."""

_ROWS_HINT = 32
_ROWS_QUANTIZED_AT_ONCE = 2048
_EXACT_INPUTS = 192


class TorchLinear:
    """y_MN = x_MK @ weight_NK.T + bias_N. `weight_NK` may be freed by the caller afterwards."""

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self._bias = bias_N
        self._packed: list[Tensor] = []
        self._weight: Tensor | None = None
        if weight_NK.device.type == "cpu" and can_pack(weight_NK.dtype):
            self._packed = _pack(weight_NK)
        else:
            self._weight = weight_NK.contiguous()

    def __call__(self, x_MK: Tensor) -> Tensor:
        """M must be at least 1."""
        if self._weight is not None:
            return F.linear(x_MK, self._weight, self._bias)
        return _packed_product(x_MK, self._packed, self._bias)

    def add_to(self, y_MN: Tensor, x_MK: Tensor) -> Tensor:
        return y_MN.add_(self(x_MK))

    def floats(self, x_MK: Tensor, room_MN: Tensor | None = None) -> Tensor:
        return self(x_MK).float()

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._packed) if self._weight is None else self._weight.nbytes


class Int8Linear:
    """The twin of the int8 kernel: the same integers, by torch's integer product."""

    __slots__ = ("_bias", "_dtype", "_parts", "_scales_N")

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self._bias, self._dtype = bias_N, weight_NK.dtype
        steps_NK, self._scales_N = quantized(weight_NK)
        self._parts = [part.contiguous().t() for part in steps_NK.split(GROUP, 1)]

    def __call__(self, x_MK: Tensor) -> Tensor:
        return self.floats(x_MK).to(self._dtype)

    def add_to(self, y_MN: Tensor, x_MK: Tensor) -> Tensor:
        return y_MN.copy_(y_MN.float() + self.floats(x_MK))

    def floats(self, x_MK: Tensor, room_MN: Tensor | None = None) -> Tensor:
        y_MN = self._scales_N.new_zeros(len(x_MK), len(self._scales_N))
        for part_MG, weight_GN in zip(x_MK.split(GROUP, 1), self._parts, strict=True):
            steps_MG, scales_M = quantized(part_MG)
            y_MN += _INT_PRODUCT(steps_MG, weight_GN) * scales_M[:, None]
        y_MN *= self._scales_N
        return y_MN if self._bias is None else y_MN + self._bias

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self._scales_N, *self._parts))


def quantized(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """int8 steps of each row, the largest at 127, and scales_N: what a step stands for, in float32.

    A row that holds an infinity or a NaN has the scale NaN. By portions of rows, because float32 is large.
    """
    portions = [_quantized(part) for part in x_NK.split(_ROWS_QUANTIZED_AT_ONCE)]
    return torch.cat([steps for steps, _ in portions]), torch.cat([scales for _, scales in portions])


def _quantized(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    x_NK = x_NK.float()
    largest_N = x_NK.abs().amax(1)
    whole_N = largest_N.isfinite()
    steps_N = torch.where(whole_N & (largest_N > 0), 127 / largest_N, 0)
    steps_NK = torch.where(whole_N[:, None], x_NK, 0) * steps_N[:, None]
    return steps_NK.round_().to(torch.int8), torch.where(whole_N, largest_N / 127, torch.nan)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch, on this CPU, packs and multiplies weights of `dtype`: tried once, on a tiny one."""
    if _REORDER is None or _POINTWISE is None:
        return False
    num_inputs = 2 * _EXACT_INPUTS
    try:
        packed = _pack(torch.ones(16, num_inputs, dtype=dtype))
        product_MN = _packed_product(torch.ones(3, num_inputs, dtype=dtype), packed, None)
    except (RuntimeError, NotImplementedError):
        return False
    return bool((product_MN == num_inputs).all())


def _pack(weight_NK: Tensor) -> list[Tensor]:
    """Packed slices of the inputs; one slice unless the dtype is float32."""
    width = _EXACT_INPUTS if weight_NK.dtype == torch.float32 else weight_NK.shape[1]
    return [_REORDER(part.contiguous(), _ROWS_HINT) for part in weight_NK.split(width, 1)]


def _packed_product(x_MK: Tensor, packed: list[Tensor], bias_N: Tensor | None) -> Tensor:
    if len(packed) == 1:
        product_MN: Tensor = _POINTWISE.default(x_MK, packed[0], bias_N, "none", _NO_SCALARS, "")
        return product_MN
    parts = x_MK.split(_EXACT_INPUTS, 1)
    y_MN: Tensor = _POINTWISE.default(parts[0].contiguous(), packed[0], bias_N, "none", _NO_SCALARS, "")
    for x_part, weight in zip(parts[1:], packed[1:], strict=True):
        y_MN = _POINTWISE.binary(x_part.contiguous(), y_MN, weight, None, "add")
    return y_MN


_NO_SCALARS: list[None] = []
_REORDER: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_INT_PRODUCT: Any = torch._int_mm  # noqa: SLF001 - torch has no public name for it
_POINTWISE: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
