"""Repetition, presence and frequency penalties: logits of tokens that a request's text already holds are changed.

Repetition divides a positive logit and multiplies a negative one, for tokens of prompt and output (Keskar et al.: CTRL,
arXiv 1909.05858, as transformers has it, and vLLM). Presence and frequency are subtracted, once and once for each time,
for tokens of the output alone (OpenAI's formula, after the repetition penalty as in vLLM; transformers has neither).
A `History` knows the different tokens of one request's text, so a step touches these and not the vocabulary: some
hundreds of logits per row instead of tens of thousands. It holds about 120 bytes per different token, so at most that
much for each token of the vocabulary; a request that asks for no penalty has none.

E: entries, one for each different token of each row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_TOKEN, _NUM_SEEN, _NUM_OUTPUT = range(3)


class Penalties(NamedTuple):
    """What one request asks for; `NONE` changes nothing."""

    repetition: float
    presence: float
    frequency: float


NONE = Penalties(1.0, 0.0, 0.0)


class History:
    """How often each token stands in a request's text: all of it, and the output alone.

    `counted`: its prompt, of `num_prompt` tokens, or nothing where only output is of interest. It is moved to whatever
    place is asked for, so steps may be run again, and rows of guesses be counted and taken back; the cost is that of
    the tokens in between.
    """

    def __init__(self, num_prompt: int, counted: Sequence[int]) -> None:
        self._num_prompt = num_prompt
        self._output: list[int] = []  # what was counted of it
        tokens, counts = np.unique(np.asarray(counted, dtype=np.int64), return_counts=True)
        self._columns = {token: column for column, token in enumerate(tokens.tolist())}
        self._table = np.zeros((3, max(16, 2 * len(tokens))), dtype=np.int64)
        self._table[:_NUM_OUTPUT, : len(tokens)] = tokens, counts

    def at(self, tokens: Sequence[int], end: int) -> NDArray[np.int64]:
        """Token, count in the text, and count in the output, for each different token of tokens[:end]; a copy.

        Tokens counted before that stand before `end` still stand there.
        """
        num_output = end - self._num_prompt
        while len(self._output) > num_output:
            self._count(self._output.pop(), -1)
        for token in tokens[self._num_prompt + len(self._output) : end]:
            self._output.append(token)
            self._count(token, 1)
        return self._table[:, : len(self._columns)].copy()

    def _count(self, token: int, change: int) -> None:
        column = self._columns.setdefault(token, len(self._columns))
        if column == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        self._table[_TOKEN, column] = token
        self._table[_NUM_SEEN:, column] += change


class PenalisedRow(NamedTuple):
    """A row of logits, which follows `tokens[:end]`."""

    row: int
    history: History
    penalties: Penalties
    tokens: Sequence[int]
    end: int


def penalise(logits_RV: Tensor, rows: Sequence[PenalisedRow]) -> None:
    """Change the logits in place.

    A request may have several rows, whose tokens are guesses from the first of their ends on: they are counted last
    to first, so that none of them stays counted.
    """
    rows = sorted(rows, key=lambda row: row.end, reverse=True)
    histories = [row.history.at(row.tokens, row.end) for row in rows]
    lengths = [history.shape[1] for history in histories]
    token_E, num_seen_E, num_output_E = np.concatenate(histories, axis=1)
    asked = np.array([row.penalties for row in rows], dtype=np.float32).repeat(lengths, axis=0)
    place_E = np.array([row.row for row in rows], dtype=np.int64).repeat(lengths) * logits_RV.shape[1] + token_E

    device = logits_RV.device
    places_E = torch.from_numpy(place_E).to(device)
    flat = logits_RV.view(-1)
    changed_E = _penalised(
        flat[places_E],
        torch.from_numpy(num_seen_E).to(device),
        torch.from_numpy(num_output_E).to(device),
        *torch.from_numpy(asked).to(device).unbind(1),
    )
    flat[places_E] = changed_E


def _penalised(
    logit_E: Tensor,
    num_seen_E: Tensor,
    num_output_E: Tensor,
    repetition_E: Tensor,
    presence_E: Tensor,
    frequency_E: Tensor,
) -> Tensor:
    repeated_E = torch.where(logit_E < 0, logit_E * repetition_E, logit_E / repetition_E)
    logit_E = torch.where(num_seen_E > 0, repeated_E, logit_E)
    return logit_E - frequency_E * num_output_E - presence_E * (num_output_E > 0)
