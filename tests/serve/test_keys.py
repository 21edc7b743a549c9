"""Page keys are equal exactly where the tokens are, from the first one on."""

from hypothesis import given
from hypothesis import strategies as st

from batchwright.serve.keys import PageKeys

TOKENS = st.lists(st.integers(0, 2), max_size=24)


@given(st.integers(1, 4), TOKENS, TOKENS)
def test_keys_are_shared_just_as_far_as_the_tokens(page_size: int, one: list[int], other: list[int]) -> None:
    """Key i of two requests is equal if and only if all their tokens up to the end of page i are."""
    keys = PageKeys(page_size).push(one), PageKeys(page_size).push(other)
    assert [len(each) for each in keys] == [len(one) // page_size, len(other) // page_size]
    for index, pair in enumerate(zip(*keys, strict=False)):
        end = (index + 1) * page_size
        assert (pair[0] == pair[1]) == (one[:end] == other[:end])


@given(st.integers(1, 4), TOKENS, st.integers(0, 24))
def test_keys_do_not_depend_on_how_tokens_come(page_size: int, tokens: list[int], cut: int) -> None:
    """A prompt followed by outputs has the keys of a prompt that holds both."""
    pieces = PageKeys(page_size)
    assert pieces.push(tokens[:cut]) + pieces.push(tokens[cut:]) == PageKeys(page_size).push(tokens)


def test_the_same_page_in_another_place_has_another_key() -> None:
    """A key stands for the whole prefix, not for its page alone."""
    first, second = PageKeys(2).push([7, 8, 7, 8])
    assert first != second
