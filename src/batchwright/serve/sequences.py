"""The token ids behind a plan: what its chunks feed, what their last positions sample, what of a prompt is scored.

Every executor needs them, whatever it computes with. A request's tokens are its prompt and all that was sampled for
it. A `Feed` keeps the sequences it was made of, so a request may be removed, and its id given to another, while its
step runs: the late token then goes where nobody looks. A step can be run again: it overwrites what it sampled.

A chunk may end with guesses (speculation), which `PromptLookup` makes. A token is drawn after each of them, and is kept
as long as the guesses before it were right. So what is kept is what single steps would have drawn.

    known  a b c        guesses  d e       fed  c d e
    drawn after each    d f g              kept d f: the second guess was wrong, and g stands on it
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from batchwright.policy.types import Chunk
from batchwright.serve.constraints.masks import Masks, PendingMasks
from batchwright.serve.constraints.matcher import Matcher
from batchwright.serve.decoders.adapters import Adapter
from batchwright.serve.lookup import PromptLookup
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sampling.sampler import Row, Sampled, Sampler, Slot
from batchwright.serve.sampling.scoring import Score

_FILLER_TOKEN = 0


class Extras(NamedTuple):
    """What an executor is told of a request beside its prompt and params.

    `end_ids`: tokens that would end it. `adapter`: what is added to the model for it. `max_drafts`: the most guesses
    that it should offer for a step. `matcher`: what its constraint allows.
    """

    end_ids: tuple[int, ...] = ()
    adapter: Adapter | None = None
    max_drafts: int = 0
    matcher: Matcher | None = None


NO_EXTRAS = Extras()


class RowResult(NamedTuple):
    """What a row brought its request.

    `samples`: its new tokens in order, or an error behind them. `num_drafts`: guesses there are for its next step.
    `prompt_scores`: (index in the prompt, log-probabilities) of the tokens that its positions foretell.
    """

    request_id: str
    samples: tuple[Sampled, ...] = ()
    num_drafts: int = 0
    prompt_scores: tuple[tuple[int, Score], ...] = ()


class _Sequence:
    """One request's tokens, and what chooses the next."""

    __slots__ = ("_lookup", "drafts", "extras", "num_prompt", "num_top", "request_id", "slot", "tokens")

    def __init__(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, extras: Extras, slot: Slot
    ) -> None:
        self.request_id = request_id
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.num_top = params.prompt_logprobs
        self.extras = extras
        self.slot = slot
        self.drafts: list[int] = []
        self._lookup = PromptLookup(self.tokens) if extras.max_drafts else None

    def outputs(self, end: int) -> list[int]:
        """What follows the prompt, up to index `end`."""
        return self.tokens[self.num_prompt : end]

    def accept(self, end: int, samples: Iterable[Sampled]) -> None:
        """Its tokens from `end` on are `samples`, until the next step says otherwise."""
        # the request of a row in error has ended, but the step that was planned meanwhile still feeds something
        self.tokens[end:] = [_FILLER_TOKEN if sampled.error else sampled.token for sampled in samples]
        if self._lookup is not None:
            self.drafts = self._lookup.draft(self.extras.max_drafts)


class _Drawn(NamedTuple):
    """A chunk that samples: first the token at index `end`, then one behind each of its guesses."""

    sequence: _Sequence
    end: int
    num_drafts: int

    @property
    def ends(self) -> range:
        return range(self.end, self.end + self.num_drafts + 1)

    def kept(self, samples: Sequence[Sampled]) -> tuple[Sampled, ...]:
        """Those of `samples` that stand on right guesses alone."""
        guesses = self.sequence.tokens[self.end : self.end + self.num_drafts]
        num_right = next((i for i, guess in enumerate(guesses) if samples[i].token != guess), len(guesses))
        return tuple(samples[: num_right + 1])


class _Foretold(NamedTuple):
    """Tokens `first .. end - 1` of a prompt, which the positions before them foretell."""

    sequence: _Sequence
    first: int
    end: int


