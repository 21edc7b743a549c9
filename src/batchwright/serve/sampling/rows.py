"""Rows of logits, worked on a portion at a time, and in blocks.

R rows, V vocabulary, N blocks of K tokens, or N of anything.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

PORTION_ON_CPU = 1 << 21  # logits worked on at once: 8 MiB of float32, which a last-level cache holds
PORTION_ELSEWHERE = 1 << 25
FOLD = 256


class Room:
    """Memory for two numbers per token of some rows; memory that is always new costs more than what it is for."""

    def __init__(self, num_vocab: int, device: torch.device) -> None:
        self._width = -(-num_vocab // FOLD) * FOLD
        self._numbers_2RV = torch.empty(2, 0, self._width, device=device)

    def of(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Two float32 tensors, of whole blocks of `FOLD` tokens; what was given out before is written over."""
        if num_rows > self._numbers_2RV.shape[1]:
            self._numbers_2RV = self._numbers_2RV.new_empty(2, num_rows, self._width)
        first_RV, second_RV = self._numbers_2RV[:, :num_rows]
        return first_RV, second_RV


def portions(num_rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """All rows, in portions whose temporaries stay in a CPU's cache, and bounded in a GPU's memory."""
    num_elements = PORTION_ON_CPU if device.type == "cpu" else PORTION_ELSEWHERE
    num_at_once = max(1, num_elements // width)
    return (slice(first, min(num_rows, first + num_at_once)) for first in range(0, num_rows, num_at_once))


def blocks(logits_RV: Tensor, width: int) -> Tensor:
    """logits_RNK: the row cut into blocks of `width` tokens, the last one filled up with -inf."""
    if missing := -logits_RV.shape[1] % width:
        logits_RV = functional.pad(logits_RV, (0, missing), value=-math.inf)
    return logits_RV.view(logits_RV.shape[0], -1, width)


def entries(x_RN: Tensor, index_R: Tensor) -> Tensor:
    """Entry `index` of each row; an entry may itself be a block."""
    return x_RN[torch.arange(x_RN.shape[0], device=x_RN.device), index_R]
