"""Sampling is transformers' distribution, drawn reproducibly, and no row feels its neighbours."""

import gc
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from batchwright.serve.sampling import rows as rows_module
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sampling.sampler import Row, Sampled, Sampler
from tests.serve.choosing import (
    CPU,
    Asked,
    choose,
    choose_at,
    distribution,
    make_logits,
    seeded,
    transformers_distribution,
    transformers_processed,
)

GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=1.0, seed=0)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
END_IDS = (0, 7)


@st.composite
def asked(draw, num_tokens, *, greedy=True):
    """A row that asks for any combination of features."""
    token = st.integers(0, num_tokens - 1)
    text = draw(st.lists(token, min_size=1, max_size=30))
    temperatures = [1e-30, 0.3, 1.0, 1.7, 50.0]
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, *temperatures] if greedy else temperatures)),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 7, 40, 100_000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.99, 0.9, 0.5, 0.05, 1e-9])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0])),
        typical_p=draw(st.sampled_from([1.0, 1.0, 1.0, 0.9, 0.4])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.8, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -0.3])),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, -1.5, 2.0, 8.0]), max_size=5)),
        bad_words=draw(st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=3)),
        min_tokens=draw(st.sampled_from([0, 0, 3, 20])),
        seed=draw(st.integers(-5, 2**40)),
        logprobs=draw(st.sampled_from([None, None, 0, 1, 5, 20])),
    )
    return Asked(params, text, draw(st.integers(1, len(text))), draw(st.sampled_from([(), (0,), (1, num_tokens - 1)])))


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.sampled_from([30, 1000, 6001]), st.booleans(), st.integers(0, 99), st.data())
def test_any_combination_gives_the_distribution_of_transformers(num_tokens, rounded, seed, data):
    """Penalties, biases, bad words, ends and filters, together and with ties, as `generate` applies its processors.

    Which of equal tokens stay in a nucleus is an accident of its unstable sort, so with ties only the probabilities
    are held against each other. Too cold a temperature has no distribution in transformers.
    """
    one = data.draw(asked(num_tokens, greedy=False).filter(lambda one: one.params.temperature > 0.1))
    logits_1V = make_logits(1, num_tokens, seed, rounded=rounded)
    ours_V, theirs_V = distribution(logits_1V, [one])[0], transformers_distribution(logits_1V, one)
    if rounded:
        ours_V, theirs_V = ours_V.sort().values, theirs_V.sort().values
    torch.testing.assert_close(ours_V, theirs_V, atol=2e-6, rtol=0)
    assert (ours_V[theirs_V > 1e-8] > 0).all()
    assert not (ours_V[theirs_V == 0] > 0).any()


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 99), st.data())
def test_processed_logits_are_those_of_transformers(seed, data):
    """Bit for bit, whatever else is in the batch."""
    several = data.draw(st.lists(asked(50), min_size=1, max_size=4))
    logits_BV = make_logits(len(several), 50, seed)
    sampler = Sampler(50, CPU)
    ours_BV = sampler._processed(logits_BV, [one.row(sampler) for one in several], None)
    theirs_BV = [transformers_processed(logits_BV[i : i + 1], one) for i, one in enumerate(several)]
    assert torch.equal(ours_BV, torch.cat(theirs_BV))


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.0},
        {"top_k": 6},
        {"top_p": 0.8},
        {"min_p": 0.15},
        {"typical_p": 0.7},
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": {2: 3.0, 11: -2.0}},
        {"temperature": 1.3, "top_k": 15, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9, "repetition_penalty": 1.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [24, 300])
def test_draws_follow_the_distribution(setting, num_tokens):
    """10,000 draws of consecutive seeds pass a chi-square test, and nothing that was filtered out is drawn."""
    num_draws = 10_000
    logits_1V = make_logits(1, num_tokens, seed=7, spread=1.0)
    params = SamplingParams(**{"temperature": 1.0, "seed": 0} | setting)
    expected_V = transformers_distribution(logits_1V, Asked(params, TEXT, 5))
    several = [Asked(one, TEXT, 5) for one in seeded(params, num_draws)]
    drawn = choose(logits_1V.expand(num_draws, -1).contiguous(), several)
    counts_V = torch.bincount(torch.tensor([s.token for s in drawn]), minlength=num_tokens)
    assert counts_V[expected_V == 0].sum() == 0
    is_likely_V = expected_V * num_draws >= 5
    binned = torch.cat([counts_V[is_likely_V], counts_V[~is_likely_V].sum()[None]])
    expected = torch.cat([expected_V[is_likely_V], expected_V[~is_likely_V].sum()[None]]) * num_draws
    assert chisquare(binned[expected > 0], expected[expected > 0]).pvalue > 0.001


