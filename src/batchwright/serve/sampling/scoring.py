"""Log-probabilities under the model's own distribution: before temperature, penalties and filters, as in OpenAI's API.

They are exact to the rounding of float32 logits: the softmax's own sum is not, so the sum of what it gave corrects it.
Cost: a softmax and about two passes more. Shapes: R rows, V vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from batchwright.serve.kernels import calls
from batchwright.serve.sampling.draws import NUM_SHARE_BITS, NUM_WEIGHT_BITS, folded, whole_units
from batchwright.serve.sampling.ranking import kernels_take, likeliest, ranked
from batchwright.serve.sampling.rows import FOLD, Room, entries, portions

Score = tuple[float, tuple[tuple[int, float], ...]]
"""A token's log-probability, and the likeliest tokens with theirs: likeliest first, equals by lower id."""


def score(logits_RV: Tensor, tokens: Sequence[int], num_top: Sequence[int], room: Room | None = None) -> list[Score]:
    """Each row's score of its token beside that row's `num_top` likeliest ones; none has probability zero.

    Logits are float32, and each row has a finite highest one. `room` for as many tokens saves new memory.
    """
    room = room or Room(logits_RV.shape[1], logits_RV.device)
    scores: list[Score] = []
    for part in portions(len(tokens), logits_RV.shape[1], logits_RV.device):
        scores += _scored(logits_RV[part], tokens[part], num_top[part], room)
    return scores


def _scored(logits_RV: Tensor, tokens: Sequence[int], num_top: Sequence[int], room: Room) -> list[Score]:
    totals: list[float] = _log_totals(logits_RV, room).tolist()
    own: list[float] = entries(logits_RV, torch.tensor(tokens, device=logits_RV.device)).tolist()
    if not any(num_top):
        return [(logit - total, ()) for logit, total in zip(own, totals, strict=True)]
    ids_RC = ranked(logits_RV, max(num_top))
    logits_RC: list[list[float]] = logits_RV.gather(1, ids_RC).tolist()
    return [
        (
            logit - total,
            tuple((t, top - total) for t, top in zip(ids[:num], tops[:num], strict=True) if top > -math.inf),
        )
        for logit, total, ids, tops, num in zip(own, totals, ids_RC.tolist(), logits_RC, num_top, strict=True)
    ]


def _log_totals(logits_RV: Tensor, room: Room) -> Tensor:
    """Log of the sum of exp(logit), in float64."""
    peak_R, token_R = likeliest(logits_RV)
    if kernels_take(logits_RV):
        return peak_R.double() + (calls.weigh(logits_RV, peak_R) * 2.0**-NUM_WEIGHT_BITS).log()
    share_RV, _ = room.of(len(logits_RV))
    torch.softmax(logits_RV, -1, out=share_RV[:, : logits_RV.shape[1]])
    share_RV[:, logits_RV.shape[1] :] = 0
    sum_R = whole_units(folded(share_RV.view(len(share_RV), FOLD, -1))).sum(-1) * 2.0**-NUM_SHARE_BITS
    return peak_R.double() - entries(share_RV, token_R).double().log() + sum_R.log()
