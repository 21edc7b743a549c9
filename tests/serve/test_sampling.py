"""Sampling is transformers' distribution, drawn reproducibly, and no row feels its neighbours."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from batchwright.errors import RequestError
from batchwright.serve import sampling
from batchwright.serve.params import SamplingParams
from batchwright.serve.sampling import (
    Row,
    Sampled,
    _filter,
    _highest,
    _over_temperature,
    sample,
    uniform,
)

GREEDY = SamplingParams()


def make_logits(num_rows, num_tokens, seed=0, spread=3.0, rounded=False):
    logits_BV = torch.randn(num_rows, num_tokens, generator=torch.Generator().manual_seed(seed)) * spread
    return logits_BV.bfloat16().float() if rounded else logits_BV


def filtered(logits_BV, params):
    weights_BV = _filter(_over_temperature(logits_BV, logits_BV.amax(-1), params), params).double()
    return weights_BV / weights_BV.sum(-1, keepdim=True)


def transformers_filtered(logits_1V, params):
    scores_1V = TemperatureLogitsWarper(float(params.temperature))(None, logits_1V)
    if params.top_k:
        scores_1V = TopKLogitsWarper(params.top_k)(None, scores_1V)
    if params.top_p < 1:
        scores_1V = TopPLogitsWarper(params.top_p)(None, scores_1V)
    return scores_1V.double().softmax(-1)


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 1.7, 50.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 100_000]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.05, 1e-9]),
    seed=st.integers(-5, 2**40),
    logprobs=st.sampled_from([None, None, 0, 1, 5, 20]),
)


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("num_tokens", [50, 1000, 6001])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_filtered_distribution_is_that_of_transformers(num_tokens, temperature, rounded):
    """Temperature, then top-k, then top-p leave the tokens and probabilities of transformers' warpers."""
    grid = [(k, p) for k in (0, 1, 5, 40, 5000, 10_000) for p in (1.0, 0.99, 0.9, 0.5, 0.1)]
    params = [SamplingParams(temperature=temperature, top_k=k, top_p=p) for k, p in grid]
    logits_BV = make_logits(len(params), num_tokens, rounded=rounded)
    ours_BV = filtered(logits_BV, params)
    for i, asked in enumerate(params):
        ours_V, theirs_V = ours_BV[i], transformers_filtered(logits_BV[i : i + 1], asked)[0]
        if rounded and asked.top_p < 1:  # which of equal tokens stay is an accident of their unstable sort
            ours_V, theirs_V = ours_V.sort().values, theirs_V.sort().values
        torch.testing.assert_close(ours_V, theirs_V, atol=1e-6, rtol=0, msg=lambda m, asked=asked: f"{asked}: {m}")
        likely_V = theirs_V > 1e-8
        assert (ours_V[likely_V] > 0).all(), asked
        assert not (ours_V[theirs_V == 0] > 0).any(), asked


@pytest.mark.parametrize("top_p", [0.9, 0.5, 0.25])
@pytest.mark.parametrize("num_tokens", [4, 10, 300, 5000])
def test_nucleus_of_equal_tokens_keeps_the_higher_ids(num_tokens, top_p):
    """Where all tokens are equal the nucleus is exactly its share of them, taken from the end as by a stable sort."""
    kept_V = filtered(torch.zeros(1, num_tokens), [SamplingParams(temperature=1, top_p=top_p)])[0] > 0
    num_kept = math.ceil(round(num_tokens * top_p, 6))
    assert kept_V.tolist() == [False] * (num_tokens - num_kept) + [True] * num_kept


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=0),
        SamplingParams(temperature=0.6, seed=1),
        SamplingParams(temperature=2.0, seed=2),
        SamplingParams(temperature=1.0, top_k=6, seed=3),
        SamplingParams(temperature=1.0, top_p=0.8, seed=4),
        SamplingParams(temperature=1.3, top_k=9, top_p=0.9, seed=5),
    ],
    ids=["plain", "cold", "hot", "top-k", "top-p", "all"],
)
def test_draws_follow_the_filtered_distribution(params):
    """10,000 draws at consecutive positions pass a chi-square test, and nothing that was filtered out is drawn."""
    num_draws = 10_000
    logits_1V = make_logits(1, 24, seed=7, spread=1.0)
    expected_V = transformers_filtered(logits_1V, params)[0]
    drawn = sample(logits_1V.expand(num_draws, -1), [Row(params, position) for position in range(num_draws)])
    counts_V = torch.bincount(torch.tensor([s.token for s in drawn]), minlength=24)
    possible_V = expected_V > 0
    assert counts_V[~possible_V].sum() == 0
    assert chisquare(counts_V[possible_V], expected_V[possible_V] * num_draws).pvalue > 0.001


