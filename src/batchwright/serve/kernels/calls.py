"""The kernels as functions over tensors: shapes and strides are read off, threads are torch's.

Tensors are on the CPU and contiguous, but for x_MK, whose rows may be apart. The kernels see pointers only, so what
could make them read or write elsewhere is asserted here. They allocate little; that failing ends the process.
"""

from collections.abc import Mapping, Sequence
from ctypes import CDLL, c_float, c_int, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchwright.serve.decoders.linear import GROUP
from batchwright.serve.kernels.build import built

PANEL = 32
"""Outputs that are packed together."""

WIDTH: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 1, torch.bfloat16: 2, torch.int8: 4})
"""Values that one lane of a vector takes at once: the number of inputs, or of positions in a page, is a multiple."""

_POINTER, _LONG, _INT = c_void_p, c_int64, c_int
_MATRIX = (_POINTER, _LONG, _LONG, _LONG)
_OUT = (_POINTER, _LONG, _LONG, _INT, _POINTER, _LONG)
_NORM = (_POINTER, _POINTER, _POINTER, _LONG, _LONG, c_float, _INT)
_NORM_HEADS = (_POINTER, _POINTER, _POINTER, _LONG, _INT, _INT, _INT, c_float, _INT)
_SIGNATURES: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        "pack": (_POINTER, _LONG, _LONG, _POINTER, _INT),
        "norm": _NORM,
        "norm_wide": _NORM,
        "norm_heads": _NORM_HEADS,
        "norm_heads_wide": _NORM_HEADS,
        "matmul": (*_MATRIX, _POINTER, _POINTER, *_OUT, _INT),
        "matmul_int8": (*_MATRIX, _POINTER, _POINTER, _POINTER, _POINTER, *_OUT, _POINTER, _POINTER, _INT),
        "choose": (_POINTER, _LONG, _LONG, _POINTER, _POINTER, _INT),
        "draw": (_POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _INT),
        "weigh": (_POINTER, _LONG, _LONG, _POINTER, _POINTER, _INT),
        "mask": (_POINTER, _LONG, _LONG, _POINTER, _INT),
        "attend": (*(_POINTER,) * 5, _LONG, _POINTER, *(_INT,) * 4, c_float, c_float, _INT, _INT),
    }
)


class Mode(IntEnum):
    """What becomes of a product, as in matmul.cpp. The last two are of weights that hold gates and ups in turn."""

    STORE = 0
    ADD = 1
    STORE_FLOAT = 2
    SILU = 3
    GELU = 4


class Packed(NamedTuple):
    """A weight as the kernels take it. For int8 only: `scales`, one per output; `starts`, one per group and output."""

    data: Tensor
    num_inputs: int
    num_outputs: int
    bias: Tensor | None
    scales: Tensor | None = None
    starts: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self if isinstance(part, Tensor))


class Step(NamedTuple):
    """Where a step's rows are: see attention.cpp. Both are int32."""

    rows_B4: Tensor
    tables: Tensor


class Rule(NamedTuple):
    """What a layer does: see `LayerAttention`. `cap` and `window` are 0 for none; `turns_CD` is by position."""

    num_heads: int
    scale: float
    cap: float
    window: int
    turns_CD: Tensor | None


