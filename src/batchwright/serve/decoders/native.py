"""Our own kernels as a decoder's operators: for CPUs on which they were measured to be faster than torch's.

What a row gets from them depends on that row alone, bit for bit: that is what batch-invariant decoding stands on. The
kernels are C++ (folder `kernels`), compiled on first use; without a compiler `ops.TorchOps` take their place.

A layer is seven calls: norm, queries-keys-values, attention (which rotates and stores too), output added to the
residual, norm, gated, down added to the residual.
"""

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from batchwright.facts.shape import ModelShape
from batchwright.serve.decoders.attention import LayerAttention, RowSpan
from batchwright.serve.decoders.linear import quantized
from batchwright.serve.decoders.ops import Activation, Gated, Layout, Linear
from batchwright.serve.decoders.rope import rotations
from batchwright.serve.kernels import calls
from batchwright.serve.kernels.build import built, cpu_features
from batchwright.serve.kernels.calls import WIDTH, Mode, Packed, Rule, Step
from batchwright.serve.kv import PagedKV

_LANES = 16
_GATED: Mapping[Activation, Mode] = MappingProxyType({"silu": Mode.SILU, "gelu_tanh": Mode.GELU})
_NEEDED = {torch.bfloat16: "avx512_bf16", torch.float32: "avx512f"}


def why_not(dtype: torch.dtype, device: torch.device, shape: ModelShape | None = None) -> str:
    """Why the kernels cannot run here, or cannot run this model; empty if they can."""
    if device.type != "cpu":
        return f"they run on a CPU, and the device is {device}"
    if dtype not in _NEEDED:
        return f"they compute in bfloat16 or float32, and the dtype is {dtype}"
    if shape is not None and shape.head_dim % _LANES:
        return f"they take heads of a multiple of {_LANES} values, and this model's have {shape.head_dim}"
    if shape is not None and (odd := [width for width in _input_widths(shape) if width % WIDTH[torch.int8]]):
        return f"they take layers of a multiple of {WIDTH[torch.int8]} values, and this model's have {odd[0]}"
    return built().why_not


def is_faster(dtype: torch.dtype) -> bool:
    """Whether this CPU is of a kind on which they were measured to win: docs/decisions/0006."""
    return _NEEDED[dtype] in cpu_features()


class NativeOps:
    """To be made only where `why_not` is empty. `quantization`: "int8" holds weights as int8."""

    name = "native"
    invariant = True
    takes_room = True
    page_multiple = 2

    def __init__(self, quantization: str | None = None) -> None:
        self._is_int8 = quantization == "int8"
        self._turns: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the frequencies, which are kept alive

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None = None, *, exact: bool = False) -> Linear:
        return NativeLinear(calls.pack(weight_NK, bias_N) if exact else self._packed(weight_NK, bias_N))

    def gated(
        self, weights_IK: Sequence[Tensor], biases_I: Sequence[Tensor] | None = None, activation: Activation = "silu"
    ) -> Gated:
        num_outputs = len(weights_IK[0])
        both = self._packed(_alternating(weights_IK), _alternating(biases_I) if biases_I else None)
        return NativeGated(both._replace(num_outputs=num_outputs), _GATED[activation])

    def norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        return calls.norm(x_TE, weight_E, eps)

    def norm_heads(
        self, qkv_TF: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, num_heads: int, num_kv_heads: int, eps: float
    ) -> None:
        calls.norm_heads(qkv_TF, q_weight_D, k_weight_D, num_heads, num_kv_heads, eps)

    def layout(self, rows: Sequence[RowSpan], kv: PagedKV, layers: Sequence[LayerAttention]) -> Layout:
        longest = max(row.context for row in rows)
        distinct = {id(does): does for does in layers}
        rules = {key: self._rule(does, longest) for key, does in distinct.items()}
        return NativeLayout(rows, kv, [rules[id(does)] for does in layers])

    def _rule(self, does: LayerAttention, longest: int) -> Rule:
        """A window that all of a step's contexts fit in is none."""
        window = 0 if does.window is None or does.window >= longest else does.window
        turns_CD = None if does.freq_C is None else self._turns_of(does.freq_C, longest)
        return Rule(does.num_heads, does.scale, does.cap or 0, window, turns_CD)

    def _turns_of(self, freq_C: Tensor, longest: int) -> Tensor:
        """Cosine and sine of each pair at the first positions, `longest` of them at least; kept beside `freq_C`."""
        kept = self._turns.get(id(freq_C))  # another thread may replace it, by a shorter one even
        if kept is None or longest > len(kept[1]):
            positions_C = torch.arange(1 << (longest - 1).bit_length(), device=freq_C.device)
            turns_CD = torch.view_as_real(rotations(positions_C, freq_C)).flatten(1).contiguous()
            kept = self._turns[id(freq_C)] = freq_C, turns_CD
        return kept[1]

    def _packed(self, weight_NK: Tensor, bias_N: Tensor | None) -> Packed:
        if not self._is_int8:
            return calls.pack(weight_NK, bias_N)
        steps_NK, scales_N = quantized(weight_NK)
        return calls.pack(steps_NK, bias_N, scales_N)


