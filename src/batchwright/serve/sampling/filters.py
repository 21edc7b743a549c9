"""Top-k, top-p, min-p and typical sampling: which tokens stay, and a draw from those.

Every filter keeps the highest tokens down to some edge, by likelihood or (typical) by another measure. So few need to
be looked at: the 64 highest first; more of the rows whose edge is not among these, at last all. What a row gets never
depends on the other rows: weights are integers (see `draws`), ranks have no ties, and a row's own logits say how far
to look.
Order as in transformers' `generate`: top-k, top-p, min-p, typical, each over what the one before left. (vLLM has min-p
before the other two, which can only differ in what top-p takes 1 to be.) Sources: top-p, Holtzman et al.,
arXiv 1904.09751; min-p, Nguyen et al., arXiv 2407.01082; typical, Meister et al., arXiv 2202.00666.

Shapes: R rows, G of these, V vocabulary, C candidates, the likeliest first,
L the fields of `Limits`.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from batchwright.serve.sampling.draws import NUM_SHARE_BITS, NUM_WEIGHT_BITS, folded, pick, weights, whole_units
from batchwright.serve.sampling.ranking import ranked
from batchwright.serve.sampling.rows import FOLD, entries

OFF = (math.inf, math.inf, 0.0, 1.0)
NUM_RANKED = (64, 1024, 16_384)
_NEVER = -1e4  # a score whose token has no weight; unlike -inf it can be multiplied with that


class Limits(NamedTuple):
    """What each row asks for, in float64: the columns of limits_RL. `OFF` asks for nothing."""

    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    typical_p_R: Tensor


class Scored(NamedTuple):
    """Rows of logits, their peaks, and one over their temperatures; a score is made where it is asked for.

    It is shifted before it is scaled: then a row's highest is 0, and no temperature is small enough for NaN.
    """

    logits_RV: Tensor
    peak_R: Tensor
    rate_R: Tensor

    def of(self, row_R: Tensor, id_RC: Tensor) -> Tensor:
        """score_RC of some tokens of some rows."""
        return (self.logits_RV[row_R[:, None], id_RC] - self.peak_R[row_R, None]) * self.rate_R[row_R, None]

    def all(self, out_RV: Tensor) -> Tensor:
        """`out_RV`, which may be wider: then it is filled up with -inf."""
        inside_RV = out_RV[:, : self.logits_RV.shape[1]]
        torch.sub(self.logits_RV, self.peak_R[:, None], out=inside_RV)
        inside_RV *= self.rate_R[:, None]
        out_RV[:, self.logits_RV.shape[1] :] = -math.inf
        return out_RV


class Kept(NamedTuple):
    """A group of rows, their candidates, and the weights of these: 0 for what is cut, the last ones or not."""

    row_G: Tensor
    id_GC: Tensor
    weight_GC: Tensor


class _Keep(Protocol):
    """Says what is kept of rows' candidates, and which rows these settle. `is_all`: there are no more tokens."""

    def __call__(self, row_R: Tensor, id_RC: Tensor, *, is_all: bool) -> tuple[Kept, Tensor]: ...


def draw_filtered(scored: Scored, share_RV: Tensor | None, limits_RL: Tensor, uniform_R: Tensor) -> Tensor:
    """A token_R of each row, by top-k, top-p, min-p, and typical behind one of them; arguments as for `kept`."""
    return _drawn(kept(scored, share_RV, limits_RL), uniform_R)


def draw_typical(scores_RV: Tensor, typical_p_R: Tensor, uniform_R: Tensor, room_RV: Tensor) -> Tensor:
    """A token_R of each row, by typical sampling alone. `scores` and `room` are written over."""
    return _drawn(most_typical(scores_RV, typical_p_R, room_RV), uniform_R)


def kept(scored: Scored, share_RV: Tensor | None, limits_RL: Tensor) -> Iterator[Kept]:
    """What the filters keep. `share_RV`, of the whole, may be missing where nobody asks for top-p without top-k."""

    def keep(row_R: Tensor, id_RC: Tensor, *, is_all: bool) -> tuple[Kept, Tensor]:
        limits = Limits(*limits_RL[row_R].unbind(1))
        score_RC = scored.of(row_R, id_RC)
        weight_RC, first_R = weights(score_RC.exp()), id_RC[:, 0]
        whole_R = torch.ones_like(first_R) if share_RV is None else weight_RC[:, 0] / share_RV[row_R, first_R]
        weight_RC, is_settled_R = _filtered(weight_RC, score_RC, whole_R, limits, is_all=is_all)
        if any_typical:
            id_RC, weight_RC = _typical(id_RC, weight_RC, score_RC, limits.typical_p_R)
        return Kept(row_R, id_RC, weight_RC), is_settled_R

    any_typical = bool((Limits(*limits_RL.unbind(1)).typical_p_R < 1).any())
    return _settled(scored.logits_RV, keep)