def pack(weight_NK: Tensor, bias_N: Tensor | None, scales_N: Tensor | None = None) -> Packed:
    """`scales_N`: what a step of an int8 weight stands for."""
    num_outputs, num_inputs = weight_NK.shape
    assert num_inputs % WIDTH[weight_NK.dtype] == 0
    weight_NK = weight_NK.contiguous()
    data = weight_NK.new_empty(-(-num_outputs // PANEL) * PANEL, num_inputs)
    threads = torch.get_num_threads()
    _call("pack", weight_NK.dtype)(weight_NK.data_ptr(), num_outputs, num_inputs, data.data_ptr(), threads)
    if scales_N is None:
        return Packed(data, num_inputs, num_outputs, bias_N)
    groups = [part.sum(1, dtype=torch.int32) for part in weight_NK.split(GROUP, 1)]
    return Packed(data, num_inputs, num_outputs, bias_N, _filled(scales_N), -128 * _filled(torch.stack(groups)))


def matmul(
    x_MK: Tensor, weight: Packed, mode: Mode, y_MN: Tensor | None = None, added_MA: Tensor | None = None
) -> Tensor:
    """x_MK @ weight.T, or activation(gate) * up of half as many outputs; into `y_MN` if it is given.

    `added_MA`: what is added to all gates and then to all ups, before the activation.
    """
    num_rows, dtype = len(x_MK), torch.float32 if mode is Mode.STORE_FLOAT else x_MK.dtype
    if y_MN is None:
        y_MN = x_MK.new_empty(num_rows, weight.num_outputs, dtype=dtype)
    assert x_MK.shape[1] == weight.num_inputs and x_MK.stride(1) == 1
    assert y_MN.shape == (num_rows, weight.num_outputs) and y_MN.stride(1) == 1 and y_MN.dtype == dtype
    added: tuple[int | None, int] = (None, 0)
    if added_MA is not None:
        assert mode in (Mode.SILU, Mode.GELU) and added_MA.shape == (num_rows, 2 * weight.num_outputs)
        assert added_MA.stride(1) == 1 and added_MA.dtype == x_MK.dtype
        added = added_MA.data_ptr(), added_MA.stride(0)
    threads = torch.get_num_threads()
    left = x_MK.data_ptr(), x_MK.stride(0), num_rows, weight.num_inputs, weight.data.data_ptr()
    bias = None if weight.bias is None else weight.bias.data_ptr()
    right = y_MN.data_ptr(), y_MN.stride(0), weight.num_outputs, mode, *added
    if weight.scales is None or weight.starts is None:
        _call("matmul", x_MK.dtype)(*left, bias, *right, threads)
        return y_MN
    workspace = x_MK.new_empty(num_rows, weight.num_inputs, dtype=torch.uint8)
    input_scales = x_MK.new_empty(num_rows, -(-weight.num_inputs // GROUP), dtype=torch.float32)
    _call("matmul_int8", x_MK.dtype)(
        *left, weight.scales.data_ptr(), weight.starts.data_ptr(), bias,
        *right, workspace.data_ptr(), input_scales.data_ptr(), threads,
    )  # fmt: skip
    return y_MN


def norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """The root-mean-square norm of each row."""
    assert x_TE.is_contiguous() and weight_E.is_contiguous() and weight_E.shape == x_TE.shape[1:]
    y_TE = torch.empty_like(x_TE)
    _norm_call("norm", x_TE.dtype, weight_E.dtype)(
        x_TE.data_ptr(), weight_E.data_ptr(), y_TE.data_ptr(), *x_TE.shape, eps, torch.get_num_threads()
    )
    return y_TE


def norm_heads(
    qkv_TF: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, num_heads: int, num_kv_heads: int, eps: float
) -> None:
    """`norm` of each query head and each key head, in place."""
    head_dim = len(q_weight_D)
    assert qkv_TF.is_contiguous() and qkv_TF.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim
    assert q_weight_D.is_contiguous() and k_weight_D.is_contiguous() and k_weight_D.shape == q_weight_D.shape
    assert k_weight_D.dtype == q_weight_D.dtype
    _norm_call("norm_heads", qkv_TF.dtype, q_weight_D.dtype)(
        qkv_TF.data_ptr(), q_weight_D.data_ptr(), k_weight_D.data_ptr(), len(qkv_TF),
        num_heads, num_kv_heads, head_dim, eps, torch.get_num_threads(),
    )  # fmt: skip


def attend(qkv_TF: Tensor, step: Step, rule: Rule, pages_PMSD: Tensor) -> Tensor:
    """Rotates the queries and keys of `qkv_TF` in place, stores keys and values in the pages; o_TE of all queries."""
    _, double_heads, page_size, head_dim = pages_PMSD.shape
    num_heads, scale, cap, window, turns_CD = rule
    assert qkv_TF.is_contiguous() and qkv_TF.shape[1] == (num_heads + double_heads) * head_dim
    assert pages_PMSD.is_contiguous() and pages_PMSD.dtype == qkv_TF.dtype and page_size % WIDTH[qkv_TF.dtype] == 0
    assert turns_CD is None or turns_CD.shape[1] == head_dim
    o_TE = qkv_TF.new_empty(len(qkv_TF), num_heads * head_dim)
    _call("attend", qkv_TF.dtype)(
        qkv_TF.data_ptr(), None if turns_CD is None else turns_CD.data_ptr(), pages_PMSD.data_ptr(), o_TE.data_ptr(),
        step.rows_B4.data_ptr(), len(step.rows_B4), step.tables.data_ptr(),
        num_heads, double_heads // 2, head_dim, page_size, scale, cap, window, torch.get_num_threads(),
    )  # fmt: skip
    return o_TE


def likeliest(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """peak_B and the first token_B that has it; NaN counts as highest."""
    num_rows, width = logits_BV.shape
    assert logits_BV.is_contiguous() and logits_BV.dtype == torch.float32
    peak_B, token_B = logits_BV.new_empty(num_rows), logits_BV.new_empty(num_rows, dtype=torch.int64)
    _call("choose", torch.float32)(
        logits_BV.data_ptr(), num_rows, width, peak_B.data_ptr(), token_B.data_ptr(), torch.get_num_threads()
    )
    return peak_B, token_B


def draw(
    logits_BV: Tensor, peak_B: Tensor, row_R: Tensor, settings_R5: Tensor, uniform_R: Tensor, token_B: Tensor
) -> None:
    """Put drawn tokens into `token_B`, where rows are drawn; these are indices of finite peaks, no two alike.

    Settings are one over the temperature and the limits, as `filters` has them; typical sampling comes alone.
    """
    num_rows, width = logits_BV.shape
    assert logits_BV.is_contiguous() and logits_BV.dtype == torch.float32 and settings_R5.shape == (len(row_R), 5)
    assert peak_B.shape == token_B.shape == (num_rows,) and peak_B.dtype == torch.float32
    assert row_R.dtype == token_B.dtype == torch.int64 and uniform_R.dtype == settings_R5.dtype == torch.float64
    assert peak_B.is_contiguous() and token_B.is_contiguous() and settings_R5.is_contiguous()
    _call("draw", torch.float32)(
        logits_BV.data_ptr(), width, peak_B.data_ptr(), row_R.data_ptr(), len(row_R),
        settings_R5.data_ptr(), uniform_R.data_ptr(), token_B.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip


def weigh(logits_BV: Tensor, peak_B: Tensor) -> Tensor:
    """weight_B of all tokens of a row: a whole number in float64, 2**34 for each token as likely as the peak."""
    num_rows, width = logits_BV.shape
    assert logits_BV.is_contiguous() and logits_BV.dtype == peak_B.dtype == torch.float32
    assert peak_B.is_contiguous() and peak_B.shape == (num_rows,)
    weight_B = logits_BV.new_empty(num_rows, dtype=torch.float64)
    _call("weigh", torch.float32)(
        logits_BV.data_ptr(), num_rows, width, peak_B.data_ptr(), weight_B.data_ptr(), torch.get_num_threads()
    )
    return weight_B


def rule_out_unset(logits_BV: Tensor, mask_BW: Tensor) -> None:
    """-inf for every token v whose bit v % 32 of word v // 32 is 0."""
    num_rows, width = logits_BV.shape
    assert logits_BV.is_contiguous() and logits_BV.dtype == torch.float32 and mask_BW.dtype == torch.int32
    assert mask_BW.is_contiguous() and mask_BW.shape == (num_rows, -(-width // 32))
    _call("mask", torch.float32)(logits_BV.data_ptr(), num_rows, width, mask_BW.data_ptr(), torch.get_num_threads())


def _filled(values_N: Tensor) -> Tensor:
    """To whole panels, with zeros."""
    return torch.nn.functional.pad(values_N, (0, -values_N.shape[-1] % PANEL))


def _norm_call(name: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> Any:
    """Weights are in the dtype of the rows, or wider: in float32."""
    assert weight_dtype in (dtype, torch.float32)
    return _call(name if weight_dtype == dtype else f"{name}_wide", dtype)


@cache
def _call(name: str, dtype: torch.dtype) -> Any:
    library = built().library
    assert isinstance(library, CDLL), "the caller has asked `built`"
    function = getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}")
    function.argtypes, function.restype = _SIGNATURES[name], None
    return function
