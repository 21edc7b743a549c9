"""The likeliest tokens of a row, in the one order that is used everywhere: by logit, equals by lower id.

A logit and its place make one integer, in that order: integers sort several times faster than floats with indices do,
and no tie is left to a sort's chance. Few tokens of many are found in the blocks with the highest maxima: any token of
another block is beaten in each of them. On a CPU it is numpy that partitions and sorts, with vectors: torch takes
several times longer.

Shapes: R rows, V vocabulary, C candidates in order, N blocks of K tokens, or N of anything.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchwright.serve.kernels import calls
from batchwright.serve.kernels.build import loaded
from batchwright.serve.sampling.rows import blocks, entries

_BLOCK_BITS = 6
BLOCK = 1 << _BLOCK_BITS
_BLOCK_OF_ARGMAX = 256
_PLACE = (1 << 32) - 1


def likeliest(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The highest logit of each row and the first token that has it; NaN counts as highest.

    So one pass also finds the bad rows. By blocks, because a maximum is vectorised on a CPU and an argmax isn't; or by
    our kernel where it is in use.
    """
    if kernels_take(logits_RV):
        return calls.likeliest(logits_RV)
    logits_RNK = blocks(logits_RV, _BLOCK_OF_ARGMAX)
    peak_RN = logits_RNK.amax(-1)
    block_R = peak_RN.argmax(-1)
    within_R = entries(logits_RNK, block_R).argmax(-1)
    return entries(peak_RN, block_R), block_R * _BLOCK_OF_ARGMAX + within_R


def kernels_take(logits_RV: Tensor) -> bool:
    """Whether our kernels are in use, and read these logits where they are."""
    return logits_RV.device.type == "cpu" and logits_RV.is_contiguous() and loaded()


def ranked(logits_RV: Tensor, num: int) -> Tensor:
    """ids_RC of the `num` likeliest tokens, or of all if there are not so many. No logit is NaN."""
    num = min(num, logits_RV.shape[1])
    if num * BLOCK >= logits_RV.shape[1]:
        return _highest(logits_RV, num)
    logits_RNK = blocks(logits_RV, BLOCK)
    block_RC = _places_of_highest(logits_RNK.amax(-1), num)  # ascending, so that places below ascend with ids
    row_R1 = torch.arange(len(logits_RV), device=logits_RV.device)[:, None]
    place_RC = _highest(logits_RNK[row_R1, block_RC].flatten(1), num)
    return block_RC.gather(1, place_RC >> _BLOCK_BITS) * BLOCK + (place_RC & (BLOCK - 1))


def _highest(logits_RN: Tensor, num: int) -> Tensor:
    """place_RC of the `num` highest, in order; equals by lower place."""
    place_RC = _places_of_highest(logits_RN, num)
    key_RC = _keys(logits_RN.gather(1, place_RC), place_RC)
    sorted_RC = torch.from_numpy(np.sort(key_RC.numpy())) if key_RC.device.type == "cpu" else key_RC.sort(-1).values
    return sorted_RC & _PLACE


def _keys(logits: Tensor, places: Tensor) -> Tensor:
    """One integer each, lower for what comes first: in the upper half the logit's rank, in the lower the place.

    The bits of a float, read as an integer, ascend with it where it is positive and descend where it is negative.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0 becomes 0, which it equals
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return torch.sub(places, ascending, alpha=1 << 32)


def _places_of_highest(logits_RN: Tensor, num: int) -> Tensor:
    """place_RC of the `num` highest, ascending; of equals at the edge the lower ones."""
    if logits_RN.device.type == "cpu":
        return torch.from_numpy(_reaching(logits_RN.numpy(), num))
    key_RN = _keys(logits_RN, torch.arange(logits_RN.shape[1], device=logits_RN.device))
    return (key_RN.topk(num, largest=False, sorted=False).values & _PLACE).sort(-1).values


def _reaching(logits_RN: NDArray[np.float32], num: int) -> NDArray[np.int64]:
    """All places that reach the `num`-th highest, which are more only where others equal that."""
    num_rows, width = logits_RN.shape
    if num == width:
        return np.broadcast_to(np.arange(width), logits_RN.shape).copy()
    edge_R1 = np.partition(logits_RN, width - num)[:, width - num, None]
    found = np.flatnonzero(logits_RN >= edge_R1)
    if len(found) == num_rows * num:
        places: NDArray[np.int64] = found.reshape(num_rows, num) % width
        return places
    return np.stack(
        [_without_last_equals(logits_N, edge, num) for logits_N, edge in zip(logits_RN, edge_R1, strict=True)]
    )


def _without_last_equals(logits_N: NDArray[np.float32], edge: NDArray[np.float32], num: int) -> NDArray[np.int64]:
    above, at = np.flatnonzero(logits_N > edge), np.flatnonzero(logits_N == edge)
    return np.sort(np.concatenate([above, at[: num - len(above)]]))