def most_typical(scores_RV: Tensor, typical_p_R: Tensor, room_RV: Tensor) -> Iterator[Kept]:
    """What typical sampling keeps of all tokens."""
    share_RV = torch.softmax(scores_RV, -1, out=room_RV)
    surprise_RV = scores_RV.clamp_(min=_NEVER).neg_()  # beyond the likeliest token's
    mean_RN = whole_units(folded((share_RV * surprise_RV).view(len(share_RV), FOLD, -1)))
    mean_R1 = mean_RN.sum(-1, keepdim=True) * 2.0**-NUM_SHARE_BITS
    nearness_RV = surprise_RV.sub_(mean_R1.float()).abs_().neg_()

    def keep(row_R: Tensor, id_RC: Tensor, *, is_all: bool) -> tuple[Kept, Tensor]:
        weight_RC, nearness_RC = whole_units(share_RV[row_R[:, None], id_RC]), nearness_RV[row_R[:, None], id_RC]
        edge_R1 = _edge(nearness_RC, weight_RC.cumsum(-1) * 2.0**-NUM_SHARE_BITS, typical_p_R[row_R])
        is_settled_R = (edge_R1[:, 0] > nearness_RC[:, -1]) | is_all
        return Kept(row_R, id_RC, weight_RC * (nearness_RC >= edge_R1)), is_settled_R

    return _settled(nearness_RV, keep)


def _drawn(groups: Iterable[Kept], uniform_R: Tensor) -> Tensor:
    token_R = torch.empty(len(uniform_R), dtype=torch.int64, device=uniform_R.device)
    for row_G, id_GC, weight_GC in groups:
        token_R[row_G] = entries(id_GC, pick(weight_GC, uniform_R[row_G])[0])
    return token_R


def _settled(rank_RV: Tensor, keep: _Keep) -> Iterator[Kept]:
    """What `keep` keeps of few of the highest tokens, or of more where these don't settle it."""
    num_tokens = rank_RV.shape[1]
    row_R = torch.arange(len(rank_RV), device=rank_RV.device)
    for num in (*(num for num in NUM_RANKED if num < num_tokens), num_tokens):
        group, is_settled_R = keep(row_R, ranked(rank_RV, num), is_all=num == num_tokens)
        if bool(is_settled_R.all()):
            yield group
            return
        yield Kept(*(part[is_settled_R] for part in group))
        row_R, rank_RV = row_R[~is_settled_R], rank_RV[~is_settled_R]


def _filtered(
    weight_RC: Tensor, scores_RC: Tensor, whole_R: Tensor, limits: Limits, *, is_all: bool
) -> tuple[Tensor, Tensor]:
    """The candidates' weights, 0 where a filter rules one out, and whether the rest of the tokens can't matter.

    `whole_R`: all tokens' weight, to about 1e-5 of it.
    """
    last_R1 = scores_RC[:, -1:]
    is_all_R1 = (weight_RC[:, -1:] == 0) | is_all
    kth_R1 = scores_RC.gather(1, limits.top_k_R.clamp(max=scores_RC.shape[1]).long()[:, None] - 1)
    is_cut_R1 = (kth_R1 > last_R1) | is_all_R1  # by top-k, which keeps what equals the k-th

    kept_RC = weight_RC * (scores_RC >= kth_R1)
    cumulative_RC = kept_RC.cumsum(-1)
    whole_R1 = torch.where(is_cut_R1, cumulative_RC[:, -1:], whole_R[:, None])
    inside_RC = (cumulative_RC - kept_RC) / whole_R1 < limits.top_p_R[:, None]
    kept_RC *= inside_RC & (kept_RC >= limits.min_p_R[:, None] * 2.0**NUM_WEIGHT_BITS)

    lowest_R = entries(scores_RC, (kept_RC > 0).sum(-1) - 1)
    is_bounded_R1 = torch.isinf(limits.top_k_R)[:, None] | is_cut_R1
    is_settled_R1 = (lowest_R[:, None] > last_R1) & is_bounded_R1 | is_all_R1
    return kept_RC, is_settled_R1[:, 0]


def _typical(id_RC: Tensor, weight_RC: Tensor, scores_RC: Tensor, typical_p_R: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates and weights in another order, 0 for those that typical sampling rules out.

    A token is the more typical, the closer its surprise is to the mean surprise of all; both are taken relative to the
    likeliest token's. Equals at the edge stay.
    """
    surprise_RC = -scores_RC.clamp(min=_NEVER).double()
    cumulative_RC = weight_RC.cumsum(-1)
    whole_R1 = cumulative_RC[:, -1:]
    mean_R1 = (weight_RC * surprise_RC).round_().sum(-1, keepdim=True) / whole_R1  # exact sums: x * exp(-x) < 1
    is_asked_R1 = typical_p_R[:, None] < 1
    nearness_RC = torch.where(weight_RC > 0, -(surprise_RC - mean_R1).abs(), -math.inf)
    nearness_RC = torch.where(is_asked_R1, nearness_RC, scores_RC).float()
    place_RC = ranked(nearness_RC, nearness_RC.shape[1])
    nearness_RC, weight_RC = nearness_RC.gather(1, place_RC), weight_RC.gather(1, place_RC)
    edge_R1 = _edge(nearness_RC, weight_RC.cumsum(-1) / whole_R1, typical_p_R)
    return id_RC.gather(1, place_RC), weight_RC * ((nearness_RC >= edge_R1) | ~is_asked_R1)


def _edge(nearness_RC: Tensor, reached_RC: Tensor, typical_p_R: Tensor) -> Tensor:
    """edge_R1: the nearness of the token with which the share reached is `typical_p`; nearest come first."""
    num_before_R = (reached_RC < typical_p_R[:, None]).sum(-1).clamp_(max=nearness_RC.shape[1] - 1)
    return entries(nearness_RC, num_before_R)[:, None]