class NativeLinear:
    """A packed weight."""

    def __init__(self, weight: Packed) -> None:
        self._weight = weight

    def __call__(self, x_MK: Tensor) -> Tensor:
        return calls.matmul(x_MK, self._weight, Mode.STORE)

    def add_to(self, y_MN: Tensor, x_MK: Tensor) -> Tensor:
        return calls.matmul(x_MK, self._weight, Mode.ADD, y_MN)

    def floats(self, x_MK: Tensor, room_MN: Tensor | None = None) -> Tensor:
        return calls.matmul(x_MK, self._weight, Mode.STORE_FLOAT, room_MN)

    @property
    def num_bytes(self) -> int:
        return self._weight.num_bytes


class NativeGated:
    """Gate and up, packed in turn."""

    def __init__(self, weight: Packed, mode: Mode) -> None:
        self._weight, self._mode = weight, mode

    def __call__(self, x_MK: Tensor, added_MA: Tensor | None = None) -> Tensor:
        return calls.matmul(x_MK, self._weight, self._mode, added_MA=added_MA)

    @property
    def num_bytes(self) -> int:
        return self._weight.num_bytes


class NativeLayout:
    """A step's rows as the attention kernel takes them. Positions beyond a row's pages are in the scratch page."""

    def __init__(self, rows: Sequence[RowSpan], kv: PagedKV, rules: Sequence[Rule]) -> None:
        self._kv, self._rules = kv, rules
        fields, tables = array("i"), array("i")
        first = 0
        for row in rows:
            fields.extend((first, row.num_positions, row.start, len(tables)))
            num_pages = -(-row.context // kv.page_size)
            tables.extend(row.table[:num_pages])
            tables.extend([kv.scratch] * (num_pages - len(row.table)))
            first += row.num_positions
        self._step = Step(
            torch.frombuffer(fields, dtype=torch.int32).view(-1, 4),
            torch.frombuffer(tables, dtype=torch.int32),
        )

    def attend(self, layer: int, qkv_TF: Tensor) -> Tensor:
        return calls.attend(qkv_TF, self._step, self._rules[layer], self._kv.pages_LPMSD[layer])


def _input_widths(shape: ModelShape) -> set[int]:
    """What products take, but for attention's output, which is whole heads."""
    experts = [shape.has_experts(layer) for layer in range(shape.num_layers)]
    return {shape.hidden, *(shape.moe_intermediate if sparse else shape.intermediate for sparse in experts)}


def _alternating(pair: Sequence[Tensor]) -> Tensor:
    """16 rows of the first, 16 of the second, and so on; both filled up with zeros."""
    filled = [torch.cat([part, part.new_zeros(-len(part) % _LANES, *part.shape[1:])]) for part in pair]
    blocks = [part.unflatten(0, (-1, _LANES)) for part in filled]
    return torch.stack(blocks, 1).flatten(0, 2)
