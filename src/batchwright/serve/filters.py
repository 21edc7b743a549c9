"""Top-k, top-p, min-p and typical sampling: which tokens stay, and a draw from those.

Every filter but typical keeps the likeliest tokens down to some edge, so few need to be looked at: the 64 likeliest
first; the 4,096 likeliest of rows whose edge is not among these; at last all tokens. What a row gets never depends on
the other rows: weights are integers (see `draws`), ranks have no ties, and a row's own logits say how far to look.
Order as in transformers' `generate`: top-k, top-p, min-p, typical, each over what the one before left. (vLLM has min-p
before the other two, which can only differ in what top-p takes 1 to be.) Sources: top-p, Holtzman et al.,
arXiv 1904.09751; min-p, Nguyen et al., arXiv 2407.01082; typical, Meister et al., arXiv 2202.00666.

Shapes: R rows, G of these, V vocabulary, C candidates, the likeliest first.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from batchwright.serve.draws import NUM_WEIGHT_BITS, pick, weights
from batchwright.serve.ranking import ranked
from batchwright.serve.rows import entries

NUM_RANKED = (64, 4096)
_LARGEST_GAP = (NUM_WEIGHT_BITS + 1) * math.log(2)  # of scores below the highest, that any weight is left of


class Limits(NamedTuple):
    """What each row asks for, in float64; `OFF` asks for nothing."""

    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    typical_p_R: Tensor


OFF = (math.inf, math.inf, 0.0, 1.0)


def whole(scores_RV: Tensor, room_RV: Tensor) -> Tensor:
    """The weight_R of all tokens of a row, in units of `weights`, to about 1e-5 of it; `room` is written over."""
    return 2.0**NUM_WEIGHT_BITS / torch.softmax(scores_RV, -1, out=room_RV).amax(-1).double()


def draw_filtered(scores_RV: Tensor, whole_R: Tensor, limits: Limits, uniform_R: Tensor) -> Tensor:
    """A token_R of each row, from what `kept` keeps."""
    token_R = torch.empty(len(scores_RV), dtype=torch.int64, device=scores_RV.device)
    for row_G, id_GC, weight_GC in kept(scores_RV, whole_R, limits):
        token_R[row_G] = entries(id_GC, pick(weight_GC, uniform_R[row_G])[0])
    return token_R


def kept(scores_RV: Tensor, whole_R: Tensor, limits: Limits) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What the filters keep, in groups of rows: which these are, their candidates, and the weights, 0 for what is cut.

    A row's highest score is 0. `whole_R`, of all its tokens, matters only where top-p is asked for without top-k.
    """
    num_tokens = scores_RV.shape[1]
    row_R = torch.arange(len(scores_RV), device=scores_RV.device)
    for num in (*(num for num in NUM_RANKED if num < num_tokens), num_tokens):
        id_RC = ranked(scores_RV, num)
        weight_RC, is_settled_R = _filtered(scores_RV.gather(1, id_RC), whole_R, limits, is_all=num == num_tokens)
        if bool(is_settled_R.all()):
            yield row_R, id_RC, weight_RC
            return
        yield row_R[is_settled_R], id_RC[is_settled_R], weight_RC[is_settled_R]
        rest_R = ~is_settled_R
        row_R, scores_RV, whole_R = row_R[rest_R], scores_RV[rest_R], whole_R[rest_R]
        limits = Limits(*(limit_R[rest_R] for limit_R in limits))


def _filtered(scores_RC: Tensor, whole_R: Tensor, limits: Limits, *, is_all: bool) -> tuple[Tensor, Tensor]:
    """The candidates' weights, 0 where a filter rules one out, and whether the rest of the tokens can't matter."""
    weight_RC, last_R1 = weights(scores_RC.exp()), scores_RC[:, -1:]
    is_all_R1 = (weight_RC[:, -1:] == 0) | is_all
    kth_R1 = scores_RC.gather(1, limits.top_k_R.clamp(max=scores_RC.shape[1]).long()[:, None] - 1)
    is_cut_R1 = (kth_R1 > last_R1) | is_all_R1  # by top-k, which keeps what equals the k-th

    kept_RC = weight_RC * (scores_RC >= kth_R1)
    whole_R1 = torch.where(is_cut_R1, kept_RC.sum(-1, keepdim=True), whole_R[:, None])
    before_RC = kept_RC.cumsum(-1) - kept_RC
    inside_RC = before_RC / whole_R1 < limits.top_p_R[:, None]
    kept_RC *= inside_RC & (kept_RC >= limits.min_p_R[:, None] * 2.0**NUM_WEIGHT_BITS)

    lowest_R = entries(scores_RC, (kept_RC > 0).sum(-1) - 1)
    is_bounded_R1 = torch.isinf(limits.top_k_R)[:, None] | is_cut_R1
    is_settled_R1 = (lowest_R[:, None] > last_R1) & is_bounded_R1 | is_all_R1
    return _typical(kept_RC, scores_RC, limits.typical_p_R), is_settled_R1[:, 0]


def _typical(weight_RC: Tensor, scores_RC: Tensor, typical_p_R: Tensor) -> Tensor:
    """The weights, 0 where a token is less typical than those that together weigh `typical_p` of the whole.

    A token is the more typical, the closer its surprise is to the mean surprise of all. Both are taken relative to the
    likeliest token's, which changes no distance. Equals at the edge stay.
    """
    is_asked_R = typical_p_R < 1
    if not bool(is_asked_R.any()):
        return weight_RC
    gap_RC = (-scores_RC).clamp(max=_LARGEST_GAP).double()
    whole_R1 = weight_RC.sum(-1, keepdim=True)
    mean_R1 = (weight_RC * gap_RC).round_().sum(-1, keepdim=True) / whole_R1  # exact sums: gap * exp(-gap) < 1
    nearness_RC = torch.where(weight_RC > 0, -(gap_RC - mean_R1).abs(), -math.inf).float()
    place_RC = ranked(nearness_RC, nearness_RC.shape[1])
    reached_RC = weight_RC.gather(1, place_RC).cumsum(-1) / whole_R1
    num_before_R = (reached_RC < typical_p_R[:, None]).sum(-1).clamp_(max=nearness_RC.shape[1] - 1)
    edge_R = entries(nearness_RC, entries(place_RC, num_before_R))
    return weight_RC * ((nearness_RC >= edge_R[:, None]) | ~is_asked_R[:, None])
