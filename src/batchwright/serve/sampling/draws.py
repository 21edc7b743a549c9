"""Turns a uniform number into a token of a row: the inverse of the row's cumulative distribution.

Weights become integers, held in float64, whose sums are exact in whatever order a kernel adds; where a whole row is to
be summed, the sum is a tree of float32 additions whose shape is fixed. So equal logits give a row the same token, bit
for bit, in a batch of 1 and of 256. Cost: a softmax, and about two passes more.

Shapes: R rows, V vocabulary (a multiple of FOLD), F = FOLD, N of anything; V = F x N where a row is folded.
"""

import torch
from torch import Tensor

from batchwright.serve.sampling.rows import FOLD, entries

NUM_WEIGHT_BITS = 34  # 2**34 * 2**19 tokens = 2**53: the largest sum that a float64 still holds exactly
MAX_VOCABULARY = 1 << 19
NUM_SHARE_BITS = 50  # of shares that sum to about 1


def draw(scores_RV: Tensor, uniform_R: Tensor, room_RV: Tensor) -> Tensor:
    """A token_R of each row, whose scores are log-probabilities up to a constant; `room` is written over."""
    share_RFN = torch.softmax(scores_RV, -1, out=room_RV).view(len(scores_RV), FOLD, -1)
    column_R, rest_R = pick(whole_units(folded(share_RFN)), uniform_R)
    share_RF = share_RFN.transpose(1, 2)[torch.arange(len(scores_RV), device=scores_RV.device), column_R]
    within_R, _ = pick(weights(share_RF / share_RF.amax(-1, keepdim=True)), rest_R)
    return within_R * share_RFN.shape[2] + column_R


def weights(relative: Tensor) -> Tensor:
    """Probabilities relative to the likeliest token's as integers, in float64."""
    return relative.mul(2.0**NUM_WEIGHT_BITS).round_().double()


def whole_units(share_RN: Tensor) -> Tensor:
    """Shares of about 1 in all as integers, in float64."""
    return share_RN.double().mul_(2.0**NUM_SHARE_BITS).round_()


def pick(weights_RN: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """The index in whose part of the row's weight the uniform number falls, and how far into it, in [0, 1)."""
    cumulative_RN = weights_RN.cumsum(-1)
    total_R = cumulative_RN[:, -1]
    target_R = torch.minimum((uniform_R * total_R).floor_(), total_R - 1)
    index_R = (cumulative_RN <= target_R[:, None]).sum(-1)
    weight_R = entries(weights_RN, index_R)
    return index_R, (target_R - (entries(cumulative_RN, index_R) - weight_R)) / weight_R


def folded(x_RFN: Tensor) -> Tensor:
    """sum_RN over F, a power of two, in an order that depends on nothing else."""
    while (num := x_RFN.shape[1]) > 1:
        x_RFN = x_RFN[:, : num // 2] + x_RFN[:, num // 2 :]
    return x_RFN[:, 0]