def test_draws_at_different_positions_are_independent():
    """10,000 consecutive positions of one seed draw from the distribution just as 10,000 seeds at one position do."""
    logits_1V = make_logits(1, 24, seed=7, spread=1.0)
    sampler = Sampler(24, CPU)
    slot, tokens = sampler.add(DRAWN, []), [0] * 10_000
    drawn = sampler.sample(logits_1V.expand(10_000, -1), [Row(slot, tokens, end) for end in range(10_000)])
    counts_V = torch.bincount(torch.tensor([s.token for s in drawn]), minlength=24)
    assert chisquare(counts_V, logits_1V[0].double().softmax(-1) * 10_000).pvalue > 0.001


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([3, 37, 256, 777, 4501]), st.booleans(), st.data())
def test_a_row_is_the_same_in_any_batch(num_tokens, rounded, data):
    """Token and log-probabilities of a row are bitwise those of the row alone, whatever surrounds it, in any order."""
    several = data.draw(st.lists(asked(num_tokens), min_size=1, max_size=7))
    logits_BV = make_logits(len(several), num_tokens, seed=data.draw(st.integers(0, 99)), rounded=rounded)
    before_BV = logits_BV.clone()
    together = choose(logits_BV, several)
    assert together == [choose(logits_BV[i : i + 1], [one])[0] for i, one in enumerate(several)]
    order = data.draw(st.permutations(range(len(several))))
    assert [together[i] for i in order] == choose(logits_BV[list(order)], [several[i] for i in order])
    assert torch.equal(logits_BV, before_BV)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_a_row_is_the_same_in_a_slot_that_others_had(data):
    """A sampler that has seen requests come and go chooses as a new one does."""
    sampler = Sampler(300, CPU)
    for _ in range(3):
        several = data.draw(st.lists(asked(300), min_size=1, max_size=4))
        logits_BV = make_logits(len(several), 300, seed=data.draw(st.integers(0, 99)))
        rows = [one.row(sampler) for one in several]
        assert sampler.sample(logits_BV, rows) == choose(logits_BV, several)
        kept = rows[:: data.draw(st.integers(1, 3))]
        del rows
        assert len({row.slot.index for row in kept}) == len(kept)


def test_a_slot_is_given_to_another_when_nobody_holds_it():
    """And not before: 1,000 requests one after another take one place, 1,000 at once as many."""
    sampler = Sampler(10, CPU)
    assert {sampler.add(GREEDY, []).index for _ in range(1000)} == {0}
    together = [sampler.add(GREEDY, []) for _ in range(1000)]
    assert {slot.index for slot in together} == set(range(1000))
    del together[3]
    gc.collect()
    assert sampler.add(GREEDY, []).index == 3


