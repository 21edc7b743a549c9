"""Which tokens may come next in each row that samples, worked out by other threads while the forward runs.

A row's bits depend on its own grammar and output alone. Rows of one matcher, one behind the other, are guesses: each
goes on from where the one before it would be if its guess were right. Where a guess is none of the grammar's, what
comes after it is not restricted, for nobody will be given it. Cost: two calls that let go of the interpreter for all
rows, some microseconds to milliseconds of other cores each; nothing for steps without constraints.

Shapes: R rows that sample, W words of 32 tokens each.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from llguidance import LLExecutor
from torch import Tensor

from batchwright.serve.constraints.matcher import Matcher, until_end

MAX_THREADS = 8
_ALL = -1  # every bit of a word


class Masked(NamedTuple):
    """Bit v % 32 of word v // 32 says whether token v may come. `errors`: rows whose request ends by one.

    `bits_RW` is on the CPU, and is written again for the next step.
    """

    bits_RW: Tensor
    errors: dict[int, str]


class PendingMasks:
    """The masks of a step that was begun."""

    def __init__(self, future: "Future[Masked]") -> None:
        self._future = future

    def wait(self) -> Masked:
        """They are there when this returns."""
        return self._future.result()


class _Span(NamedTuple):
    """Rows of one matcher: `first` after `outputs`, and one more after each of `guesses`."""

    matcher: Matcher
    first: int
    outputs: Sequence[int]
    guesses: list[int]


class Masks:
    """Computes the masks of one step after the other, for a model over `num_vocab` tokens."""

    def __init__(self, num_vocab: int, device: torch.device) -> None:
        self._num_words = -(-num_vocab // 32)
        self._is_pinned = device.type == "cuda"
        self._room_RW = torch.empty(0, 0, dtype=torch.int32)
        self._last: Future[Masked] | None = None
        self._starter = ThreadPoolExecutor(1, "masks")  # has no thread before it is used
        self._executor: LLExecutor | None = None

    def begin(self, rows: Sequence[tuple[Matcher | None, Sequence[int]]]) -> PendingMasks | None:
        """Start with `rows`, each with its matcher and its output tokens so far; None if nothing restricts any.

        A step may be begun again, and outputs may have been taken back since the last one. Nobody may use the matchers
        before `wait` has returned, nor the bits of the step before any more.
        """
        spans = _spans(rows)
        if not spans:
            return None
        if self._last is not None and not self._last.done():  # an interrupt kept somebody from waiting
            self._last.exception()
        room_RW = self._room(len(rows), spans[0].matcher.grammar.num_tokens)
        self._last = self._starter.submit(self._fill, spans, room_RW)
        return PendingMasks(self._last)

    def _room(self, num_rows: int, num_tokens: int) -> Tensor:
        num_words = -(-num_tokens // 32)  # one more than are asked for, where the end is a token that the model lacks
        if num_rows > len(self._room_RW):
            shape = max(num_rows, 2 * len(self._room_RW)), num_words
            self._room_RW = torch.empty(shape, dtype=torch.int32, pin_memory=self._is_pinned)
        return self._room_RW[:num_rows]

    @torch.inference_mode()  # as where the room was made; the mode is a thread's own
    def _fill(self, spans: Sequence[_Span], room_RW: Tensor) -> Masked:
        room_RW.fill_(_ALL)
        self._compute(spans, room_RW)
        failed = [span for span in spans if span.matcher.core.is_error()]
        self._compute([span for span in failed if span.matcher.renew()], room_RW)
        errors: dict[int, str] = {}
        for span in failed:
            if error := span.matcher.error():
                last = span.first + len(span.guesses)
                room_RW[span.first : last + 1] = _ALL
                errors |= dict.fromkeys(range(span.first, last + 1), error)
        return Masked(room_RW[:, : self._num_words].contiguous(), errors)

    def _compute(self, spans: Sequence[_Span], room_RW: Tensor) -> None:
        """Take in what is new, then write the masks of all rows that have not come to their end."""
        self._take(spans)
        num_words = room_RW.shape[1]
        place = room_RW.data_ptr(), 4 * num_words, len(room_RW)
        going = [(span, until_end(span.guesses, span.matcher.grammar.end_ids)) for span in spans if _goes_on(span)]
        if alone := [(span.matcher.core, span.first) for span, guesses in going if not guesses]:
            self._threads().unsafe_compute_mask_ptr(alone, *place)
        if guessed := [(span.matcher.core, span.first, guesses) for span, guesses in going if guesses]:
            self._threads().unsafe_compute_mask_ptr_with_draft_token(guessed, *place)

    def _take(self, spans: Sequence[_Span]) -> None:
        """Bring every matcher to its outputs: as a rule by one token each, all in one call."""
        single: list[tuple[Matcher, int]] = []
        for span in spans:
            missing = span.matcher.missing(span.outputs)
            if len(missing) == 1:
                single.append((span.matcher, missing[0]))
            elif missing:
                span.matcher.take(missing)
        if single:
            self._threads().consume_token_par([(matcher.core, token) for matcher, token in single])
        for matcher, token in single:
            matcher.note(token)

    def _threads(self) -> LLExecutor:
        if self._executor is None:
            num_threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))  # the forward has use for the others
            self._executor = LLExecutor(num_threads)
        return self._executor


def _spans(rows: Sequence[tuple[Matcher | None, Sequence[int]]]) -> list[_Span]:
    """The rows that are restricted; consecutive ones of one matcher together."""
    spans: list[_Span] = []
    for index, (matcher, outputs) in enumerate(rows):
        if matcher is None:
            continue
        last = spans[-1] if spans else None
        if last is not None and last.matcher is matcher:
            assert (
                index == last.first + len(last.guesses) + 1 and len(outputs) == len(last.outputs) + index - last.first
            )
            last.guesses.append(outputs[-1])
        else:
            spans.append(_Span(matcher, index, outputs, []))
    return spans


def _goes_on(span: _Span) -> bool:
    """Whether its text has not ended; what a step that was planned before that computes, nobody is given."""
    return until_end(span.outputs, span.matcher.grammar.end_ids) == list(span.outputs)
