"""Log-probabilities of given tokens, as of a prompt's."""

import math

import pytest
import torch

from batchwright.serve.sampling import rows
from batchwright.serve.sampling.scoring import score
from tests.serve.choosing import make_logits


@pytest.mark.parametrize("num_tokens", [1, 50, 1000, 49_152])
@pytest.mark.parametrize("spread", [0.0, 3.0, 9.0])
def test_scores_are_those_of_log_softmax(num_tokens, spread):
    """To the rounding of float32, though the vocabulary is large and the softmax's own sum is not that good."""
    logits_RV = make_logits(4, num_tokens, spread=spread)
    tokens = [0, num_tokens // 3, num_tokens // 2, num_tokens - 1]
    expected_RV = logits_RV.double().log_softmax(-1)
    for i, (logprob, top) in enumerate(score(logits_RV, tokens, [3, 0, 1, 20])):
        assert logprob == pytest.approx(float(expected_RV[i, tokens[i]]), abs=1e-6)
        assert [p for _, p in top] == pytest.approx(expected_RV[i].sort(descending=True).values[: len(top)], abs=1e-6)
        assert len(top) == min([3, 0, 1, 20][i], num_tokens)


def test_a_row_scores_as_it_does_alone(monkeypatch):
    """Bitwise, also where there are more rows than are worked on at once."""
    logits_RV = make_logits(9, 5000)
    together = score(logits_RV, range(9), [5] * 9)
    assert together == [score(logits_RV[i : i + 1], [i], [5])[0] for i in range(9)]
    monkeypatch.setattr(rows, "PORTION_ON_CPU", 10_000)
    assert score(logits_RV, range(9), [5] * 9) == together


def test_what_is_impossible_is_no_alternative():
    """A token of probability zero has -inf, and is not among the likeliest."""
    [(logprob, top)] = score(torch.tensor([[0.0, -math.inf, 0.0]]), [1], [3])
    assert logprob == -math.inf
    assert top == ((0, pytest.approx(-math.log(2))), (2, pytest.approx(-math.log(2))))
