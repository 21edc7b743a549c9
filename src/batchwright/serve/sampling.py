"""Chooses the next token of every row of a batch; one row's choice never depends on the other rows.

Randomness is keyed by (seed, position) alone: each drawn row spends one uniform number, hashed from that pair, on the
inverse of its cumulative distribution. So equal logits draw equal tokens, whenever and wherever a failed or preempted
step is run again; a rerun in a batch of another shape has logits that are equal up to rounding only.
Probabilities become integers (in units of 2**-34 of the likeliest token's), held in floats: their sums are exact in
whatever order a kernel adds, so equal logits give a row the same result bit for bit in a batch of 1 and of 256.
Order of the filters and treatment of ties are those of transformers' LogitsProcessors: temperature, top-k, top-p.
Cost: greedy rows pay one pass over the logits; drawn rows about six more; top-k rows are ordered k deep; of a top-p row
only the tokens near the nucleus's edge are ordered, which a histogram of the scores finds.

Shapes: B rows of the batch, R some of those rows, V vocabulary, C candidates in descending order,
N blocks of K tokens or N buckets.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from batchwright.errors import RequestError
from batchwright.serve.kernels import calls
from batchwright.serve.kernels.build import loaded
from batchwright.serve.params import SamplingParams

NUM_WEIGHT_BITS = 34  # 2**34 * 2**19 tokens = 2**53: the largest sum that a float64 still holds exactly
MAX_VOCABULARY = 1 << 19
BLOCK = 256
NUM_BUCKETS = 1024
PORTION_ON_CPU = 1 << 18  # logits worked on at once: 1 MiB of float32
PORTION_ELSEWHERE = 1 << 25
MASK_64 = (1 << 64) - 1


class Row(NamedTuple):
    """One row of logits to choose from: its request's params, and the position of the token within that request."""

    params: SamplingParams
    position: int


