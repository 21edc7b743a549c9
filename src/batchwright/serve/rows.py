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


def portions(num_rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """All rows, in portions whose temporaries stay in a CPU's cache, and bounded in a GPU's memory."""
    num_elements = PORTION_ON_CPU if device.type == "cpu" else PORTION_ELSEWHERE
    num_at_once = max(1, num_elements // width)
    return (slice(first, min(num_rows, first + num_at_once)) for first in range(0, num_rows, num_at_once))


def blocks(x_RV: Tensor, width: int, filler: float = -math.inf) -> Tensor:
    """x_RNK: the row cut into blocks of `width` tokens, the last one filled up."""
    if missing := -x_RV.shape[1] % width:
        x_RV = functional.pad(x_RV, (0, missing), value=filler)
    return x_RV.view(x_RV.shape[0], -1, width)


def entries(x_RN: Tensor, index_R: Tensor) -> Tensor:
    """Entry `index` of each row; an entry may itself be a block."""
    return x_RN[torch.arange(x_RN.shape[0], device=x_RN.device), index_R]
