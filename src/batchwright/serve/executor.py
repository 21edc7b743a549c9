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
from batchwright.serve.decoders.adapters import Adapter, StepAdapters
from batchwright.serve.decoders.attention import RowSpan, layout_order
from batchwright.serve.decoders.foreign import ForeignDecoder
from batchwright.serve.decoders.model import Decoder
from batchwright.serve.kv import PagedKV
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sampling.sampler import Sampler
from batchwright.serve.sampling.scoring import Score, score
from batchwright.serve.sequences import NO_EXTRAS, Extras, Feed, RowResult, Sequences

_NUM_SCORED_AT_ONCE = 64


class Pending(Protocol):
    """A plan that was started. `expert_tokens`: known with the result; see `records.StepRecord`."""

    @property
    def expert_tokens(self) -> tuple[tuple[int, ...], ...]: ...

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

    def add(self, request_id: str, tokens: Sequence[int], params: SamplingParams, extras: Extras = NO_EXTRAS) -> None:
        """`tokens` is the prompt. Raises RequestError for what this executor cannot do."""
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

    def __init__(self, decoder: Decoder | ForeignDecoder, memory: Memory, *, one_at_a_time: bool = False) -> None:
        if memory.page_size % decoder.ops.page_multiple:
            asked, fact = f"running pages of {memory.page_size} tokens", "our kernels store tokens in pairs"
            raise ConfigError(asked, fact, 'use an even page_size, or load the model with backend="torch"')
        self._decoder = decoder
        self._one_at_a_time = one_at_a_time
        self.kv = PagedKV(decoder.shape, memory, decoder.dtype, decoder.device)
        self.overlaps = decoder.device.type == "cuda"
        self._expert_tokens_LX: Tensor | None = None  # of the step that was started last
        self._sequences = Sequences(Sampler(decoder.shape.vocab, decoder.device))
        self._logits_RV = self._new_logits(0)  # memory that is always new costs more than the choice

    def add(self, request_id: str, tokens: Sequence[int], params: SamplingParams, extras: Extras = NO_EXTRAS) -> None:
        self._sequences.add(request_id, tokens, params, extras)

    def remove(self, request_id: str) -> None:
        self._sequences.remove(request_id)

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> "TorchPending":
        spans = [RowSpan(chunk.start, chunk.num_tokens + chunk.padding, chunk.pages) for chunk in plan.chunks]
        order = layout_order(spans)
        ordered = [spans[index] for index in order]
        feed = self._sequences.feed([plan.chunks[index] for index in order])
        self._expert_tokens_LX = None
        x_RE = (self._singly if self._one_at_a_time else self._hidden)(ordered, feed)
        num_drawn = len(feed.rows)
        logits_RV = self._logits(x_RE[:num_drawn], self._room(num_drawn))
        return TorchPending(logits_RV, feed, self._scores(x_RE[num_drawn:], feed), self._expert_tokens_LX)

    def _hidden(self, rows: Sequence[RowSpan], feed: Feed) -> Tensor:
        """x_RE at the positions whose logits are wanted: those that sample, then those that are scored."""
        tokens = list(chain.from_iterable(feed.tokens))
        return self._forward(rows, tokens, feed.rows + feed.scored_rows, feed.adapters)

    def _forward(
        self, rows: Sequence[RowSpan], tokens: Sequence[int], wanted: Sequence[int], adapters: Sequence[Adapter | None]
    ) -> Tensor:
        """x_RE of the positions `wanted`, counted over those of all rows; `adapters` of each position, if any."""
        decoder = self._decoder
        layout = decoder.ops.layout(rows, self.kv, decoder.attention)
        tokens_T = torch.tensor(tokens, device=decoder.device)
        rows_R = torch.tensor(wanted, dtype=torch.int64, device=decoder.device)
        step_adapters = StepAdapters.of(adapters, wanted, decoder.device)
        x_RE = decoder.hidden(tokens_T, layout.attend, rows_R, step_adapters)
        if decoder.expert_tokens_LX is not None:
            before_LX = self._expert_tokens_LX
            self._expert_tokens_LX = decoder.expert_tokens_LX + (0 if before_LX is None else before_LX)
        return x_RE

    def _singly(self, rows: Sequence[RowSpan], feed: Feed) -> Tensor:
        """The same, with a forward for each position."""
        wanted = [*feed.rows, *feed.scored_rows]
        is_wanted = set(wanted)
        positions = [RowSpan(p, 1, row.table) for row in rows for p in range(row.start, row.context)]
        hidden = {
            index: self._forward(
                [position], [token], [0] if index in is_wanted else [], feed.adapters[index : index + 1]
            )
            for index, (position, token) in enumerate(zip(positions, chain.from_iterable(feed.tokens), strict=True))
        }
        return torch.cat([hidden[index] for index in wanted] or [hidden[0]])

    def _logits(self, x_RE: Tensor, room_RV: Tensor | None = None) -> Tensor:
        if not self._one_at_a_time:
            return self._decoder.logits(x_RE, room_RV)
        return torch.cat([self._new_logits(0), *(self._decoder.logits(x_1E) for x_1E in x_RE.split(1))])

    def _scores(self, x_RE: Tensor, feed: Feed) -> list[Score]:
        """Of the tokens that `x_RE` foretell; by portions, because logits are large."""
        targets = list(feed.targets())
        scores: list[Score] = []
        for start in range(0, len(targets), _NUM_SCORED_AT_ONCE):
            portion = targets[start : start + _NUM_SCORED_AT_ONCE]
            logits_RV = self._logits(x_RE[start : start + _NUM_SCORED_AT_ONCE])
            scores += score(logits_RV, [token for token, _ in portion], [num_top for _, num_top in portion])
        return scores

    def _room(self, num_rows: int) -> Tensor | None:
        """For the logits of a step, whose predecessor's were read by then; None where they may not have been."""
        if not self._decoder.ops.takes_room or self._one_at_a_time:
            return None
        if num_rows > len(self._logits_RV):
            self._logits_RV = self._new_logits(num_rows)
        return self._logits_RV[:num_rows]

    def _new_logits(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, self._decoder.shape.vocab, dtype=torch.float32, device=self._decoder.device)


class TorchPending:
    """A forward that was begun, and the rows that sample from its logits."""

    def __init__(self, logits_RV: Tensor, feed: Feed, scores: Sequence[Score], expert_tokens_LX: Tensor | None) -> None:
        self.logits_RV = logits_RV
        self.feed = feed
        self._scores = scores
        self._expert_tokens_LX = expert_tokens_LX

    @property
    def expert_tokens(self) -> tuple[tuple[int, ...], ...]:
        return () if self._expert_tokens_LX is None else tuple(map(tuple, self._expert_tokens_LX.tolist()))

    @torch.inference_mode()
    def result(self) -> list[RowResult]:
        results = self.feed.results(self.logits_RV, self._scores)
        device = self.logits_RV.device
        if not results and device.type == "cuda":
            torch.cuda.synchronize(device)  # no token was read back, and a step ends when its work has
        return results