@pytest.mark.parametrize("num_tokens", [300, 5000])
@pytest.mark.parametrize("seed", range(10))
def test_a_feature_that_is_off_changes_nothing(seed, num_tokens):
    """What asks for nothing, and what rules out nothing, gives the token of params that don't mention it."""
    logits_1V = make_logits(1, num_tokens)
    plain = SamplingParams(temperature=0.9, seed=seed)
    off = replace(plain, top_k=num_tokens, min_tokens=5, bad_words=((1, 2, 3),))
    neutral = replace(plain, logit_bias={3: 0.0}, allowed_token_ids=tuple(range(num_tokens)))
    ones = torch.full((1, -(-num_tokens // 32)), -1, dtype=torch.int32)
    expected = choose(logits_1V, [Asked(plain, TEXT, 4)])
    assert choose(logits_1V, [Asked(off, TEXT, 4)]) == expected
    assert choose(logits_1V, [Asked(neutral, TEXT, 4)], ones) == expected


def test_a_large_batch_is_sampled_in_portions_with_the_same_result(monkeypatch):
    """Where temporaries are bounded to two rows at a time, seven rows choose as they do all at once."""
    params = [SamplingParams(temperature=1, top_p=(0.9, 1)[i % 2], seed=0, logprobs=i) for i in range(7)]
    logits_BV = make_logits(7, 100)
    at_once = choose_at(logits_BV, params, range(7))
    monkeypatch.setattr(rows_module, "PORTION_ON_CPU", 200)
    assert choose_at(logits_BV, params, range(7)) == at_once


@pytest.mark.parametrize("num_tokens", [1, 5, 256, 1000, 49_152])
def test_greedy_is_argmax(num_tokens):
    """Temperature 0 gives the first of the highest logits, alone or beside rows that are drawn."""
    logits_BV = make_logits(6, num_tokens, rounded=True)
    expected = logits_BV.argmax(-1).tolist()
    assert [s.token for s in choose_at(logits_BV, [GREEDY] * 6, [0] * 6)] == expected
    mixed = [replace(DRAWN, temperature=float(i % 2)) for i in range(6)]
    assert [s.token for s in choose_at(logits_BV, mixed, [0] * 6)][::2] == expected[::2]


@settings(deadline=None, max_examples=60)
@given(asked(40), st.integers(0, 99))
def test_greedy_is_the_argmax_of_processed_logits(one, seed):
    """Penalties, biases and what is ruled out have their say at temperature 0, filters have none."""
    one = replace(one, params=replace(one.params, temperature=0.0))
    logits_1V = make_logits(1, 40, seed)
    assert choose(logits_1V, [one])[0].token == int(transformers_processed(logits_1V, one).argmax())


@pytest.mark.parametrize(
    "setting",
    [{"temperature": 1, "top_k": 1}, {"temperature": 1, "top_p": 1e-9}, {"temperature": 1e-300}, {"temperature": 1e-9}],
    ids=str,
)
@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
def test_a_vanishing_distribution_is_its_likeliest_token(setting, rounded):
    """Top-k of 1, a tiny nucleus, and temperatures too small for float32, choose as greedy does instead of failing."""
    logits_1V = make_logits(1, 500, rounded=rounded)
    drawn = choose_at(logits_1V.expand(50, -1), [SamplingParams(**setting, seed=0)] * 50, range(50))
    assert {s.token for s in drawn} == {int(logits_1V.argmax())}


def test_a_temperature_beyond_all_bounds_draws_from_what_is_left():
    """1e300 makes all tokens alike, but for those that are ruled out."""
    logits_1V = make_logits(1, 40)
    logits_1V[0, ::2] = -math.inf
    drawn = choose_at(logits_1V.expand(2000, -1), [SamplingParams(temperature=1e300, seed=0)] * 2000, range(2000))
    assert {s.token for s in drawn} == set(range(1, 40, 2))


@pytest.mark.parametrize(
    ("value", "named"), [(math.nan, "NaN"), (math.inf, "+inf"), (-math.inf, "-inf for every token")]
)
@pytest.mark.parametrize("num_bad", [1, 300])
def test_a_row_without_a_distribution_fails_alone(value, named, num_bad):
    """NaN, +inf or nothing finite in one row's logits is that row's error, and the other rows choose as without it."""
    params = (
        GREEDY,
        SamplingParams(temperature=1.0, seed=4),
        SamplingParams(temperature=1.0, top_p=0.9, seed=4, logprobs=3),
        SamplingParams(temperature=1.0, top_k=9, seed=4, repetition_penalty=1.2),
        SamplingParams(logprobs=2, logit_bias={2: 1.0}),
    )
    logits_BV = make_logits(5, 300)
    healthy = choose_at(logits_BV, params, [11] * 5)
    for bad in range(5):
        broken_BV = logits_BV.clone()
        broken_BV[bad, -num_bad if value > -math.inf else 0 :] = value
        sampled = choose_at(broken_BV, params, [11] * 5)
        assert sampled[:bad] + sampled[bad + 1 :] == healthy[:bad] + healthy[bad + 1 :]
        assert (sampled[bad].token, sampled[bad].logprob, sampled[bad].top) == (-1, None, ())
        assert "position 11" in sampled[bad].error
        assert f"hold {named}," in sampled[bad].error


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_rules_out_every_token_fails_alone(temperature):
    """Its error blames what it asked for, not the model."""
    params = SamplingParams(temperature=temperature, seed=0, allowed_token_ids=(3, 5), bad_words=((3,), (5,)))
    failed, healthy = choose_at(make_logits(2, 30), [params, GREEDY], [4, 4])
    assert failed.token == -1
    assert "rule every token out" in failed.error
    assert healthy.error is None


def test_tokens_masked_to_minus_infinity_are_never_chosen():
    """-inf rules a token out of the draw and out of the alternatives, and harms nothing else."""
    logits_BV = torch.full((200, 40), -math.inf)
    logits_BV[:, 5], logits_BV[:, 33] = 1.0, 1.0
    for params in (DRAWN, replace(DRAWN, top_k=10, top_p=0.999)):
        sampled = choose_at(logits_BV, [replace(params, logprobs=4)] * 200, range(200))
        assert {s.token for s in sampled} == {5, 33}
        assert sampled[0].top == ((5, pytest.approx(-math.log(2))), (33, pytest.approx(-math.log(2))))


@pytest.mark.parametrize("num_tokens", [30, 1000, 49_152])
def test_logprobs_are_those_of_the_unfiltered_distribution(num_tokens):
    """Log-probabilities are log_softmax of the raw logits, whatever temperature, filters and biases chose the token."""
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, seed=0, logprobs=7, logit_bias={2: 30.0})
    logits_BV = make_logits(4, num_tokens)
    expected_BV = logits_BV.double().log_softmax(-1)
    for i, one in enumerate(choose_at(logits_BV, [params] * 4, range(4))):
        assert one.token == 2
        assert one.logprob == pytest.approx(float(expected_BV[i, 2]), abs=1e-6)
        values, ids = expected_BV[i].topk(7)
        assert [t for t, _ in one.top] == ids.tolist()
        assert [p for _, p in one.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_logprobs_are_only_given_where_asked():
    """None gives nothing, 0 the chosen token's own, n that and n alternatives, side by side in one batch."""
    params = [replace(GREEDY, logprobs=n) for n in (None, 0, 2)]
    nothing, own, two = choose_at(make_logits(1, 30).expand(3, -1), params, [0] * 3)
    assert nothing == Sampled(two.token)
    assert own == Sampled(two.token, two.logprob)
    assert len(two.top) == 2
    assert two.top[0] == (two.token, two.logprob)


def test_an_empty_batch_samples_nothing():
    """No rows give no choices."""
    assert choose(torch.zeros(0, 10), []) == []


def test_drawing_without_a_seed_is_a_bug_of_the_caller():
    """Greedy rows need no seed; a row that is drawn must have been given one, for sampling itself has no randomness."""
    choose_at(make_logits(1, 30), [GREEDY], [0])
    with pytest.raises(AssertionError, match="has a seed"):
        choose_at(make_logits(1, 30), [SamplingParams(temperature=1.0)], [0])


def test_a_step_that_is_run_again_chooses_the_same():
    """Penalties are exact when a step is repeated, when a request goes back, and when guesses turn out wrong."""
    params = SamplingParams(
        temperature=1.0, seed=1, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.4
    )
    logits_BV = make_logits(20, 30, spread=1.0)
    sampler, prompt = Sampler(30, CPU), TEXT[:5]
    slot, tokens = sampler.add(params, prompt), list(prompt)

    def expected(end):
        return choose(logits_BV[end : end + 1], [Asked(params, tokens[:end], len(prompt))])[0]

    for _ in range(8):
        end = len(tokens)
        guesses = [*tokens, 3, 29, 3]
        rows = [Row(slot, guesses, end + ahead) for ahead in range(4)]
        sampled = sampler.sample(logits_BV[end : end + 4], rows)
        assert sampled == sampler.sample(logits_BV[end : end + 4], rows)
        assert sampled[0] == expected(end)
        tokens.append(sampled[0].token)
    for end in (11, 7, 5, 12, 6):
        assert sampler.sample(logits_BV[end : end + 1], [Row(slot, tokens, end)])[0] == expected(end)


def test_rows_of_guesses_choose_as_if_the_guesses_were_the_text():
    """One step's rows at ends e, e + 1, ... are those of as many steps in which each guess had been chosen."""
    params = SamplingParams(
        temperature=1.0, seed=1, repetition_penalty=1.5, frequency_penalty=0.7, bad_words=((8, 3),), min_tokens=9
    )
    logits_BV = make_logits(4, 30, spread=1.0)
    sampler = Sampler(30, CPU)
    slot, guessed = sampler.add(params, TEXT[:5], END_IDS), [*TEXT, 8, 3, 8]
    rows = [Row(slot, guessed, len(TEXT) + ahead) for ahead in range(4)]
    alone = [
        choose(logits_BV[i : i + 1], [Asked(params, guessed[: row.end], 5, END_IDS)])[0] for i, row in enumerate(rows)
    ]
    assert sampler.sample(logits_BV, rows) == alone
    assert sampler.sample(logits_BV.flip(0), rows[::-1]) == alone[::-1]
