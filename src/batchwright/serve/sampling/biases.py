"""What is added to single logits: biases, and -inf to rule a token out.

Rulings come as flat lists of (row, token), or as a bit for every token; neither costs Python per token or per row. -inf
stays -inf whatever else is added to it, so the order of rulings does not matter.

Shapes: R rows, V vocabulary, W words of 32 bits, E entries.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from batchwright.serve.kernels import calls
from batchwright.serve.sampling.ranking import kernels_take

_BITS = 8  # that are looked up at once


class TokensOfRow(NamedTuple):
    """Some tokens of one row of logits."""

    row: int
    tokens: NDArray[np.int64]


def add(logits_RV: Tensor, rows: Sequence[TokensOfRow], biases: Sequence[NDArray[np.float32]]) -> None:
    """Add to the tokens of each row their biases; a row's tokens are different ones, and no row comes twice."""
    bias_E = torch.from_numpy(np.concatenate(biases)).to(logits_RV.device)
    logits_RV.view(-1).index_add_(0, _places(logits_RV, *flat(rows)), bias_E)


def rule_out(logits_RV: Tensor, row_E: NDArray[np.int64], token_E: NDArray[np.int64]) -> None:
    """These tokens of these rows."""
    logits_RV.view(-1).index_fill_(0, _places(logits_RV, row_E, token_E), -math.inf)


def rule_out_all_but(logits_RV: Tensor, rows: Sequence[TokensOfRow]) -> None:
    """All but the tokens of each row."""
    places_E, logits = _places(logits_RV, *flat(rows)), logits_RV.view(-1)
    allowed_E = logits[places_E]
    logits_RV[torch.tensor([row.row for row in rows], device=logits_RV.device)] = -math.inf
    logits[places_E] = allowed_E


def rule_out_unset(logits_RV: Tensor, mask_RW: Tensor) -> None:
    """Every token v whose bit v % 32 of word v // 32 is 0; words are int32, and a row of ones rules nothing out."""
    if kernels_take(logits_RV):
        calls.rule_out_unset(logits_RV, mask_RW.contiguous())
        return
    num_tokens = logits_RV.shape[1]
    constrained_R = (mask_RW != -1).any(-1).nonzero()[:, 0]
    if not len(constrained_R):
        return
    octets = mask_RW[constrained_R].contiguous().view(torch.uint8).int()
    addend_RV = functional.embedding(octets, _addends(logits_RV.device)).flatten(1)[:, :num_tokens]
    if len(constrained_R) == len(logits_RV):
        logits_RV += addend_RV
    else:
        logits_RV.index_add_(0, constrained_R, addend_RV)


def flat(rows: Sequence[TokensOfRow]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and token of each entry."""
    lengths = [len(row.tokens) for row in rows]
    row_E = np.array([row.row for row in rows], dtype=np.int64).repeat(lengths)
    return row_E, np.concatenate([row.tokens for row in rows])


def _places(logits_RV: Tensor, row_E: NDArray[np.int64], token_E: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(row_E * logits_RV.shape[1] + token_E).to(logits_RV.device)


@cache
def _addends(device: torch.device) -> Tensor:
    """For every value of eight bits what it adds to eight logits: looked up, which is faster than to unpack it."""
    octets = torch.arange(1 << _BITS)[:, None] >> torch.arange(_BITS)
    return torch.where(octets & 1 == 1, 0.0, -math.inf).to(device)
