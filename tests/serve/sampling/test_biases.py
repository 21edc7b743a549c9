"""What is added to logits, and which tokens are ruled out."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.serve.sampling.biases import rule_out_unset
from batchwright.serve.sampling.params import SamplingParams
from tests.serve.choosing import Asked, choose, make_logits

GREEDY = SamplingParams()


def packed(allowed_RV):
    """int32 words of bits, the last one's spare bits set."""
    num_rows, num_tokens = allowed_RV.shape
    bits = torch.ones(num_rows, -(-num_tokens // 32) * 32, dtype=torch.int64)
    bits[:, :num_tokens] = allowed_RV
    words = (bits.view(num_rows, -1, 32) << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


@settings(deadline=None)
@given(st.sampled_from([1, 31, 32, 33, 300]), st.integers(1, 5), st.integers(0, 99), st.data())
def test_a_mask_rules_out_the_tokens_whose_bits_are_zero(num_tokens, num_rows, seed, data):
    """In rows that are constrained; others stay as they are."""
    allowed_RV = torch.rand(num_rows, num_tokens, generator=torch.Generator().manual_seed(seed)) < 0.5
    allowed_RV[data.draw(st.sets(st.integers(0, num_rows - 1)).map(sorted))] = True
    logits_RV = make_logits(num_rows, num_tokens, seed)
    expected_RV = logits_RV.masked_fill(~allowed_RV, -math.inf)
    rule_out_unset(logits_RV, packed(allowed_RV))
    assert torch.equal(logits_RV, expected_RV)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_tokens_of_the_mask_are_chosen(temperature):
    """Greedy and drawn, beside a row without a constraint."""
    num_tokens, params = 200, SamplingParams(temperature=temperature, top_p=0.95, seed=0)
    allowed_RV = torch.ones(2, num_tokens, dtype=torch.bool)
    allowed_RV[0] = torch.arange(num_tokens) % 7 == 3
    for seed in range(20):
        logits_BV = make_logits(2, num_tokens, seed)
        asked = [Asked(replace(params, seed=seed))] * 2
        constrained, free = choose(logits_BV, asked, packed(allowed_RV))
        assert constrained.token % 7 == 3
        assert free == choose(logits_BV[1:], asked[1:])[0]


def test_only_allowed_tokens_are_chosen():
    """The likeliest of them, and drawn ones from no others."""
    logits_BV = make_logits(300, 40)
    allowed = (2, 9, 30)
    greedy = choose(logits_BV, [Asked(SamplingParams(allowed_token_ids=allowed))] * 300)
    assert [one.token for one in greedy] == [allowed[i] for i in logits_BV[:, list(allowed)].argmax(-1).tolist()]
    drawn = choose(
        logits_BV, [Asked(SamplingParams(temperature=5.0, seed=i, allowed_token_ids=allowed)) for i in range(300)]
    )
    assert {one.token for one in drawn} == set(allowed)


def test_a_bias_is_added():
    """Of 0, 1 and 2 the last is likeliest, until the first is given 3."""
    logits_1V = torch.tensor([[0.0, 1.0, 2.0]])
    assert choose(logits_1V, [Asked(GREEDY)])[0].token == 2
    assert choose(logits_1V, [Asked(replace(GREEDY, logit_bias={0: 3}))])[0].token == 0
    assert choose(logits_1V, [Asked(replace(GREEDY, logit_bias={2: -1.5}))])[0].token == 1


def test_end_tokens_are_ruled_out_until_there_are_enough_tokens():
    """With 3 to come at least, the fourth may be an end; the prompt's tokens don't count."""
    logits_1V = torch.tensor([[9.0, 1.0, 8.0, 2.0]])
    params = replace(GREEDY, min_tokens=3)
    chosen = [choose(logits_1V, [Asked(params, [1] * end, 5, (0, 2))])[0].token for end in range(5, 10)]
    assert chosen == [3, 3, 3, 0, 0]