def test_draws_of_different_seeds_are_independent():
    """At one position, 10,000 consecutive seeds draw from the distribution just as 10,000 positions of one seed do."""
    logits_1V = make_logits(1, 24, seed=7, spread=1.0)
    rows = [Row(SamplingParams(temperature=1.0, seed=seed), 3) for seed in range(10_000)]
    counts_V = torch.bincount(torch.tensor([s.token for s in sample(logits_1V.expand(10_000, -1), rows)]), minlength=24)
    assert chisquare(counts_V, logits_1V[0].double().softmax(-1) * 10_000).pvalue > 0.001


def test_uniform_is_splitmix64():
    """The generator's own output is Vigna's reference: a stream of state 0 begins with e220a8397b1dcdaf."""
    assert sampling._mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert uniform(0, 0) == (0xE220A8397B1DCDAF >> 11) / 2**53
    assert all(0 <= uniform(seed, p) < 1 for seed in (-1, 0, 2**64 - 1) for p in range(1000))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(sampling_params, st.integers(0, 10_000)), min_size=1, max_size=9),
    st.sampled_from([1, 3, 37, 256, 777, 4501]),
    st.booleans(),
    st.data(),
)
def test_a_row_is_the_same_in_any_batch(keyed, num_tokens, rounded, data):
    """Token and log-probabilities of a row are bitwise those of the row alone, whatever surrounds it, in any order."""
    rows = [Row(params, position) for params, position in keyed]
    logits_BV = make_logits(len(rows), num_tokens, seed=data.draw(st.integers(0, 99)), rounded=rounded)
    before_BV = logits_BV.clone()
    together = sample(logits_BV, rows)
    assert together == [sample(logits_BV[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    order = data.draw(st.permutations(range(len(rows))))
    assert [together[i] for i in order] == sample(logits_BV[list(order)], [rows[i] for i in order])
    assert torch.equal(logits_BV, before_BV)


def test_a_large_batch_is_sampled_in_portions_with_the_same_result(monkeypatch):
    """Where temporaries are bounded to two rows at a time, seven rows choose as they do all at once."""
    rows = [Row(SamplingParams(temperature=1, top_p=0.9, seed=0, logprobs=i), i) for i in range(7)]
    logits_BV = make_logits(7, 100)
    at_once = sample(logits_BV, rows)
    monkeypatch.setattr(sampling, "PORTION_ON_CPU", 200)
    assert sample(logits_BV, rows) == at_once


@pytest.mark.parametrize("num_tokens", [1, 5, 256, 1000, 49_152])
def test_greedy_is_argmax(num_tokens):
    """Temperature 0 gives the first of the highest logits, alone or beside rows that are drawn."""
    logits_BV = make_logits(6, num_tokens, rounded=True)
    expected = logits_BV.argmax(-1).tolist()
    assert [s.token for s in sample(logits_BV, [Row(GREEDY, 0)] * 6)] == expected
    mixed = [Row(replace(GREEDY, temperature=float(i % 2), seed=0), 0) for i in range(6)]
    assert [s.token for s in sample(logits_BV, mixed)][::2] == expected[::2]


@pytest.mark.parametrize(
    "setting",
    [{"temperature": 1, "top_k": 1}, {"temperature": 1e-300}, {"temperature": 1e-9}],
    ids=str,
)
def test_a_vanishing_distribution_is_its_likeliest_token(setting):
    """Top-k of 1, and temperatures too small for float32, choose as greedy does instead of failing."""
    logits_BV = make_logits(1, 500)
    params = SamplingParams(**setting, seed=0)
    drawn = sample(logits_BV.expand(50, -1), [Row(params, position) for position in range(50)])
    assert {s.token for s in drawn} == {int(logits_BV.argmax())}


@pytest.mark.parametrize(
    ("value", "named"), [(math.nan, "NaN"), (math.inf, "+inf"), (-math.inf, "-inf for every token")]
)
@pytest.mark.parametrize("num_bad", [1, 300])
def test_a_row_without_a_distribution_fails_alone(value, named, num_bad):
    """NaN, +inf or nothing finite in one row's logits is that row's error, and the other rows choose as without it."""
    rows = [
        Row(params, 11)
        for params in (
            GREEDY,
            SamplingParams(temperature=1.0, seed=4),
            SamplingParams(temperature=1.0, top_p=0.9, seed=4, logprobs=3),
            SamplingParams(temperature=1.0, top_k=9, seed=4),
            SamplingParams(logprobs=2),
        )
    ]
    logits_BV = make_logits(5, 300)
    healthy = sample(logits_BV, rows)
    for bad in range(5):
        broken_BV = logits_BV.clone()
        broken_BV[bad, -num_bad if value > -math.inf else 0 :] = value
        sampled = sample(broken_BV, rows)
        assert sampled[:bad] + sampled[bad + 1 :] == healthy[:bad] + healthy[bad + 1 :]
        assert (sampled[bad].token, sampled[bad].logprob, sampled[bad].top) == (-1, None, ())
        assert "position 11" in sampled[bad].error
        assert f"hold {named}," in sampled[bad].error


def test_tokens_masked_to_minus_infinity_are_never_chosen():
    """-inf rules a token out of the draw and out of the alternatives, and harms nothing else."""
    logits_BV = torch.full((200, 40), -math.inf)
    logits_BV[:, 5], logits_BV[:, 33] = 1.0, 1.0
    params = SamplingParams(temperature=1.0, top_k=10, top_p=0.999, seed=0, logprobs=4)
    sampled = sample(logits_BV, [Row(params, position) for position in range(200)])
    assert {s.token for s in sampled} == {5, 33}
    assert sampled[0].top == ((5, pytest.approx(-math.log(2))), (33, pytest.approx(-math.log(2))))


@pytest.mark.parametrize("num_tokens", [30, 1000, 49_152])
def test_logprobs_are_those_of_the_unfiltered_distribution(num_tokens):
    """Log-probabilities are log_softmax of the raw logits, whatever temperature and filters chose the token."""
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, seed=0, logprobs=7)
    logits_BV = make_logits(4, num_tokens)
    expected_BV = logits_BV.double().log_softmax(-1)
    for i, one in enumerate(sample(logits_BV, [Row(params, position) for position in range(4)])):
        assert one.logprob == pytest.approx(float(expected_BV[i, one.token]), abs=1e-6)
        values, ids = expected_BV[i].topk(7)
        assert [t for t, _ in one.top] == ids.tolist()
        assert [p for _, p in one.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_logprobs_are_only_given_where_asked():
    """None gives nothing, 0 the chosen token's own, n that and n alternatives, side by side in one batch."""
    rows = [Row(replace(GREEDY, logprobs=n), 0) for n in (None, 0, 2)]
    nothing, own, two = sample(make_logits(1, 30).expand(3, -1), rows)
    assert nothing == Sampled(two.token)
    assert own == Sampled(two.token, two.logprob)
    assert len(two.top) == 2
    assert two.top[0] == (two.token, two.logprob)


@settings(deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=400), st.integers(0, 20))
def test_alternatives_are_ordered_by_logit_then_id(levels, num):
    """Among equal logits the lower id comes first, also across blocks."""
    ids_RC, _ = _highest(torch.tensor([levels], dtype=torch.float32), num)
    assert ids_RC[0].tolist() == sorted(range(len(levels)), key=lambda i: (-levels[i], i))[:num]


def test_an_empty_batch_samples_nothing():
    """No rows give no choices."""
    assert sample(torch.zeros(0, 10), []) == []


@pytest.mark.parametrize(
    "setting",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 2.0},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"seed": 2**64},
        {"seed": "x"},
        {"stop": ""},
        {"stop": ("a", "")},
        {"stop": (3,)},
        {"stop": ("a",) * 17},
        {"stop_token_ids": (-1,)},
        {"stop_token_ids": ("a",)},
        {"logprobs": 21},
        {"logprobs": -1},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused(setting):
    """The error names the setting, its value, and what is allowed."""
    [(name, value)] = setting.items()
    with pytest.raises(RequestError) as refused:
        SamplingParams(**setting)
    assert refused.value.asked.startswith(f"sampling with {name}=")
    assert str(value) in refused.value.asked
    assert refused.value.remedy.startswith(f"{name} must be ")


def test_no_stop_string_may_be_written_as_none():
    """`stop=None`, as in an OpenAI request, is the same as no stop strings."""
    assert SamplingParams(stop=None) == SamplingParams()


def test_drawing_without_a_seed_is_a_bug_of_the_caller():
    """Greedy rows need no seed; a row that is drawn must have been given one, for sampling itself has no randomness."""
    logits_BV = make_logits(1, 30)
    sample(logits_BV, [Row(GREEDY, 0)])
    with pytest.raises(AssertionError, match="has a seed"):
        sample(logits_BV, [Row(SamplingParams(temperature=1.0), 0)])


def test_a_stop_string_is_bounded_in_length():
    """1,000 characters are allowed and 1,001 refused, by an error that doesn't repeat them all."""
    assert SamplingParams(stop="x" * 1000).stop == ("x" * 1000,)
    with pytest.raises(RequestError, match="at most 16 strings of 1 to 1,000 characters") as refused:
        SamplingParams(stop="x" * 1001)
    assert len(str(refused.value)) < 500


def test_a_bare_stop_string_counts_as_one():
    """`stop="END"` is one stop string of three letters; lists become tuples, so params stay hashable."""
    assert SamplingParams(stop="END").stop == ("END",)
    assert hash(SamplingParams(stop=["a", "b"], stop_token_ids=[1])) == hash(
        SamplingParams(stop=("a", "b"), stop_token_ids=(1,))
    )
