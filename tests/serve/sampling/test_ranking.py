"""One order of tokens everywhere: by logit, equals by lower id."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.serve.sampling.ranking import likeliest, ranked
from tests.serve.choosing import make_logits

levels = st.sampled_from([-math.inf, -3.0, -0.0, 0.0, 1e-40, 1.0, 2.5])


@settings(deadline=None)
@given(st.lists(levels, min_size=1, max_size=400), st.integers(1, 20))
def test_the_likeliest_come_in_order(logits, num):
    """Among equals the lower id comes first, also across blocks; -0 equals 0."""
    ids = ranked(torch.tensor([logits]), num)[0].tolist()
    assert ids == sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:num]


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([4096, 5000, 9973]), st.sampled_from([1, 20, 64, 4000, 100_000]), st.integers(0, 99))
def test_blocks_hide_nothing(num_tokens, num, seed):
    """Large rows with many ties, looked at through their blocks, are ranked as by sorting all."""
    logits_RV = make_logits(3, num_tokens, seed).round()
    expected_RV = logits_RV.sort(descending=True, stable=True).indices
    assert torch.equal(ranked(logits_RV, num), expected_RV[:, :num])


@settings(deadline=None)
@given(st.lists(st.lists(levels, min_size=300, max_size=300), min_size=1, max_size=3))
def test_the_likeliest_one_is_the_first_of_its_equals(logits):
    """As torch's argmax has it."""
    peak_R, token_R = likeliest(torch.tensor(logits))
    assert peak_R.tolist() == torch.tensor(logits).amax(-1).tolist()
    assert torch.equal(token_R, torch.tensor(logits).argmax(-1))
