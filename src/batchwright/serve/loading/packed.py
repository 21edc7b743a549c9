"""Checkpoints whose weights are quantised: GPTQ, AWQ, compressed-tensors and fp8, dequantised at load.

A weight is scale * (stored - zero), made in float32 and rounded once; blocks of inputs, and of outputs, share a scale
and a zero. Nothing else of a method is taken over: what it would round while it runs, such as activations, is not
rounded. So a model takes the memory that its dtype says.
Layouts: AutoGPTQ's and AutoAWQ's linear layers, compressed-tensors' `pack_to_int32` (whose values are shifted to begin
at zero), and transformers' `finegrained_fp8`.

Shapes: N outputs, K inputs, A and B blocks of them, R rows of P packed words.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchwright.errors import BrokenWeights, UnsupportedModel
from batchwright.serve.decoders.experts import Source
from batchwright.serve.loading.checkpoint import SafetensorsSource, section

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word each of eight neighbours lies


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the dequantised model. Raises UnsupportedModel for a method that is not read, by its name."""
    settings = section(config, "quantization_config")
    if settings:
        _method_of(settings)
    return {key: value for key, value in config.items() if key != "quantization_config"}


def dequantised(source: SafetensorsSource, config: Mapping[str, Any]) -> Source:
    """`source` with the weights that its quantised tensors stand for, or itself where `config` names no method."""
    settings = section(config, "quantization_config")
    return _PackedSource(source, settings) if settings else source


class _PackedSource:
    """`shapes` are those of the weights."""

    in_pair_order = False

    def __init__(self, source: SafetensorsSource, settings: Mapping[str, Any]) -> None:
        self._source, self._method = source, _method_of(settings)
        ends = tuple(f".{name}" for name in self._method.signs)
        prefixes = {name.rpartition(".")[0] for name in source.shapes if name.endswith(ends)}
        self._parts = {f"{prefix}.weight": _Parts(source, f"{prefix}.", settings) for prefix in prefixes}
        self.shapes = dict(source.shapes) | {name: self._method.shape(parts) for name, parts in self._parts.items()}

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """The named weight, dequantised in float32 and rounded once."""
        if name not in self._parts:
            return self._source.tensor(name, dtype)
        try:
            return self._method.weight(self._parts[name]).to(dtype)
        except (RuntimeError, LookupError) as error:
            fact = f"what {name} was quantised to does not fit together: {error}"
            raise BrokenWeights("dequantising weights", fact, "fetch the weights again") from error


@dataclass(frozen=True, slots=True)
class _Parts:
    """The tensors that one weight was quantised to, by the last part of their names."""

    source: SafetensorsSource
    prefix: str
    settings: Mapping[str, Any]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shapes[self.prefix + name]

    def get(self, *names: str) -> Tensor | None:
        """The first that is there."""
        found = next((self.prefix + name for name in names if self.prefix + name in self.source.shapes), None)
        return self.source.stored(found) if found else None

    def __getitem__(self, name: str) -> Tensor:
        return self.source.stored(self.prefix + name)


def _gptq(parts: _Parts) -> Tensor:
    """Packed along inputs. The first version of the format stores zeros less one."""
    bits = parts.settings["bits"]
    zero_BN = _unpacked(parts["qzeros"], bits, 1)
    if parts.settings.get("checkpoint_format", "gptq") == "gptq":
        zero_BN = (zero_BN + 1) & ((1 << bits) - 1)
    return _scaled(_unpacked(parts["qweight"], bits, 0).T, parts["scales"].T, zero_BN.T, parts.get("g_idx"))


def _awq(parts: _Parts) -> Tensor:
    """Packed along outputs, neighbours out of order."""
    stored_NK, zero_NB = (_unpacked(parts[name], 4, 1, _AWQ_ORDER).T for name in ("qweight", "qzeros"))
    return _scaled(stored_NK, parts["scales"].T, zero_NB)


def _compressed(parts: _Parts) -> Tensor:
    """Packed along inputs, and zeros along outputs; or as they are."""
    words_NP, zero_NB, block_K = parts.get("weight_packed"), parts.get("weight_zero_point"), parts.get("weight_g_idx")
    if words_NP is None:
        return _plain(parts)
    num_outputs, num_inputs = parts["weight_shape"].tolist()
    bits = 32 // -(-num_inputs // words_NP.shape[1])
    middle = 1 << (bits - 1)
    stored_NK = _unpacked(words_NP, bits, 1)[:, :num_inputs] - middle
    if zero_NB is not None:
        zero_NB = _unpacked(zero_NB, bits, 0)[:num_outputs] - middle
    if block_K is not None and (block_K < 0).any():  # never set
        block_K = None
    return _scaled(stored_NK, parts["weight_scale"], zero_NB, block_K)


