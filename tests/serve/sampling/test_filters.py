"""The filters keep what transformers' warpers keep, however far down the ranks they have to look."""

import math

import pytest
import torch

from batchwright.serve.sampling import filters
from batchwright.serve.sampling.params import SamplingParams
from tests.serve.choosing import Asked, distribution, make_logits, transformers_distribution


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("num_tokens", [50, 1000, 6001])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_filtered_distribution_is_that_of_transformers(num_tokens, temperature, rounded):
    """Temperature, then top-k, then top-p leave the tokens and probabilities of transformers' warpers."""
    grid = [(k, p) for k in (0, 1, 5, 40, 5000, 10_000) for p in (1.0, 0.99, 0.9, 0.5, 0.1)]
    params = [SamplingParams(temperature=temperature, seed=0, top_k=k, top_p=p) for k, p in grid]
    logits_BV = make_logits(len(params), num_tokens, rounded=rounded)
    ours_BV = distribution(logits_BV, [Asked(one) for one in params])
    for i, asked in enumerate(params):
        ours_V, theirs_V = ours_BV[i], transformers_distribution(logits_BV[i : i + 1], Asked(asked))
        if rounded and asked.top_p < 1:  # which of equal tokens stay is an accident of their unstable sort
            ours_V, theirs_V = ours_V.sort().values, theirs_V.sort().values
        torch.testing.assert_close(ours_V, theirs_V, atol=1e-6, rtol=0, msg=lambda m, asked=asked: f"{asked}: {m}")
        assert (ours_V[theirs_V > 1e-8] > 0).all(), asked
        assert not (ours_V[theirs_V == 0] > 0).any(), asked


@pytest.mark.parametrize(
    "setting",
    [
        {"min_p": 0.01},
        {"min_p": 0.9},
        {"min_p": 1e-6},
        {"typical_p": 0.95},
        {"typical_p": 0.2},
        {"top_k": 100, "typical_p": 0.5},
        {"top_p": 0.97, "min_p": 0.001, "typical_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [50, 1000, 6001])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_min_p_and_typical_keep_what_transformers_keeps(num_tokens, temperature, setting):
    """Alone and behind other filters."""
    asked = Asked(SamplingParams(temperature=temperature, seed=0, **setting))
    for seed in range(5):
        logits_1V = make_logits(1, num_tokens, seed)
        ours_V, theirs_V = distribution(logits_1V, [asked])[0], transformers_distribution(logits_1V, asked)
        torch.testing.assert_close(ours_V, theirs_V, atol=1e-6, rtol=0)
        assert (ours_V[theirs_V > 1e-8] > 0).all()
        assert not (ours_V[theirs_V == 0] > 0).any()


@pytest.mark.parametrize("top_p", [0.9, 0.5, 0.25])
@pytest.mark.parametrize("num_tokens", [4, 10, 300, 5000])
def test_nucleus_of_equal_tokens_keeps_the_lower_ids(num_tokens, top_p):
    """Where all tokens are equal the nucleus is exactly its share of them, in the order that holds everywhere."""
    asked = Asked(SamplingParams(temperature=1, seed=0, top_p=top_p))
    kept_V = distribution(torch.zeros(1, num_tokens), [asked])[0] > 0
    num_kept = math.ceil(round(num_tokens * top_p, 6))
    assert kept_V.tolist() == [True] * num_kept + [False] * (num_tokens - num_kept)


@pytest.mark.parametrize("num_equal", [3, 64, 65, 200, 5000])
def test_top_k_keeps_all_that_equal_the_last(num_equal):
    """As transformers does, be they more than the candidates looked at first."""
    logits_1V = make_logits(1, 9000)
    logits_1V[0, torch.randperm(9000)[:num_equal]] = 30.0
    asked = Asked(SamplingParams(temperature=1, seed=0, top_k=2))
    assert int((distribution(logits_1V, [asked]) > 0).sum()) == num_equal


@pytest.mark.parametrize(
    "setting",
    [{"top_k": 30}, {"top_p": 0.9}, {"top_p": 0.4}, {"min_p": 0.05}, {"top_k": 500, "top_p": 0.8}, {"typical_p": 0.8}],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
def test_looking_at_few_candidates_finds_what_looking_at_all_finds(monkeypatch, spread, setting):
    """From peaked to flat rows: with 64, 4,096 or all tokens ranked at first, the same ones stay, equally likely."""
    logits_BV = make_logits(20, 10_000, spread=spread)
    asked = [Asked(SamplingParams(temperature=1, seed=0, **setting))] * 20
    few_BV = distribution(logits_BV, asked)
    monkeypatch.setattr(filters, "NUM_RANKED", ())
    all_BV = distribution(logits_BV, asked)
    assert torch.equal(few_BV > 0, all_BV > 0)
    assert torch.equal(few_BV, all_BV)


def test_a_cut_does_not_wait_for_tokens_without_weight():
    """A row of three tokens and otherwise -inf is settled among the first 64, though top-p would look on."""
    logits_1V = torch.full((1, 10_000), -math.inf)
    logits_1V[0, [4, 70, 9000]] = torch.tensor([1.0, 2.0, 3.0])
    limits_1L = torch.tensor([filters.OFF], dtype=torch.float64)
    scored = filters.Scored(logits_1V, torch.tensor([3.0]), torch.ones(1))
    groups = list(filters.kept(scored, None, limits_1L))
    assert [tuple(ids.shape) for _, ids, _ in groups] == [(1, 64)]