class Feed:
    """One step's token ids, chunk after chunk, and where they sample.

    `tokens[i]`: those of chunk i, then a filler for each of its dummy positions. `rows`: the positions, counted over
    those of all chunks, whose logits a token is drawn from. `scored_rows`: those that foretell a token of a prompt
    whose log-probabilities are wanted. `adapters`: of each position; empty if none has one.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.tokens: list[list[int]] = []
        self.rows: list[int] = []
        self.scored_rows: list[int] = []
        self.adapters: list[Adapter | None] = []
        self._sampler = sampler
        self._drawn: list[_Drawn] = []
        self._foretold: list[_Foretold] = []
        self._masks: PendingMasks | None = None

    @property
    def sampling_ids(self) -> list[str]:
        """The requests whose tokens `rows` sample."""
        return [drawn.sequence.request_id for drawn in self._drawn for _ in drawn.ends]

    def add(self, sequence: _Sequence, chunk: Chunk, first: int) -> list[int]:
        """What `chunk`, whose positions count from `first`, takes in; notes what it samples and foretells."""
        end = chunk.start + chunk.num_tokens
        known = end - chunk.num_drafts
        if chunk.num_drafts:
            guesses = [*sequence.drafts, *[_FILLER_TOKEN] * chunk.num_drafts]  # it may have fewer by now
            sequence.tokens[known:] = guesses[: chunk.num_drafts]
        if chunk.samples:
            self.rows.extend(range(first + chunk.num_tokens - chunk.num_drafts - 1, first + chunk.num_tokens))
            self._drawn.append(_Drawn(sequence, known, chunk.num_drafts))
        last = min(end + 1, sequence.num_prompt)
        if sequence.num_top is not None and chunk.start + 1 < last:
            self.scored_rows.extend(range(first, first + last - chunk.start - 1))
            self._foretold.append(_Foretold(sequence, chunk.start + 1, last))
        return sequence.tokens[chunk.start : end]

    def begin_masks(self, masks: Masks) -> None:
        """Have what constraints allow worked out while the step runs."""
        if any(drawn.sequence.extras.matcher for drawn in self._drawn):
            self._masks = masks.begin(
                [
                    (drawn.sequence.extras.matcher, drawn.sequence.outputs(end))
                    for drawn in self._drawn
                    for end in drawn.ends
                ]
            )

    def targets(self) -> Iterator[tuple[int, int]]:
        """For each of `scored_rows`: the token that it foretells, and how many likeliest ones are asked for."""
        for sequence, first, end in self._foretold:
            yield from ((token, sequence.num_top or 0) for token in sequence.tokens[first:end])

    def results(self, logits_RV: Tensor, scores: Sequence[Score] = ()) -> list[RowResult]:
        """Draw from float32 logits of `rows`, and append what is kept; `scores` are of `scored_rows`."""
        rows = [Row(drawn.sequence.slot, drawn.sequence.tokens, end) for drawn in self._drawn for end in drawn.ends]
        sampled = iter(self._sample(logits_RV, rows))
        results: dict[int, RowResult] = {}
        for drawn in self._drawn:
            kept = drawn.kept(list(islice(sampled, drawn.num_drafts + 1)))
            drawn.sequence.accept(drawn.end, kept)
            results[id(drawn.sequence)] = RowResult(drawn.sequence.request_id, kept, len(drawn.sequence.drafts))
        remaining = iter(scores)
        for sequence, first, end in self._foretold:
            result = results.get(id(sequence), RowResult(sequence.request_id))
            its_scores = tuple(zip(range(first, end), islice(remaining, end - first), strict=True))
            results[id(sequence)] = result._replace(prompt_scores=its_scores)
        return list(results.values())

    def _sample(self, logits_RV: Tensor, rows: Sequence[Row]) -> list[Sampled]:
        if self._masks is None:
            return self._sampler.sample(logits_RV, rows)
        masked = self._masks.wait()
        sampled = self._sampler.sample(logits_RV, rows, masked.bits_RW)
        for row, error in masked.errors.items():
            sampled[row] = Sampled(-1, error=error)
        return sampled


class Sequences:
    """The requests that an executor may be asked to run, and what chooses their tokens."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._sequences: dict[str, _Sequence] = {}
        self._masks = Masks(sampler.num_vocab, sampler.device)

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams, extras: Extras = NO_EXTRAS) -> None:
        """`prompt` are its first tokens."""
        slot = self.sampler.add(params, prompt, extras.end_ids)
        self._sequences[request_id] = _Sequence(request_id, prompt, params, extras, slot)

    def remove(self, request_id: str) -> None:
        """Its tokens are no longer needed, but for feeds that were made already; unknown ids are ignored."""
        self._sequences.pop(request_id, None)

    def feed(self, chunks: Sequence[Chunk]) -> Feed:
        """What a step of `chunks`, in this order, takes in. What they sampled before must have been sampled by now."""
        feed = Feed(self.sampler)
        adapters: list[Adapter | None] = []
        first = 0
        for chunk in chunks:
            fed: list[int] = []
            adapter: Adapter | None = None
            if chunk.request_id is not None and chunk.num_tokens:
                sequence = self._sequences[chunk.request_id]
                adapter = sequence.extras.adapter
                fed = feed.add(sequence, chunk, first)
            num_positions = chunk.num_tokens + chunk.padding
            adapters += [adapter] * num_positions
            feed.tokens.append(fed + [_FILLER_TOKEN] * chunk.padding)
            first += num_positions
        if any(adapters):
            feed.adapters = adapters
        feed.begin_masks(self._masks)
        return feed
