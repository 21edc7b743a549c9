"""The likeliest tokens of a row, in the one order that is used everywhere: by logit, equals by lower id.

A logit and its id make one integer, in that order; integers sort several times faster than floats with indices do, and
no tie is left to a sort's chance. Few tokens of many are found in the blocks with the highest maxima: any token of
another block is beaten in each of them.

Shapes: R rows, V vocabulary, C candidates in order, N blocks of K tokens.
"""

import numpy as np
import torch
from torch import Tensor

from batchwright.serve.kernels import calls
from batchwright.serve.kernels.build import loaded
from batchwright.serve.rows import blocks, entries

BLOCK = 64
_BLOCK_OF_ARGMAX = 256
_ID = (1 << 32) - 1


def likeliest(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The highest logit of each row and the first token that has it; NaN counts as highest.

    So one pass also finds the bad rows. By blocks, because a maximum is vectorised on a CPU and an argmax isn't; or by
    our kernel where it is in use.
    """
    if logits_RV.device.type == "cpu" and logits_RV.is_contiguous() and loaded():
        return calls.likeliest(logits_RV)
    logits_RNK = blocks(logits_RV, _BLOCK_OF_ARGMAX)
    peak_RN = logits_RNK.amax(-1)
    block_R = peak_RN.argmax(-1)
    within_R = entries(logits_RNK, block_R).argmax(-1)
    return entries(peak_RN, block_R), block_R * _BLOCK_OF_ARGMAX + within_R


def ranked(logits_RV: Tensor, num: int) -> Tensor:
    """ids_RC of the `num` likeliest tokens, or of all if there are not so many. No logit is NaN."""
    num_tokens = logits_RV.shape[1]
    num = min(num, num_tokens)
    if num * BLOCK >= num_tokens:
        return _first(_keys(logits_RV, torch.arange(num_tokens, device=logits_RV.device)), num)
    logits_RNK = blocks(logits_RV, BLOCK)
    block_RC = _first(_keys(logits_RNK.amax(-1), torch.arange(logits_RNK.shape[1], device=logits_RV.device)), num)
    id_RCK = block_RC[:, :, None] * BLOCK + torch.arange(BLOCK, device=logits_RV.device)
    row_R1 = torch.arange(len(logits_RV), device=logits_RV.device)[:, None]
    return _first(_keys(logits_RNK[row_R1, block_RC], id_RCK).flatten(1), num)


def _keys(logits: Tensor, ids: Tensor) -> Tensor:
    """One integer each, lower for what comes first: in the upper half the logit's rank, in the lower the id.

    The bits of a float, read as an integer, ascend with it where it is positive and descend where it is negative.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0 becomes 0, which it equals
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return torch.sub(ids, ascending, alpha=1 << 32)


def _first(keys_RN: Tensor, num: int) -> Tensor:
    """The ids of the `num` lowest keys of each row, in order."""
    if keys_RN.device.type != "cpu":
        return keys_RN.topk(num, largest=False, sorted=True).values & _ID
    keys = keys_RN.numpy()  # whose sort and partition are vectorised: torch's take several times longer
    if num < keys.shape[1]:
        keys = np.partition(keys, num - 1)[:, :num]
    return torch.from_numpy(np.sort(keys)) & _ID