class Sampled(NamedTuple):
    """The choice for one row. `error`, if set, ends that request only; `token` is then -1.

    `logprob` and `top` (token, log-probability; likeliest first, equals by lower id) are filled if the params asked for
    them; tokens of probability zero are never in `top`.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: str | None = None


def sample(logits_BV: Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """Choose one token per row of float32 logits, which are left as they were. -inf rules a token out.

    Params with a temperature above 0 must hold a seed. A row holding NaN or +inf, or no finite logit at all, gets an
    `error`; the other rows are unharmed.
    """
    assert logits_BV.dtype == torch.float32
    assert logits_BV.shape[0] == len(rows)
    assert 0 < logits_BV.shape[1] <= MAX_VOCABULARY
    if not rows:
        return []
    peak_B, token_B = _likeliest(logits_BV)
    peaks: list[float] = peak_B.tolist()
    tokens: list[int] = token_B.tolist()
    sound = [i for i, peak in enumerate(peaks) if math.isfinite(peak)]

    for drawn in _portions([i for i in sound if rows[i].params.temperature > 0], logits_BV):
        scores_RV = _over_temperature(_rows(logits_BV, drawn), _rows(peak_B, drawn), [rows[i].params for i in drawn])
        for i, token in zip(drawn, _draw(scores_RV, [rows[i] for i in drawn]), strict=True):
            tokens[i] = token

    sampled = [
        Sampled(token) if math.isfinite(peak) else Sampled(-1, error=_no_distribution(peak, row.position))
        for token, peak, row in zip(tokens, peaks, rows, strict=True)
    ]
    for asked in _portions([i for i in sound if rows[i].params.logprobs is not None], logits_BV):
        num_top = [rows[i].params.logprobs or 0 for i in asked]
        logits_RV, peak_R = _rows(logits_BV, asked), _rows(peak_B, asked)
        reports = _logprobs(logits_RV, peak_R, [tokens[i] for i in asked], num_top)
        for i, (logprob, top) in zip(asked, reports, strict=True):
            sampled[i] = Sampled(tokens[i], logprob, top)
    return sampled


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments: output `position` of SplitMix64, to 53 bits.

    Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014; constants of Vigna's splitmix64.c.
    The seed is mixed once first, so that seeds that differ by the generator's increment do not share a stream.
    """
    return float(_mix(_mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z &= MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)


def _likeliest(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """The highest logit of each row and the first token that has it; NaN counts as highest.

    So one pass also finds the bad rows. By blocks, because a maximum is vectorised on a CPU and an argmax isn't; or by
    our kernel where it is in use.
    """
    if logits_BV.device.type == "cpu" and logits_BV.is_contiguous() and loaded():
        return calls.likeliest(logits_BV)
    logits_BNK = _blocks(logits_BV, BLOCK, -math.inf)
    peak_BN = logits_BNK.amax(-1)
    block_B = peak_BN.argmax(-1)
    within_B = _entries(logits_BNK, block_B).argmax(-1)
    return _entries(peak_BN, block_B), block_B * BLOCK + within_B


def _over_temperature(logits_RV: Tensor, peak_R: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits over temperature, first shifted so that the highest is 0: then no temperature is small enough for NaN."""
    smallest = torch.finfo(torch.float32).tiny
    temperature_R = _column([min(max(p.temperature, smallest), 1 / smallest) for p in params], logits_RV)
    return (logits_RV - peak_R[:, None]).div_(temperature_R[:, None])


def _weigh(scores_RV: Tensor) -> Tensor:
    """exp(score) in whole units of 2**-34, for scores whose highest is 0; any sum of them in float64 is exact."""
    return scores_RV.exp().mul_(2.0**NUM_WEIGHT_BITS).round_()


def _draw(scores_RV: Tensor, rows: Sequence[Row]) -> list[int]:
    """One token per row from its filtered distribution."""
    weights_RV = _filter(scores_RV, [row.params for row in rows])
    weights_RNK = _blocks(weights_RV, BLOCK, 0.0)
    block_RN = weights_RNK.sum(-1, dtype=torch.float64)
    uniform_R = torch.tensor([_uniform_of(row) for row in rows], dtype=torch.float64, device=scores_RV.device)
    total_R = block_RN.sum(-1)
    target_R = torch.minimum((uniform_R * total_R).floor_(), total_R - 1)
    block_R, rest_R = _invert(block_RN, target_R)
    within_R, _ = _invert(_entries(weights_RNK, block_R), rest_R)
    tokens: list[int] = (block_R * BLOCK + within_R).tolist()
    return tokens


def _uniform_of(row: Row) -> float:
    seed = row.params.seed
    assert seed is not None, "a request that is drawn has a seed by now"
    return uniform(seed, row.position)


def _invert(weights_RN: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose cumulative weight exceeds the target, and how far into its own weight the target lies."""
    cumulative_RN = weights_RN.cumsum(-1, dtype=torch.float64)
    index_R = (cumulative_RN <= target_R[:, None]).sum(-1)
    before_R = _entries(cumulative_RN, index_R) - _entries(weights_RN, index_R)
    return index_R, target_R - before_R


def _filter(scores_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The weights of the scores, zero where top-k or top-p rule a token out."""
    weights_RV = _weigh(scores_RV)
    num_tokens = scores_RV.shape[1]
    if cut := [i for i, p in enumerate(params) if 0 < p.top_k < num_tokens]:
        floor_R = _column([-math.inf] * len(params), scores_RV)
        kth_R = _kth_highest(_rows(scores_RV, cut), [params[i].top_k for i in cut])
        floor_R[torch.tensor(cut, device=scores_RV.device)] = kth_R
        weights_RV.mul_(scores_RV >= floor_R[:, None])
    if nuclear := [i for i, p in enumerate(params) if p.top_p < 1]:
        some_scores_RV, some_weights_RV = _rows(scores_RV, nuclear), _rows(weights_RV, nuclear)
        kept_RV = _nucleus(some_scores_RV, some_weights_RV, [params[i].top_p for i in nuclear])
        weights_RV.index_copy_(0, torch.tensor(nuclear, device=scores_RV.device), some_weights_RV * kept_RV)
    return weights_RV


def _kth_highest(scores_RV: Tensor, ks: Sequence[int]) -> Tensor:
    highest_RC = scores_RV.topk(max(ks), dim=-1).values
    return _entries(highest_RC, torch.tensor(ks, device=scores_RV.device) - 1)


def _nucleus(scores_RV: Tensor, weights_RV: Tensor, top_ps: Sequence[float]) -> Tensor:
    """True for the tokens to keep; a token is cut if it and all lesser ones together weigh at most 1 - top_p.

    Of equal tokens at the edge those with the higher ids stay, as after a stable ascending sort (transformers' sort is
    not, so there the choice among equals is torch's). One always stays.

    The edge is found in two strides: a histogram names the bucket of scores that holds it, then that bucket is ordered.
    """
    cut_R1 = _column([1 - p for p in top_ps], scores_RV)[:, None]
    bucket_RV = _buckets(scores_RV)
    mass_RN = torch.zeros(len(top_ps), NUM_BUCKETS, dtype=torch.float64, device=scores_RV.device)
    mass_RN.scatter_add_(1, bucket_RV, weights_RV.double())
    total_R1 = mass_RN.sum(-1, keepdim=True)
    tail_RN = total_R1 - mass_RN.cumsum(-1) + mass_RN
    reached_RN = ((tail_RN / total_R1).float() > cut_R1) & (mass_RN > 0)
    edge_R1 = (reached_RN * torch.arange(NUM_BUCKETS, device=scores_RV.device)).amax(-1, keepdim=True)

    edge_scores_RV = torch.where(bucket_RV == edge_R1, scores_RV, -math.inf)
    width = int((edge_scores_RV > -math.inf).sum(-1, dtype=torch.int32).max())
    score_RC, id_RC = edge_scores_RV.topk(width, dim=-1)
    weight_RC = weights_RV.gather(1, id_RC).double()
    tail_RC = tail_RN.gather(1, edge_R1) - weight_RC.cumsum(-1) + weight_RC
    kept_RC = ((tail_RC / total_R1).float() > cut_R1) & (score_RC > -math.inf)
    kept_RC[:, 0] = True
    lowest_R = _entries(score_RC, kept_RC.sum(-1) - 1)
    return _mark_nucleus(scores_RV, lowest_R, (kept_RC & (score_RC == lowest_R[:, None])).sum(-1))


def _buckets(scores_RV: Tensor) -> Tensor:
    """The bucket of each score, 0 for the highest: equal widths from 0 down to the lowest score that has any weight."""
    lowest_R1 = scores_RV.amin(-1, keepdim=True).clamp_(-NUM_WEIGHT_BITS * math.log(2), -1e-6)
    return (scores_RV * ((NUM_BUCKETS - 1) / lowest_R1)).clamp_(max=NUM_BUCKETS - 1).long()


def _mark_nucleus(scores_RV: Tensor, edge_R: Tensor, at_edge_R: Tensor) -> Tensor:
    """True for scores above the edge, and for the last `at_edge` of the tokens exactly at it."""
    at_RV = scores_RV == edge_R[:, None]
    num_at_R = at_RV.sum(-1, dtype=torch.int32)
    inside_RV = scores_RV >= edge_R[:, None]
    if bool((num_at_R > at_edge_R).any()):
        nth_RV = at_RV.cumsum(-1, dtype=torch.int32)
        inside_RV &= ~at_RV | (nth_RV > (num_at_R - at_edge_R)[:, None])
    return inside_RV


def _logprobs(
    logits_RV: Tensor, peak_R: Tensor, tokens: Sequence[int], num_top: Sequence[int]
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Per row the log-probability of its token and its likeliest tokens, under the unfiltered distribution."""
    weights_RV = _weigh(logits_RV - peak_R[:, None])
    totals: list[float] = weights_RV.sum(-1, dtype=torch.float64).tolist()
    log_totals = [
        peak + math.log(total * 2.0**-NUM_WEIGHT_BITS) for peak, total in zip(peak_R.tolist(), totals, strict=True)
    ]
    chosen: list[float] = _entries(logits_RV, torch.tensor(tokens, device=logits_RV.device)).tolist()
    ids_RC, scores_RC = _highest(logits_RV, max(num_top))
    return [
        (
            own - log_total,
            tuple((t, score - log_total) for t, score in zip(ids[:n], scores[:n], strict=True) if score > -math.inf),
        )
        for own, log_total, ids, scores, n in zip(
            chosen, log_totals, ids_RC.tolist(), scores_RC.tolist(), num_top, strict=True
        )
    ]


def _highest(logits_RV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Ids and logits of the `num` highest, descending, equals by lower id.

    They lie in the `num` blocks with the highest maxima (equals by lower block): any other token is beaten in each.
    """
    num = min(num, logits_RV.shape[1])
    width = 64
    logits_RNK = _blocks(logits_RV, width, -math.inf)
    block_RN = logits_RNK.amax(-1).sort(dim=-1, descending=True, stable=True).indices[:, :num].sort(-1).values
    logits_RC = logits_RNK.gather(1, block_RN[:, :, None].expand(-1, -1, width)).flatten(1)
    ids_RC = (block_RN[:, :, None] * width + torch.arange(width, device=logits_RV.device)).flatten(1)
    order_RC = logits_RC.sort(dim=-1, descending=True, stable=True).indices[:, :num]
    return ids_RC.gather(1, order_RC), logits_RC.gather(1, order_RC)


def _no_distribution(peak: float, position: int) -> str:
    """The error of a row whose highest logit is not finite."""
    held = "NaN" if math.isnan(peak) else "+inf" if peak > 0 else "-inf for every token"
    return str(
        RequestError(
            f"choosing the token at position {position}",
            f"the model's logits hold {held}, which is no distribution",
            "check the weights for non-finite values, or run in bfloat16 or float32 if float16 overflows",
        )
    )


def _portions(rows: list[int], logits_BV: Tensor) -> list[list[int]]:
    """The rows in portions whose temporaries stay in a CPU's cache, and bounded in a GPU's memory."""
    num_elements = PORTION_ON_CPU if logits_BV.device.type == "cpu" else PORTION_ELSEWHERE
    num_rows = max(1, num_elements // logits_BV.shape[1])
    return [rows[i : i + num_rows] for i in range(0, len(rows), num_rows)]


def _blocks(x_RV: Tensor, width: int, fill: float) -> Tensor:
    """The row cut into blocks of `width`, the last one filled up."""
    if missing := -x_RV.shape[1] % width:
        x_RV = functional.pad(x_RV, (0, missing), value=fill)
    return x_RV.reshape(x_RV.shape[0], -1, width)


def _entries(x_RN: Tensor, index_R: Tensor) -> Tensor:
    """Entry `index` of each row; an entry may itself be a block."""
    return x_RN[torch.arange(x_RN.shape[0], device=x_RN.device), index_R]


def _rows(x_B: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows, in ascending order; the tensor itself, uncopied, if they are all of it."""
    return x_B if len(rows) == x_B.shape[0] else x_B[torch.tensor(rows, device=x_B.device)]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)
