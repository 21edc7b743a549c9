"""The seam between plans and devices: a plan in, one result per sampling row out.

`TorchExecutor` is the only file that turns plans into tensors: it knows token ids and pages, takes every position of
the plan through one forward (padding and dead rows included: what a policy wastes is really executed) and samples.
It decides nothing and allocates no pages. A step can be run again, also in parts: it writes the same positions, and
equal logits draw equal tokens (in other parts, logits are equal up to rounding).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from batchwright.policy.pages import Memory
from batchwright.policy.types import Chunk, StepPlan
from batchwright.serve.attention import RowSpan, StepLayout, layout_order
from batchwright.serve.kv import PagedKV
from batchwright.serve.model import Decoder
from batchwright.serve.sampling import Row, Sampled, SamplingParams, sample

_FILLER_TOKEN = 0


class RowResult(NamedTuple):
    """The token that a row sampled, or its error."""

    request_id: str
    sampled: Sampled


class Executor(Protocol):
    """Carries out plans, in order. A request is added before the first plan that names it."""

    def add(self, request_id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """`tokens` is the prompt."""
        ...

    def remove(self, request_id: str) -> None:
        """No further plan has work for it; one may still carry it as a dead row."""
        ...

    def execute(self, plan: StepPlan) -> list[RowResult]:
        """Results of the rows that sample. Raises torch.OutOfMemoryError, MemoryError or RuntimeError."""
        ...


class _Sequence(NamedTuple):
    tokens: list[int]
    params: SamplingParams


class TorchExecutor:
    """Runs plans on `decoder`'s device, over pages laid out by `memory`."""

    def __init__(self, decoder: Decoder, memory: Memory) -> None:
        self._decoder = decoder
        self.kv = PagedKV(decoder.shape, memory, decoder.dtype, decoder.device)
        self._sequences: dict[str, _Sequence] = {}

    def add(self, request_id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        self._sequences[request_id] = _Sequence(list(tokens), params)

    def remove(self, request_id: str) -> None:
        self._sequences.pop(request_id, None)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[RowResult]:
        spans = [RowSpan(chunk.start, chunk.num_tokens + chunk.padding, chunk.pages) for chunk in plan.chunks]
        self.kv.clear(page for span in spans for page in span.begun_page(self.kv.page_size))
        order = layout_order(spans)
        chunks = [plan.chunks[index] for index in order]
        layout = StepLayout([spans[index] for index in order], self.kv)
        device = self._decoder.device
        tokens_T = torch.tensor([token for chunk in chunks for token in self._tokens(chunk)], device=device)
        rows_R = torch.tensor(_sampling_rows(chunks), dtype=torch.int64, device=device)
        logits_RV = self._decoder.forward(tokens_T, layout.positions_T, layout.attend, rows_R)
        results = self._sample(logits_RV, [chunk for chunk in chunks if chunk.samples])
        if not results and device.type == "cuda":
            torch.cuda.synchronize(device)  # no token was read back, and a step ends when its work has
        return results

    def _tokens(self, chunk: Chunk) -> list[int]:
        """Its token ids, then fillers."""
        fillers = [_FILLER_TOKEN] * chunk.padding
        if not chunk.num_tokens or chunk.request_id is None:
            return fillers
        return self._sequences[chunk.request_id].tokens[chunk.start : chunk.start + chunk.num_tokens] + fillers

    def _sample(self, logits_RV: torch.Tensor, chunks: Sequence[Chunk]) -> list[RowResult]:
        ids = [chunk.request_id for chunk in chunks if chunk.request_id is not None]
        sequences = [self._sequences[request_id] for request_id in ids]
        ends = [chunk.start + chunk.num_tokens for chunk in chunks]
        rows = [Row(sequence.params, end) for sequence, end in zip(sequences, ends, strict=True)]
        results = []
        for request_id, sequence, end, sampled in zip(ids, sequences, ends, sample(logits_RV, rows), strict=True):
            sequence.tokens[end:] = [sampled.token]  # a step run again overwrites
            results.append(RowResult(request_id, sampled))
        return results


def _sampling_rows(chunks: Sequence[Chunk]) -> list[int]:
    """For each chunk that samples, where its last token stands among the step's positions."""
    rows = []
    first = 0
    for chunk in chunks:
        if chunk.samples:
            rows.append(first + chunk.num_tokens - 1)
        first += chunk.num_tokens + chunk.padding
    return rows
