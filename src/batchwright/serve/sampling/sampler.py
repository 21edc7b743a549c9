"""Chooses the next token of every row of a batch; one row's choice never depends on the other rows.

Randomness is keyed by (seed, position) alone: each drawn row spends one uniform number (`uniforms`) on the inverse of
its cumulative distribution. So equal logits draw equal tokens, bit for bit, whenever and wherever a failed or preempted
step is run again; a rerun in a batch of another shape has logits that are equal up to rounding only.

Logits are processed in the order of transformers' `generate`: biases; penalties; bad words, end tokens before
`min_tokens`, and what a constraint rules out; temperature; top-k, top-p, min-p, typical. (vLLM rules out first, which
gives the same, and has biases before penalties too; OpenAI documents no order.) Log-probabilities are those before it.

What requests ask for lies in tables by slot, from which a step gathers what its rows need; a batch in which nobody asks
for a feature pays nothing for it. Cost: greedy rows, one pass over the logits; drawn rows, a softmax and about four
passes, or two by our kernel where kernels are loaded; processed ones, a copy and the few logits that change;
benchmarks/sampling.py has the numbers.

Shapes: B rows of the batch, R some of those rows, S slots, P settings, V vocabulary, W words of 32 bits.
"""

import math
import weakref
from collections.abc import Collection, Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchwright.errors import RequestError
from batchwright.serve.kernels import calls
from batchwright.serve.kernels.build import built
from batchwright.serve.sampling import biases, penalties
from batchwright.serve.sampling.bad_words import BadWords, WordsOfRow, completions
from batchwright.serve.sampling.biases import TokensOfRow
from batchwright.serve.sampling.draws import MAX_VOCABULARY, draw
from batchwright.serve.sampling.filters import OFF, Scored, draw_filtered, draw_typical
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sampling.penalties import History, PenalisedRow, Penalties
from batchwright.serve.sampling.ranking import kernels_take, likeliest
from batchwright.serve.sampling.rows import Room, portions
from batchwright.serve.sampling.scoring import score
from batchwright.serve.sampling.uniforms import streams, uniforms

_SMALLEST = torch.finfo(torch.float32).tiny
_NUM_SETTINGS = 1 + len(OFF)  # one over the temperature, then the limits


class _Way(Enum):
    """How a row is drawn, if it is."""

    PLAIN = auto()
    FILTERED = auto()
    TYPICAL = auto()
    FILTERED_THEN_TYPICAL = auto()


