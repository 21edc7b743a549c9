"""Models of families that we do not define, run through transformers with attention routed to our pages.

transformers computes everything but attention: a step's positions are one row of tokens with their position ids, and
what each layer's attention would do is done by our layout, over pages, on queries and keys that transformers rotated.
So any mix of requests, chunks and decodes is one forward here too. Which models can be run so is decided by
`foreign_check`, at load. Rows may affect each other by rounding, and all positions take the last layer's MLP.

Shapes: T positions of the step, R of them whose hidden states are wanted, E hidden, H query heads, K key-value heads,
D values per head, V vocabulary, F = (H + 2K) * D.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from batchwright.facts.shape import ModelShape
from batchwright.serve.decoders.adapters import StepAdapters
from batchwright.serve.decoders.attention import LayerAttention, RowSpan
from batchwright.serve.decoders.model import Attend
from batchwright.serve.decoders.ops import Layout, Ops
from batchwright.serve.kv import PagedKV

IMPLEMENTATION = "batchwright"
"""The name of our attention among transformers' implementations."""

Route = Callable[[Any, Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor]
"""(attention module, q_1HTD, k_1KTD, v_1KTD, its other arguments) -> o_1THD."""

_route: ContextVar[Route] = ContextVar("_route")


def register() -> None:
    """Makes our attention known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)


def _attention(
    module: Any, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, attention_mask: Any, **arguments: Any
) -> tuple[Tensor, None]:
    """As transformers calls it. Without a mask function of that name, it makes no mask."""
    return _route.get()(module, q_1HTD, k_1KTD, v_1KTD, arguments), None


@contextmanager
def routed(route: Route) -> Iterator[None]:
    """Within it, `route` is what attends in this thread's forwards."""
    token = _route.set(route)
    try:
        yield
    finally:
        _route.reset(token)


class ForeignDecoder:
    """What `model.Decoder` is to an executor. `layers[i]` is what layer i attends to; rotations are transformers'."""

    expert_tokens_LX: Tensor | None = None

    def __init__(self, model: Any, shape: ModelShape, layers: Sequence[LayerAttention], ops: Ops) -> None:
        """`model`: transformers' causal language model, with our attention; it is changed. `ops` lay out steps."""
        self.shape, self.attention, self.ops = shape, tuple(layers), ForeignOps(ops)
        self._weights: list[Tensor] = [*model.parameters(), *model.buffers()]
        self._model, self._body, self._given = model, model.get_decoder(), _Given()
        for parent in list(model.modules()):
            for name, child in parent.named_children():
                if child is self._body:
                    setattr(parent, name, self._given)

    @property
    def dtype(self) -> torch.dtype:
        return self._weights[0].dtype

    @property
    def device(self) -> torch.device:
        return self._weights[0].device

    @property
    def num_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights)

    def workspace_bytes(self, num_positions: int, num_rows: int) -> int:
        """An estimate: residual and norm in float32, MLP three times as wide as it is; logits in two dtypes."""
        shape, size = self.shape, self.dtype.itemsize
        heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        per_position = shape.hidden * (2 * size + 8) + max(heads, 3 * shape.intermediate) * size
        return num_positions * per_position + num_rows * shape.vocab * (4 + size)

    @torch.inference_mode()
    def forward(
        self,
        tokens_T: Tensor,
        attend: Attend,
        rows_R: Tensor,
        room_RV: Tensor | None = None,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """logits_RV in float32, in the order of `rows_R` (int64, may be empty). `attend` is of a layout of `ops`."""
        return self.logits(self.hidden(tokens_T, attend, rows_R, adapters), room_RV)

    @torch.inference_mode()
    def hidden(self, tokens_T: Tensor, attend: Attend, rows_R: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """x_RE: what logits are made of, at the positions `rows_R`."""
        assert adapters is None, "adapters are for families of our own"
        assert isinstance(attend, Placed), "a layout of this decoder's operators has it"
        positions_T = attend.positions_T.clamp(max=self.shape.context - 1)  # what is beyond is padding
        with routed(attend.route):
            output = self._body(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False)
        self._given.kind = type(output)
        x_TE: Tensor = output.last_hidden_state[0]
        return x_TE.index_select(0, rows_R)

    @torch.inference_mode()
    def logits(self, x_RE: Tensor, room_RV: Tensor | None = None) -> Tensor:
        """logits_RV in float32 of what `hidden` gave, or of any of its rows."""
        if not len(x_RE):
            return x_RE.new_empty((0, self.shape.vocab), dtype=torch.float32)
        logits_1RV: Tensor = self._model(inputs_embeds=x_RE[None], use_cache=False).logits
        return logits_1RV[0].float()


class _Given(nn.Module):
    """Stands where the model's body was and gives the hidden states it is given, so that the head runs by itself."""

    kind: type[Any]

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return self.kind(last_hidden_state=inputs_embeds)


class ForeignOps:
    """Lays out steps as `ops` do; the rest is transformers'. Decoders take nothing else from it."""

    name = "transformers"
    invariant = False
    takes_room = False

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.page_multiple = ops.page_multiple

    def layout(self, rows: Sequence[RowSpan], kv: PagedKV, layers: Sequence[LayerAttention]) -> "PlacedLayout":
        positions = chain.from_iterable(range(row.start, row.context) for row in rows)
        positions_T = torch.tensor(list(positions), device=kv.pages_LPMSD.device)
        return PlacedLayout(Placed(self._ops.layout(rows, kv, layers), positions_T))


class Placed:
    """Attention of one step, with the positions that transformers is to rotate by."""

    def __init__(self, layout: Layout, positions_T: Tensor) -> None:
        self.layout, self.positions_T = layout, positions_T

    def __call__(self, layer: int, qkv_TF: Tensor) -> Tensor:
        return self.layout.attend(layer, qkv_TF)

    def route(
        self, module: Any, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, arguments: Mapping[str, Any]
    ) -> Tensor:
        parts_GTD = torch.cat([q_1HTD[0], k_1KTD[0], v_1KTD[0]])
        o_TE = self(module.layer_idx, parts_GTD.transpose(0, 1).flatten(1))
        return o_TE.view(1, len(o_TE), q_1HTD.shape[1], -1)


class PlacedLayout(NamedTuple):
    """`attend` is what `ForeignDecoder` takes."""

    attend: Placed
