"""The operators that a decoder is made of: what they are (`Ops`), and torch's (`TorchOps`).

`native.NativeOps` are our own kernels for a CPU, and these are their twin: they run everywhere, and the tests hold
one against the other.

Shapes: M or T rows, K inputs, N outputs, E hidden, I gated outputs, A = 2I gates and ups, F = (H + 2K) * D queries,
keys and values.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from batchwright.serve.decoders.attention import LayerAttention, RowSpan, StepLayout
from batchwright.serve.decoders.linear import Int8Linear, TorchLinear
from batchwright.serve.kv import PagedKV

Activation = Literal["silu", "gelu_tanh"]
"""What a gate goes through. "gelu_tanh" is GELU by the formula with tanh."""


class Linear(Protocol):
    """y_MN = x_MK @ weight_NK.T + bias_N, M at least 1."""

    def __call__(self, x_MK: Tensor) -> Tensor: ...

    def add_to(self, y_MN: Tensor, x_MK: Tensor) -> Tensor:
        """`y_MN` with the product added in place."""
        ...

    def floats(self, x_MK: Tensor, room_MN: Tensor | None = None) -> Tensor:
        """The product in float32, in `room_MN` if its `Ops` takes room."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of the weight, as it is held."""
        ...


class Gated(Protocol):
    """activation(x_MK @ gate_IK.T) * (x_MK @ up_IK.T), as y_MI."""

    def __call__(self, x_MK: Tensor, added_MA: Tensor | None = None) -> Tensor:
        """`added_MA`: what is added to all gates and then to all ups, before the activation; zeros change no bit."""
        ...

    @property
    def num_bytes(self) -> int: ...


class Layout(Protocol):
    """Where the positions of one step are, are stored and look."""

    def attend(self, layer: int, qkv_TF: Tensor) -> Tensor:
        """Rotates and stores, then o_TE'. Queries, keys and values side by side; `qkv_TF` may be changed."""
        ...


class Ops(Protocol):
    """Makes operators. `name`: for reports. `invariant`: what a row gets depends, bit for bit, on itself alone.

    `takes_room`: its `Linear.floats` write where they are told to. `page_multiple`: what a page's tokens come in.
    """

    @property
    def name(self) -> str: ...

    @property
    def invariant(self) -> bool: ...

    @property
    def takes_room(self) -> bool: ...

    @property
    def page_multiple(self) -> int: ...

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None = None, *, exact: bool = False) -> Linear:
        """The weight may be freed by the caller afterwards. `exact`: it is held in its dtype, whatever others are."""
        ...

    def gated(
        self, weights_IK: Sequence[Tensor], biases_I: Sequence[Tensor] | None = None, activation: Activation = "silu"
    ) -> Gated:
        """`weights_IK`: gate, then up."""
        ...

    def norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """The root-mean-square norm of each row.

        `weight_E` may be float32 where `x_TE` is narrower: the product is then made in float32 and rounded once.
        """
        ...

    def norm_heads(
        self, qkv_TF: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, num_heads: int, num_kv_heads: int, eps: float
    ) -> None:
        """`norm` of each query head and each key head, in place."""
        ...

    def layout(self, rows: Sequence[RowSpan], kv: PagedKV, layers: Sequence[LayerAttention]) -> Layout:
        """`rows` are in the order of the step's positions, decodes first (`attention.layout_order`)."""
        ...


class TorchOps:
    """Runs on any device. `quantization`: "int8" holds weights as int8, on a CPU."""

    name = "torch"
    invariant = False
    takes_room = False
    page_multiple = 1

    def __init__(self, quantization: str | None = None) -> None:
        self._linear = Int8Linear if quantization == "int8" else TorchLinear

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None = None, *, exact: bool = False) -> Linear:
        return (TorchLinear if exact else self._linear)(weight_NK, bias_N)

    def gated(
        self, weights_IK: Sequence[Tensor], biases_I: Sequence[Tensor] | None = None, activation: Activation = "silu"
    ) -> Gated:
        both = self.linear(torch.cat(list(weights_IK)), torch.cat(list(biases_I)) if biases_I else None)
        return TorchGated(both, activation)

    def norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x_TE.to(weight_E.dtype), weight_E.shape, weight_E, eps).to(x_TE.dtype)

    def norm_heads(
        self, qkv_TF: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, num_heads: int, num_kv_heads: int, eps: float
    ) -> None:
        parts = qkv_TF.unflatten(1, (num_heads + 2 * num_kv_heads, -1)).split(
            (num_heads, num_kv_heads, num_kv_heads), 1
        )
        for x_TGD, weight_D in zip(parts, (q_weight_D, k_weight_D), strict=False):
            x_TGD.copy_(self.norm(x_TGD, weight_D, eps))

    def layout(self, rows: Sequence[RowSpan], kv: PagedKV, layers: Sequence[LayerAttention]) -> Layout:
        return StepLayout(rows, kv, layers)


class TorchGated:
    """Gate and up as one product."""

    def __init__(self, both: Linear, activation: Activation) -> None:
        self._both, self._activation = both, activation

    def __call__(self, x_MK: Tensor, added_MA: Tensor | None = None) -> Tensor:
        both_MA = self._both(x_MK)
        gate_MI, up_MI = (both_MA if added_MA is None else both_MA.add_(added_MA)).chunk(2, 1)
        if self._activation == "silu":
            return F.silu(gate_MI).mul_(up_MI)
        return F.gelu(gate_MI, approximate="tanh").mul_(up_MI)

    @property
    def num_bytes(self) -> int:
        return self._both.num_bytes