class Slot:
    """A request's place in a sampler's tables, which is given to another when nobody holds this any more.

    What is None or False here is a feature that the request does not use.
    """

    __slots__ = (
        "__weakref__", "allowed", "bad_words", "bias", "changes_logits", "end_ids", "history", "index", "min_end",
        "needs_share", "num_logprobs", "penalties", "way",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        limits: tuple[float, ...],
        prompt: Sequence[int],
        end_ids: Collection[int],
    ) -> None:
        self.index = index
        self.num_logprobs = params.logprobs
        self.way = _way(limits) if params.temperature > 0 else None
        self.needs_share = params.top_p < 1 and limits[0] == OFF[0]
        self.bias = _bias(params)
        self.allowed = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids)
        sequences = [word for word in params.bad_words if not isinstance(word, str)]
        assert len(sequences) == len(params.bad_words), "whoever has the tokenizer has made ids of them"
        self.bad_words = BadWords.of(sequences) if sequences else None
        self.end_ids = np.array(sorted(end_ids), dtype=np.int64)
        self.min_end = len(prompt) + params.min_tokens if params.min_tokens and end_ids else 0
        self.penalties = Penalties(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        counted = () if params.repetition_penalty == 1 else prompt
        self.history = None if self.penalties == penalties.NONE else History(len(prompt), counted)
        self.changes_logits = (
            bool(self.bias or self.bad_words or self.min_end or self.history) or self.allowed is not None
        )


class Row(NamedTuple):
    """One row of logits: the token to choose stands at index `end`, after `tokens[:end]`; there may be more tokens."""

    slot: Slot
    tokens: Sequence[int]
    end: int


class Sampled(NamedTuple):
    """The choice for one row. `error`, if set, ends that request only; `token` is then -1.

    `logprob` and `top` (token, log-probability; likeliest first, equals by lower id) are filled if the params asked for
    them; tokens of probability zero are never in `top`.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: str | None = None


class Sampler:
    """Chooses tokens for the requests that were added to it, from logits over `num_vocab` tokens."""

    def __init__(self, num_vocab: int, device: torch.device) -> None:
        assert 0 < num_vocab <= MAX_VOCABULARY
        if device.type == "cpu":
            built()  # or not: who draws is settled before the first draw, since each rounds as it does
        self.num_vocab = num_vocab
        self.device = device
        self._free: list[int] = []
        self._num_slots = 0
        self._settings_SP = np.empty((0, _NUM_SETTINGS))
        self._streams_S = np.empty(0, dtype=np.uint64)
        self._room = Room(num_vocab, device)

    def add(self, params: SamplingParams, prompt: Sequence[int], end_ids: Collection[int] = ()) -> Slot:
        """A slot for a request; `end_ids` end it, and are ruled out before its `min_tokens`.

        Ids in `params` are in the vocabulary, bad words are ids, and params with a temperature above 0 hold a seed.
        """
        assert params.seed is not None or params.temperature == 0, "a request that is drawn has a seed by now"
        limits = _limits(params, self.num_vocab)
        slot = Slot(self._new_index(), params, limits, prompt, end_ids)
        weakref.finalize(slot, self._free.append, slot.index).atexit = False
        rate = min(1 / max(params.temperature, _SMALLEST), 1 / _SMALLEST)
        self._settings_SP[slot.index] = max(rate, _SMALLEST), *limits
        self._streams_S[slot.index] = streams([params.seed or 0])[0]
        return slot

    def sample(self, logits_BV: Tensor, rows: Sequence[Row], mask_BW: Tensor | None = None) -> list[Sampled]:
        """Choose one token per row of float32 logits, which are left as they were. -inf rules a token out.

        `mask_BW`: int32 words of bits; token v is allowed if bit v % 32 of word v // 32 is set. A row of all ones is
        not constrained. Several rows of one slot have ends one after another: their tokens are guesses. A row holding
        NaN or +inf, or with no token left, gets an `error`; the other rows are unharmed.
        """
        assert logits_BV.dtype == torch.float32 and logits_BV.shape == (len(rows), self.num_vocab)
        if not rows:
            return []
        processed_BV = self._processed(logits_BV, rows, mask_BW)
        peak_B, token_B = likeliest(processed_BV)
        peaks: list[float] = peak_B.tolist()
        sound = [math.isfinite(peak) for peak in peaks]
        for way in _Way:
            drawn = [i for i, row in enumerate(rows) if row.slot.way is way and sound[i]]
            for part in portions(len(drawn), self.num_vocab, self.device):
                self._draw(processed_BV, peak_B, token_B, rows, drawn[part])
        tokens: list[int] = token_B.tolist()
        sampled = [
            Sampled(token) if is_sound else Sampled(-1, error=_no_choice(logits_BV[i], peaks[i], rows[i].end))
            for i, (token, is_sound) in enumerate(zip(tokens, sound, strict=True))
        ]
        self._score(logits_BV, rows, sampled)
        return sampled

    def _new_index(self) -> int:
        if self._free:
            return self._free.pop()
        if self._num_slots == len(self._streams_S):
            num = max(64, 2 * self._num_slots)
            self._settings_SP = np.resize(self._settings_SP, (num, _NUM_SETTINGS))
            self._streams_S = np.resize(self._streams_S, num)
        self._num_slots += 1
        return self._num_slots - 1

    def _processed(self, logits_BV: Tensor, rows: Sequence[Row], mask_BW: Tensor | None) -> Tensor:
        """The logits with all applied that also changes which token is the likeliest; themselves if nothing does."""
        slots = [row.slot for row in rows]
        if mask_BW is None and not any(slot.changes_logits for slot in slots):
            return logits_BV
        allowed = [TokensOfRow(i, slot.allowed) for i, slot in enumerate(slots) if slot.allowed is not None]
        biased = [(i, slot.bias) for i, slot in enumerate(slots) if slot.bias is not None]
        penalised = [
            PenalisedRow(i, row.slot.history, row.slot.penalties, row.tokens, row.end)
            for i, row in enumerate(rows)
            if row.slot.history is not None
        ]
        processed_BV = logits_BV.clone()
        if allowed:
            biases.rule_out_all_but(processed_BV, allowed)
        if biased:
            tokens = [TokensOfRow(i, token_E) for i, (token_E, _) in biased]
            biases.add(processed_BV, tokens, [bias_E for _, (_, bias_E) in biased])
        if penalised:
            penalties.penalise(processed_BV, penalised)
        for row_E, token_E in _ruled_out(rows):
            biases.rule_out(processed_BV, row_E, token_E)
        if mask_BW is not None:
            biases.rule_out_unset(processed_BV, mask_BW.to(self.device))
        return processed_BV

    def _draw(
        self, logits_BV: Tensor, peak_B: Tensor, token_B: Tensor, rows: Sequence[Row], drawn: Sequence[int]
    ) -> None:
        """Put drawn tokens in the place of the likeliest; all rows are drawn in one way."""
        slots = [rows[i].slot for i in drawn]
        slot_R = np.array([slot.index for slot in slots])
        position_R = np.array([rows[i].end for i in drawn], dtype=np.uint64)
        uniform_R = torch.from_numpy(uniforms(self._streams_S[slot_R], position_R)).to(self.device)
        settings_RP = torch.from_numpy(self._settings_SP[slot_R]).to(self.device)
        row_R, limits_RL = torch.tensor(drawn, device=self.device), settings_RP[:, 1:]
        if slots[0].way is not _Way.FILTERED_THEN_TYPICAL and kernels_take(logits_BV):
            calls.draw(logits_BV, peak_B, row_R, settings_RP, uniform_R, token_B)
            return
        is_all = len(drawn) == len(rows)
        scored = Scored(logits_BV if is_all else logits_BV[row_R], peak_B[row_R], settings_RP[:, 0].float())
        scores_RV, room_RV = self._room.of(len(drawn))
        match slots[0].way:
            case _Way.PLAIN:
                token_R = draw(scored.all(scores_RV), uniform_R, room_RV)
            case _Way.TYPICAL:
                token_R = draw_typical(scored.all(scores_RV), limits_RL[:, -1], uniform_R, room_RV)
            case _:
                needs_share = any(slot.needs_share for slot in slots)
                share_RV = torch.softmax(scored.all(scores_RV), -1, out=room_RV) if needs_share else None
                token_R = draw_filtered(scored, share_RV, limits_RL, uniform_R)
        token_B[row_R] = token_R

    def _score(self, logits_BV: Tensor, rows: Sequence[Row], sampled: list[Sampled]) -> None:
        """Put log-probabilities where they are asked for."""
        asked = [
            (i, row.slot.num_logprobs)
            for i, row in enumerate(rows)
            if row.slot.num_logprobs is not None and sampled[i].error is None
        ]
        if not asked:
            return
        indices = [i for i, _ in asked]
        logits_RV = logits_BV if len(asked) == len(rows) else logits_BV[torch.tensor(indices, device=self.device)]
        scores = score(logits_RV, [sampled[i].token for i in indices], [num for _, num in asked], self._room)
        for i, (logprob, top) in zip(indices, scores, strict=True):
            sampled[i] = Sampled(sampled[i].token, logprob, top)


def _limits(params: SamplingParams, num_vocab: int) -> tuple[float, ...]:
    """In the order of `Limits`."""
    top_k, top_p, _, _ = OFF
    return (
        float(params.top_k) if 0 < params.top_k < num_vocab else top_k,
        params.top_p if params.top_p < 1 else top_p,
        params.min_p,
        params.typical_p,
    )


def _way(limits: tuple[float, ...]) -> _Way:
    is_filtered, is_typical = limits[:-1] != OFF[:-1], limits[-1] != OFF[-1]
    if is_filtered:
        return _Way.FILTERED_THEN_TYPICAL if is_typical else _Way.FILTERED
    return _Way.TYPICAL if is_typical else _Way.PLAIN


def _bias(params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
    if not params.logit_bias:
        return None
    tokens, values = zip(*params.logit_bias, strict=True)
    return np.array(tokens, dtype=np.int64), np.array(values, dtype=np.float32)


def _ruled_out(rows: Sequence[Row]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Rows and tokens of what must not come next: what would complete a bad word, and ends that come too early."""
    early = [TokensOfRow(i, row.slot.end_ids) for i, row in enumerate(rows) if row.end < row.slot.min_end]
    words = [
        WordsOfRow(i, row.slot.bad_words, row.tokens, row.end)
        for i, row in enumerate(rows)
        if row.slot.bad_words is not None
    ]
    return ([biases.flat(early)] if early else []) + ([completions(words)] if words else [])


def _no_choice(logits_V: Tensor, peak: float, position: int) -> str:
    """The error of a row whose highest processed logit is not finite."""
    asked = f"choosing the token at position {position}"
    if peak == -math.inf and bool(logits_V.amax() > -math.inf):
        fact = "bad words, allowed tokens, min_tokens and constraint together rule every token out"
        return str(RequestError(asked, fact, "ask for less of them at once"))
    held = "NaN" if math.isnan(peak) else "+inf" if peak > 0 else "-inf for every token"
    fact = f"the model's logits hold {held}, which is no distribution"
    remedy = "check the weights for non-finite values, or run in bfloat16 or float32 if float16 overflows"
    return str(RequestError(asked, fact, remedy))
