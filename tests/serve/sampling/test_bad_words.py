"""Bad words are ruled out where they would be completed, in every form that a tokenizer writes them in."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from batchwright.errors import RequestError
from batchwright.serve.loading.weights import LoadedModel
from batchwright.serve.sampling.bad_words import BadWords, WordsOfRow, bad_word_ids, completions
from batchwright.serve.sampling.params import SamplingParams

word = st.lists(st.integers(0, 4), min_size=1, max_size=4)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(word, min_size=1, max_size=5), st.lists(st.integers(0, 4), max_size=7)),
        min_size=1,
        max_size=4,
    )
)
def test_what_would_complete_a_word_is_what_transformers_rules_out(several):
    """Rows with words of different number and length, after texts shorter and longer than these."""
    rows = [WordsOfRow(i, BadWords.of(words), [*text, 3], len(text)) for i, (words, text) in enumerate(several)]
    row_E, token_E = completions(rows)
    for i, (words, text) in enumerate(several):
        input_ids = torch.tensor([text], dtype=torch.int64)
        ruled_out_V = NoBadWordsLogitsProcessor(words)(input_ids, torch.zeros(1, 5))[0] < 0
        assert set(token_E[row_E == i].tolist()) == set(ruled_out_V.nonzero()[:, 0].tolist())


class Letters:
    """A tokenizer of words: a letter is a token, and so is a letter after a space; z is none."""

    def encode(self, text, *, add_special_tokens=True):
        assert not add_special_tokens
        ids, after_space = [], False
        for letter in text:
            if letter not in " z":
                ids.append(ord(letter) + 1000 * after_space)
            after_space = letter == " "
        return ids


def test_a_word_is_ruled_out_at_the_beginning_and_in_the_middle_of_a_text():
    """With and without a space before it; what is given as ids is taken as it is; leading spaces make no difference."""
    expected = ((97, 98), (1097, 98), (7, 8))
    assert bad_word_ids(SamplingParams(bad_words=("ab", (7, 8))), Letters()) == expected
    assert bad_word_ids(SamplingParams(bad_words=("  ab", (7, 8), "ab")), Letters()) == expected


def test_as_many_and_as_long_words_as_are_allowed_may_be_written_as_ids():
    """128 words of 100 characters have 256 forms, which params take in their place."""
    words = tuple(chr(97 + i % 25) + f"{i:03}" * 33 for i in range(128))
    forms = bad_word_ids(SamplingParams(bad_words=words), Letters())
    assert len(SamplingParams(bad_words=forms).bad_words) == 256


def test_a_word_that_is_no_token_is_refused():
    """There would be nothing to rule out."""
    with pytest.raises(RequestError, match="makes no token of it"):
        bad_word_ids(SamplingParams(bad_words=("z",)), Letters())


def test_the_embedded_tokenizer_writes_both_forms(smollm2: LoadedModel):
    """A byte-level tokenizer has tokens of its own for words after a space."""
    assert smollm2.tokenizer
    forms = bad_word_ids(SamplingParams(bad_words=("dog",)), smollm2.tokenizer)
    assert [smollm2.tokenizer.decode(ids) for ids in forms] == ["dog", " dog"]


def test_a_row_without_a_match_has_no_entries():
    """Row and token are empty, not missing."""
    row_E, token_E = completions([WordsOfRow(0, BadWords.of([[1, 2]]), [3], 1)])
    assert np.array_equal(row_E, []) and np.array_equal(token_E, [])
