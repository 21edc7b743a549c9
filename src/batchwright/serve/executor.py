"""The seam between plans and devices: a plan in, one result per sampling row out.

`TorchExecutor` takes every position of a plan through one forward of ours (padding and dead rows included: what a
policy wastes is really executed) and samples. It decides nothing and allocates no pages. A step can be run again, also
in parts: it writes the same positions, and equal logits draw equal tokens (in other parts, logits are equal up to
rounding unless the operators are invariant).
"""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from batchwright.errors import ConfigError
from batchwright.policy.pages import Memory
from batchwright.policy.types import StepPlan
from batchwright.serve.attention import RowSpan, layout_order
from batchwright.serve.kv import PagedKV
from batchwright.serve.model import Decoder
from batchwright.serve.params import SamplingParams
from batchwright.serve.sampling import Sampler
from batchwright.serve.sequences import Feed, RowResult, Sequences


class Pending(Protocol):
    """A plan that was started."""

    def result(self) -> list[RowResult]:
        """Wait for its end; the results of the rows that sample, in any order.

        Raises torch.OutOfMemoryError, MemoryError or RuntimeError if the step failed. Called at most once.
        """
        ...


class Executor(Protocol):
    """Carries out plans, in order. A request is added before the first plan that names it.

    `overlaps`: whether `start` returns before the work is done, so that the next step can be planned meanwhile.
    """

    @property
    def overlaps(self) -> bool: ...

    def add(self, request_id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """`tokens` is the prompt."""
        ...

    def remove(self, request_id: str) -> None:
        """No plan that is yet to start has work for it; it may still be in the one that runs, or be a dead row."""
        ...

    def start(self, plan: StepPlan) -> Pending:
        """Begin with `plan`. The result of the one before was taken, unless an interrupt kept somebody from it.

        Raises what `Pending.result` raises.
        """
        ...


class TorchExecutor:
    """Runs plans on `decoder`'s device, over pages laid out by `memory`.

    On CUDA it overlaps: kernels are queued, and `result` waits for what they sampled. On a CPU torch's calls return
    when their work is done, and a thread that made them in the background would fight the planning one for the
    interpreter: `start` there does nearly all, and nothing is gained by planning ahead.

    `one_at_a_time`: every position takes a forward of its own, so that what it gets depends, bit for bit, on its own
    context alone. That is what is left where a decoder's operators are not invariant, and is slow.
    """

    def __init__(self, decoder: Decoder, memory: Memory, *, one_at_a_time: bool = False) -> None:
        if memory.page_size % decoder.ops.page_multiple:
            asked, fact = f"running pages of {memory.page_size} tokens", "our kernels store tokens in pairs"
            raise ConfigError(asked, fact, 'use an even page_size, or load the model with backend="torch"')
        self._decoder = decoder
        self._one_at_a_time = one_at_a_time
        self.kv = PagedKV(decoder.shape, memory, decoder.dtype, decoder.device)
        self.overlaps = decoder.device.type == "cuda"
        self._sequences = Sequences(Sampler(decoder.shape.vocab, decoder.device))
        self._logits_RV = self._new_logits(0)  # memory that is always new costs more than the choice

    def add(self, request_id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        self._sequences.add(request_id, tokens, params)

    def remove(self, request_id: str) -> None:
        self._sequences.remove(request_id)

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> "TorchPending":
        spans = [RowSpan(chunk.start, chunk.num_tokens + chunk.padding, chunk.pages) for chunk in plan.chunks]
        order = layout_order(spans)
        ordered = [spans[index] for index in order]
        feed = self._sequences.feed([plan.chunks[index] for index in order])
        tokens = list(chain.from_iterable(feed.tokens))
        return TorchPending((self._singly if self._one_at_a_time else self._forward)(ordered, tokens, feed.rows), feed)

    def _forward(self, rows: Sequence[RowSpan], tokens: Sequence[int], sampling: Sequence[int]) -> Tensor:
        """logits_RV of the positions `sampling`, counted over those of all rows."""
        decoder = self._decoder
        layout = decoder.ops.layout(rows, self.kv, decoder.attention)
        tokens_T = torch.tensor(tokens, device=decoder.device)
        rows_R = torch.tensor(sampling, dtype=torch.int64, device=decoder.device)
        return decoder.forward(tokens_T, layout.attend, rows_R, self._room(len(sampling)))

    def _room(self, num_rows: int) -> Tensor | None:
        """For the logits of a step, whose predecessor's were read by then; None where they may not have been."""
        if not self._decoder.ops.takes_room or self._one_at_a_time:
            return None
        if num_rows > len(self._logits_RV):
            self._logits_RV = self._new_logits(num_rows)
        return self._logits_RV[:num_rows]

    def _new_logits(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, self._decoder.shape.vocab, dtype=torch.float32, device=self._decoder.device)

    def _singly(self, rows: Sequence[RowSpan], tokens: Sequence[int], sampling: Sequence[int]) -> Tensor:
        """The same, with a forward for each position."""
        positions = [RowSpan(p, 1, row.table) for row in rows for p in range(row.start, row.context)]
        wanted = set(sampling)
        logits = [
            self._forward([position], [token], [0] if index in wanted else [])
            for index, (position, token) in enumerate(zip(positions, tokens, strict=True))
        ]
        return torch.cat(logits)


class TorchPending:
    """A forward that was begun, and the rows that sample from its logits."""

    def __init__(self, logits_RV: Tensor, feed: Feed) -> None:
        self.logits_RV = logits_RV
        self.feed = feed

    @torch.inference_mode()
    def result(self) -> list[RowResult]:
        results = self.feed.sample(self.logits_RV)
        device = self.logits_RV.device
        if not results and device.type == "cuda":
            torch.cuda.synchronize(device)  # no token was read back, and a step ends when its work has
        return results
