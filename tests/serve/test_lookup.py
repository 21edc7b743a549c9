"""Guesses from a request's own text: what they are, whatever became of the text meanwhile, and what they cost."""

import random
import sys
from collections.abc import Sequence
from itertools import chain, islice, repeat
from types import FrameType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from batchwright.serve import lookup
from batchwright.serve.lookup import PromptLookup

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def drafted(tokens: Sequence[int], most: int) -> list[int]:
    """The definition: of the newest four places behind the two last tokens, what follows the one most like the end."""
    end = len(tokens)
    places = [place for place in range(2, end) if list(tokens[place - 2 : place]) == list(tokens[-2:])][-4:]
    if not places:
        return []
    place = max(places, key=lambda place: (agreement(tokens, place), place))
    return list(islice(chain.from_iterable(repeat(tokens[place:])), most))


def agreement(tokens: Sequence[int], place: int) -> int:
    """Tokens before `place` that are those at the end, up to eight."""
    pairs = zip(reversed(tokens[:place]), reversed(tokens), strict=False)
    return min(8, next((index for index, (one, other) in enumerate(pairs) if one != other), place))


@given(text=TEXTS, most=st.integers(1, 9))
def test_guesses_are_as_defined_at_every_length_of_a_text(text: list[int], most: int) -> None:
    """One lookup sees the text grow token by token."""
    tokens: list[int] = []
    guesses = PromptLookup(tokens)
    for token in text:
        tokens.append(token)
        assert guesses.draft(most) == drafted(tokens, most)


@given(changes=st.lists(st.one_of(TEXTS, st.integers(1, 30)), max_size=12))
def test_a_text_of_which_some_was_taken_back_is_a_text(changes: list[list[int] | int]) -> None:
    """Pieces are appended, and tokens dropped from the end: the guesses are those of a lookup that saw none of it."""
    tokens: list[int] = []
    guesses = PromptLookup(tokens)
    for change in changes:
        if isinstance(change, int):
            del tokens[-change:]
        else:
            tokens += change
        assert guesses.draft(5) == drafted(tokens, 5)


@given(text=TEXTS, other=TEXTS)
def test_a_text_that_was_replaced_unseen_still_gets_guesses(text: list[int], other: list[int]) -> None:
    """They may be worse, as what is known of the old text is wrong, but are of the text, and no more than asked."""
    tokens = list(text)
    guesses = PromptLookup(tokens)
    guesses.draft(4)
    tokens[:] = other
    guess = guesses.draft(4)
    assert len(guess) in (0, 4)
    assert set(guess) <= set(tokens)


def test_a_text_that_repeats_itself_is_guessed_beyond_its_end() -> None:
    """After 1 2 3 1 2 come 3, 1 and 2, and so on."""
    assert PromptLookup([1, 2, 3, 1, 2]).draft(7) == [3, 1, 2, 3, 1, 2, 3]
    assert PromptLookup([9, 9, 9]).draft(3) == [9, 9, 9]


def test_the_longer_agreement_is_followed_and_of_equals_the_newer() -> None:
    """Before 1 2 stood 7 the first time and 8 the second; now it is 7, and in the second text 5."""
    assert PromptLookup([7, 1, 2, 30, 8, 1, 2, 40, 7, 1, 2]).draft(1) == [30]
    assert PromptLookup([7, 1, 2, 30, 8, 1, 2, 40, 5, 1, 2]).draft(1) == [40]


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 3, 4], [1, 2, 3, 1]])
def test_without_two_tokens_that_stood_before_there_is_no_guess(tokens: list[int]) -> None:
    """One alone says too little."""
    assert PromptLookup(tokens).draft(4) == []


def lines_executed(text: Sequence[int]) -> int:
    """By a lookup that is asked after every token."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != lookup.__file__:
            return None
        count += event == "line"
        return trace

    tokens: list[int] = []
    guesses = PromptLookup(tokens)
    before = sys.gettrace()
    for token in text:
        tokens.append(token)
        sys.settrace(trace)
        try:
            guesses.draft(4)
        finally:
            sys.settrace(before)
    return count


@pytest.mark.parametrize("num_different", [1, 2, 3, 50])
def test_a_token_costs_no_more_in_a_long_text(num_different: int) -> None:
    """At most a hundred lines, of which most compare four places over eight tokens, whatever the text."""
    rng = random.Random(5)
    for length in (200, 3200):
        text = [rng.randrange(num_different) for _ in range(length)]
        assert lines_executed(text) <= 100 * length