def _plain(parts: _Parts) -> Tensor:
    """Integers or floats of 8 bits."""
    scale_AB = parts.get("weight_scale_inv", "weight_scale")
    assert scale_AB is not None
    groups = [section(parts.settings["config_groups"], name) for name in section(parts.settings, "config_groups")]
    sides = [section(group, "weights").get("block_structure") for group in groups]
    sides = [side for side in (parts.settings.get("weight_block_size"), *sides) if side and scale_AB.numel() > 1]
    return _scaled(parts["weight"].float(), scale_AB, parts.get("weight_zero_point"), sides=next(iter(sides), None))


def _unpacked(words_RP: Tensor, bits: int, dim: int, order: Sequence[int] = ()) -> Tensor:
    """The values that lie in 32-bit words along `dim`: the lowest bits first, or in `order`."""
    shifts = torch.tensor(order or range(32 // bits)) * bits
    values = (words_RP.movedim(dim, -1)[..., None] >> shifts) & ((1 << bits) - 1)
    return values.flatten(-2).movedim(-1, dim)


def _scaled(
    stored_NK: Tensor,
    scale_AB: Tensor,
    zero_AB: Tensor | None = None,
    block_K: Tensor | None = None,
    sides: Sequence[int] | None = None,
) -> Tensor:
    """`block_K`: of each input, where neighbours share none. `sides`: of a block, where outputs share one."""
    num_outputs, num_inputs = stored_NK.shape
    scale_AB = scale_AB.float().reshape(len(scale_AB) if scale_AB.ndim else 1, -1)
    rows = sides[0] if sides else num_outputs // len(scale_AB)
    columns = sides[1] if sides else -(-num_inputs // scale_AB.shape[1])
    if not sides and len(scale_AB) not in (1, num_outputs):
        raise LookupError(f"{len(scale_AB)} rows of scales are not of {num_outputs} outputs")
    row_N1 = (torch.arange(num_outputs) // rows)[:, None]
    column_K = torch.arange(num_inputs) // columns if block_K is None else block_K.long()
    if zero_AB is not None:
        stored_NK = stored_NK - zero_AB.reshape(scale_AB.shape)[row_N1, column_K]
    return stored_NK * scale_AB[row_N1, column_K]


def _shape_of_columns(parts: _Parts) -> tuple[int, ...]:
    num_words, num_outputs = parts.shape("qweight")
    return num_outputs, num_words * 32 // int(parts.settings["bits"])


def _shape_of_rows(parts: _Parts) -> tuple[int, ...]:
    num_inputs, num_words = parts.shape("qweight")
    return num_words * 8, num_inputs


def _shape_told(parts: _Parts) -> tuple[int, ...]:
    told = parts.get("weight_shape")
    return parts.shape("weight") if told is None else tuple(told.tolist())


class _Method(NamedTuple):
    """`signs`: the parts, one of which every quantised weight has. `shape`, `weight`: what they say, and stand for.

    `known`: what the settings may say of what changes the layout.
    """

    signs: tuple[str, ...]
    shape: Callable[[_Parts], tuple[int, ...]]
    weight: Callable[[_Parts], Tensor]
    known: Mapping[str, tuple[Any, ...]]


_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_METHODS: Mapping[Any, _Method] = MappingProxyType(
    {
        "gptq": _Method(("qweight",), _shape_of_columns, _gptq, {"bits": (4, 8)}),
        "awq": _Method(("qweight",), _shape_of_rows, _awq, {"bits": (4,), "version": ("gemm", None)}),
        "compressed-tensors": _Method(("weight_scale",), _shape_told, _compressed, {"format": _FORMATS}),
        "fp8": _Method(("weight_scale_inv", "weight_scale"), _shape_told, _plain, {}),
    }
)


def _method_of(settings: Mapping[str, Any]) -> _Method:
    name, sparse = settings.get("quant_method"), section(settings, "sparsity_config").get("format")
    fact = None if name in _METHODS else f"its weights are quantised with {name!r}; read are {', '.join(_METHODS)}"
    for key, values in _METHODS[name].known.items() if name in _METHODS else ():
        if (value := settings.get(key)) not in values:
            known = ", ".join(map(str, filter(None, values)))
            fact = f"its weights are quantised with {name}, whose {key} is {value!r}; read is {known}"
    if sparse not in (None, "dense"):
        fact = f"its weights are stored as {sparse!r}"
    if fact:
        remedy = "use the unquantised checkpoint, or a GGUF file"
        raise UnsupportedModel("loading a model", fact, remedy)
    return _METHODS[name]
