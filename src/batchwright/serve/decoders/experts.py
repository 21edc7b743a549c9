"""Routed experts: a router chooses a few of many MLPs for each token, and weighs what they give.

Tokens are sorted by expert, once; each expert then computes all rows routed to it at once, and a token's experts are
added up in ascending order, in float32. So what a token gets depends, bit for bit, on itself alone where the operators
are invariant. Shares are a softmax over all experts, in float32, of which the largest are taken (Jiang et al. 2024,
Mixtral of Experts, section 2.1; transformers' `modeling_mixtral.py` and `modeling_qwen3_moe.py`).
Costs the weights of every expert that any token of the step is routed to, and one wait for the device per layer.

Shapes: T tokens, E hidden, X experts, K of them for each token, P = T * K pairs, N rows of one expert, I its width.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from batchwright.errors import BrokenWeights
from batchwright.facts.shape import ModelShape
from batchwright.serve.decoders.ops import Activation, Gated, Linear, Ops

Dims = tuple[int, ...]


class Experts:
    """The MLP of a layer that has many."""

    __slots__ = ("_experts", "_num_chosen", "_router", "_whole_shares")

    def __init__(
        self, ops: Ops, shape: ModelShape, layer: int, take: Callable[[str], Tensor], activation: Activation, *,
        whole_shares: bool,
    ) -> None:  # fmt: skip
        """`whole_shares`: the shares of a token's experts are made to sum to one."""
        names = _Names(shape, layer)
        self._num_chosen, self._whole_shares = shape.num_experts_per_token, whole_shares
        self._router = ops.linear(take(names.router), exact=True)
        self._experts: list[tuple[Gated, Linear]] = []
        for gate, up, down in names.experts():
            self._experts.append((ops.gated([take(gate), take(up)], activation=activation), ops.linear(take(down))))

    def __call__(self, x_TE: Tensor, tokens_X: Tensor) -> Tensor:
        """What the experts give, in the dtype of `x_TE`. `tokens_X` gains how many tokens each was given."""
        share_TK, expert_TK = self._routed(x_TE)
        expert_P, pair_P = expert_TK.flatten().sort(stable=True)
        num_rows_X = torch.bincount(expert_P, minlength=len(self._experts))
        tokens_X += num_rows_X
        sizes = num_rows_X.tolist()
        rows, shares = (pair_P // self._num_chosen).split(sizes), share_TK.flatten()[pair_P, None].split(sizes)
        y_TE = torch.zeros(x_TE.shape, dtype=torch.float32, device=x_TE.device)
        for (gated, down), rows_N, share_N1 in zip(self._experts, rows, shares, strict=True):
            if len(rows_N):
                y_TE.index_add_(0, rows_N, down.floats(gated(x_TE[rows_N])).mul_(share_N1))
        return y_TE.to(x_TE.dtype)

    def _routed(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """share_TK and expert_TK."""
        share_TK, expert_TK = self._router.floats(x_TE).softmax(-1).topk(self._num_chosen, -1)
        if self._whole_shares:
            share_TK = share_TK / share_TK.cumsum(-1)[:, -1:]  # one after the other, in any company
        return share_TK, expert_TK

    @property
    def num_bytes(self) -> int:
        return self._router.num_bytes + sum(gated.num_bytes + down.num_bytes for gated, down in self._experts)


class _Names:
    """What a layer's tensors are called in published checkpoints."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        is_mixtral = shape.family == "mixtral"
        self._prefix = f"model.layers.{layer}." + ("block_sparse_moe." if is_mixtral else "mlp.")
        self._parts = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
        self._num_experts = shape.num_experts
        self.router = self._prefix + "gate.weight"

    def experts(self) -> Iterator[tuple[str, str, str]]:
        """Gate, up and down of each."""
        gate, up, down = self._parts
        for expert in range(self._num_experts):
            prefix = f"{self._prefix}experts.{expert}."
            yield f"{prefix}{gate}.weight", f"{prefix}{up}.weight", f"{prefix}{down}.weight"


def expert_shapes(shape: ModelShape, layer: int) -> dict[str, Dims]:
    """The tensors that `Experts` takes, by Hugging Face name, with their shapes."""
    names, hidden, inner = _Names(shape, layer), shape.hidden, shape.moe_intermediate
    found: dict[str, Dims] = {names.router: (shape.num_experts, hidden)}
    for gate, up, down in names.experts():
        found |= {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
    return found


class Source(Protocol):
    """Where weights come from, by Hugging Face name. `in_pair_order`: how query and key rows lie (see `rope`)."""

    @property
    def in_pair_order(self) -> bool: ...

    @property
    def shapes(self) -> Mapping[str, Dims]: ...

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """The named tensor on the CPU."""
        ...


def unfused(source: Source, shape: ModelShape) -> Source:
    """`source`, with one tensor per expert where transformers 5 saved one for all of a layer's; else itself.

    Raises BrokenWeights where such a tensor does not have the config's sizes.
    """
    parts: dict[str, _Part] = {}
    for layer in range(shape.num_layers):
        stored = f"model.layers.{layer}.mlp."
        if shape.has_experts(layer) and f"{stored}experts.gate_up_proj" in source.shapes:
            _check_fused(source, stored, shape)
            names, inner = _Names(shape, layer), shape.moe_intermediate
            parts[names.router] = _Part(stored + "gate.weight")
            for expert, (gate, up, down) in enumerate(names.experts()):
                parts[gate] = _Part(stored + "experts.gate_up_proj", expert, slice(0, inner))
                parts[up] = _Part(stored + "experts.gate_up_proj", expert, slice(inner, 2 * inner))
                parts[down] = _Part(stored + "experts.down_proj", expert)
    return _UnfusedSource(source, parts) if parts else source


def _check_fused(source: Source, prefix: str, shape: ModelShape) -> None:
    num_experts, hidden, inner = shape.num_experts, shape.hidden, shape.moe_intermediate
    expected = {
        "gate.weight": (num_experts, hidden),
        "experts.gate_up_proj": (num_experts, 2 * inner, hidden),
        "experts.down_proj": (num_experts, hidden, inner),
    }
    for name, dims in expected.items():
        if (found := source.shapes.get(prefix + name)) != dims:
            fact = f"tensor {prefix}{name} has shape {found and list(found)} but the config implies {list(dims)}"
            raise BrokenWeights("loading experts", fact, "use the config.json that belongs to these weights")


class _Part(NamedTuple):
    """Of a stored tensor: all of it, or `rows` of one expert."""

    stored: str
    expert: int | None = None
    rows: slice = slice(None)


class _UnfusedSource:
    """Holds the fused tensors of one layer at a time, the one that was last asked for."""

    def __init__(self, source: Source, parts: Mapping[str, _Part]) -> None:
        self._source, self._parts = source, parts
        self._layer, self._held = "", dict[str, Tensor]()
        whole = {part.stored for part in parts.values()}
        self.in_pair_order = source.in_pair_order
        self.shapes = {name: dims for name, dims in source.shapes.items() if name not in whole}
        self.shapes |= {name: _dims(source.shapes[part.stored], part) for name, part in parts.items()}

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        part = self._parts.get(name)
        if part is None or part.expert is None:
            return self._source.tensor(part.stored if part else name, dtype)
        layer = part.stored.partition(".experts.")[0]
        if layer != self._layer:
            self._layer, self._held = layer, {}
        if part.stored not in self._held:
            self._held[part.stored] = self._source.tensor(part.stored, dtype)
        return self._held[part.stored][part.expert, part.rows].clone()


def _dims(stored: Dims, part: _Part) -> Dims:
    return stored if part.expert is None else (len(range(stored[1])[part.rows]), *stored[2:])
