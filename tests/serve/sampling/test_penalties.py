"""Penalties count what stands in a text at any place that a row may come from."""

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from batchwright.serve.sampling.penalties import History, PenalisedRow, Penalties, penalise
from tests.serve.choosing import make_logits

tokens = st.lists(st.integers(0, 20), max_size=40)


@settings(deadline=None)
@given(tokens, tokens, st.booleans(), st.data())
def test_a_history_knows_the_counts_at_any_end(prompt, output, counts_prompt, data):
    """It is asked forward and backward, with changed guesses behind where it was asked last."""
    history, text = History(len(prompt), prompt if counts_prompt else ()), prompt + output
    for _ in range(6):
        end = data.draw(st.integers(len(prompt), len(text)))
        seen, written = (
            Counter(text[:end] if counts_prompt else text[len(prompt) : end]),
            Counter(text[len(prompt) : end]),
        )
        entries = {token: (num_seen, num_output) for token, num_seen, num_output in history.at(text, end).T.tolist()}
        assert {token for token, (num_seen, _) in entries.items() if num_seen} == set(seen)
        assert all(entries[token] == (seen[token], written[token]) for token in seen)
        text[end:] = data.draw(st.lists(st.integers(0, 20), min_size=len(text) - end, max_size=len(text) - end))


@settings(deadline=None)
@given(tokens.filter(bool), st.sampled_from([0.5, 1.1, 3.0]), st.integers(0, 99))
def test_repetition_penalty_is_that_of_transformers(text, penalty, seed):
    """Bit for bit, over prompt and output alike."""
    logits_1V = make_logits(1, 21, seed)
    expected_1V = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([text]), logits_1V)
    history = History(len(text) // 2, text[: len(text) // 2])
    penalise(logits_1V, [PenalisedRow(0, history, Penalties(penalty, 0.0, 0.0), text, len(text))])
    assert torch.equal(logits_1V, expected_1V)


def test_presence_and_frequency_are_openais():
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, with c counted over the output alone."""
    logits_1V = torch.zeros(1, 6)
    history = History(3, ())
    penalise(logits_1V, [PenalisedRow(0, history, Penalties(1.0, 0.5, 0.25), [1, 1, 2, 2, 3, 3, 3], 7)])
    assert logits_1V.tolist() == [[0.0, 0.0, -0.75, -1.25, 0.0, 0.0]]


def test_memory_grows_with_the_different_tokens_only():
    """100,000 tokens of three kinds are three entries."""
    history, text = History(0, ()), [0, 1, 2] * 33_333
    assert history.at(text, len(text)).shape == (3, 3)
    assert history._table.nbytes < 1000
