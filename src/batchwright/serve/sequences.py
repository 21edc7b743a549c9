"""The token ids behind a plan: what its chunks feed, and what their last positions sample.

Every executor needs them, whatever it computes with. A request's tokens are its prompt and all that was sampled for
it. A `Feed` keeps the sequences it was made of, so a request may be removed, and its id given to another, while its
step runs: the late token then goes where nobody looks. A step can be run again: it overwrites what it sampled.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from batchwright.policy.types import Chunk
from batchwright.serve.params import SamplingParams
from batchwright.serve.sampling import Row, Sampled, Sampler, Slot

_FILLER_TOKEN = 0


class RowResult(NamedTuple):
    """The token that a row sampled, or its error."""

    request_id: str
    sampled: Sampled


class _Sequence(NamedTuple):
    request_id: str
    tokens: list[int]
    slot: Slot


class Feed:
    """One step's token ids, chunk after chunk, and where they sample.

    `tokens[i]`: those of chunk i, then a filler for each of its dummy positions. `rows[r]`: where the last token of
    the r-th chunk that samples stands, counted over the positions of all chunks.
    """

    def __init__(
        self, sampler: Sampler, tokens: list[list[int]], rows: list[int], sampling: list[tuple[_Sequence, int]]
    ) -> None:
        self._sampler = sampler
        self.tokens = tokens
        self.rows = rows
        self._sampling = sampling  # each with the number of tokens before the one it samples

    @property
    def sampling_ids(self) -> list[str]:
        """The requests whose tokens `rows` sample."""
        return [sequence.request_id for sequence, _ in self._sampling]

    def sample(self, logits_RV: Tensor) -> list[RowResult]:
        """Choose a token for each of `rows`, from float32 logits in that order, and append it to its sequence."""
        rows = [Row(sequence.slot, sequence.tokens, end) for sequence, end in self._sampling]
        results = []
        for (sequence, end), sampled in zip(self._sampling, self._sampler.sample(logits_RV, rows), strict=True):
            # the request of a row in error has ended, but the step that was planned meanwhile still feeds something
            sequence.tokens[end:] = [_FILLER_TOKEN if sampled.error else sampled.token]
            results.append(RowResult(sequence.request_id, sampled))
        return results


class Sequences:
    """The requests that an executor may be asked to run, and what chooses their tokens."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._sequences: dict[str, _Sequence] = {}

    def add(self, request_id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """`tokens` is the prompt."""
        slot = self.sampler.add(params, tokens, params.stop_token_ids)
        self._sequences[request_id] = _Sequence(request_id, list(tokens), slot)

    def remove(self, request_id: str) -> None:
        """Its tokens are no longer needed, but for feeds that were made already; unknown ids are ignored."""
        self._sequences.pop(request_id, None)

    def feed(self, chunks: Sequence[Chunk]) -> Feed:
        """What a step of `chunks`, in this order, takes in. What they sampled before must have been sampled by now."""
        tokens: list[list[int]] = []
        rows: list[int] = []
        sampling: list[tuple[_Sequence, int]] = []
        first = 0
        for chunk in chunks:
            end = chunk.start + chunk.num_tokens
            fed: list[int] = []
            if chunk.request_id is not None and chunk.num_tokens:
                sequence = self._sequences[chunk.request_id]
                fed = sequence.tokens[chunk.start : end]
                if chunk.samples:
                    rows.append(first + chunk.num_tokens - 1)
                    sampling.append((sequence, end))
            tokens.append(fed + [_FILLER_TOKEN] * chunk.padding)
            first += chunk.num_tokens + chunk.padding
        return Feed(self.sampler, tokens, rows, sampling)
