"""A linear layer whose weight is packed once, at load, into the layout the CPU's matrix kernel wants.

oneDNN otherwise reorders the weight on every call, which for the few rows of a decode step costs more than the product
itself: packed is two to three times faster at 2 to 32 rows, and no slower at 512 (docs/log.md). One packed copy serves
every number of rows: hints from 32 to 512 choose the same layout, and only a hint of 1 is slower. The plain weight is
not kept, so memory is not doubled. Where torch lacks the operators or the dtype, and on other devices, it is an
ordinary `F.linear`.

Shapes: M rows, K inputs, N outputs.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS_HINT = 32


class Linear:
    """y_MN = x_MK @ weight_NK.T + bias_N. `weight_NK` may be freed by the caller afterwards."""

    __slots__ = ("_bias", "_product", "_weight")

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        packed = weight_NK.device.type == "cpu" and can_pack(weight_NK.dtype)
        self._weight = _pack(weight_NK) if packed else weight_NK.contiguous()
        self._product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _packed_product if packed else F.linear
        self._bias = bias_N

    def __call__(self, x_MK: Tensor) -> Tensor:
        """M must be at least 1."""
        return self._product(x_MK, self._weight, self._bias)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch, on this CPU, packs and multiplies weights of `dtype`: tried once, on a tiny one."""
    try:
        product_MN = _packed_product(torch.ones(3, 32, dtype=dtype), _pack(torch.ones(16, 32, dtype=dtype)), None)
    except (RuntimeError, NotImplementedError):
        return False
    return bool((product_MN == 32).all())


def _pack(weight_NK: Tensor) -> Tensor:
    packed: Tensor = _REORDER(weight_NK, _ROWS_HINT)
    return packed


def _packed_product(x_MK: Tensor, weight: Tensor, bias_N: Tensor | None) -> Tensor:
    product_MN: Tensor = _POINTWISE(x_MK, weight, bias_N, "none", _NO_SCALARS, "")
    return product_MN


def _missing(*_: object) -> Tensor:
    raise NotImplementedError


_NO_SCALARS: list[None] = []
_REORDER = getattr(getattr(torch.ops.mkldnn, "_reorder_linear_weight", None), "default", _missing)
_POINTWISE = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", _missing)
