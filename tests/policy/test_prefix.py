"""Laws of the prefix index: it finds the longest known prefix, and never a page that was reused."""

import hypothesis.strategies as st
from hypothesis import given

from batchwright.policy.pages import PagePool
from batchwright.policy.prefix import PrefixIndex

KEYS = st.lists(st.integers(0, 3), max_size=5)


def chained(tokens: list[int]) -> tuple[tuple[int, ...], ...]:
    """Keys as whoever makes them chains them: each stands for all tokens up to its page's end."""
    return tuple(tuple(tokens[: end + 1]) for end in range(len(tokens)))


@given(st.lists(KEYS, max_size=12))
def test_the_index_finds_the_longest_known_prefix_and_only_true_contents(prompts: list[list[int]]) -> None:
    """Requests come and go on a pool of 8 pages; a model that writes down what each page holds agrees every time."""
    pool = PagePool(8)
    index = PrefixIndex(pool)
    contents: dict[int, tuple[int, ...]] = {}
    known: dict[tuple[int, ...], int] = {}

    def forget(page: int, forget_in_index=pool.on_forget) -> None:
        forget_in_index(page)
        del known[contents[page]]

    pool.on_forget = forget
    for tokens in prompts:
        keys = chained(tokens)
        found = index.match(keys)
        expected = next((end for end, key in enumerate(keys) if key not in known), len(keys))
        assert len(found) == expected
        assert tuple(contents[page] for page in found) == keys[:expected]
        pool.hold(found)
        table = found + pool.take(len(keys) - len(found))
        for key, page in list(zip(keys, table, strict=True))[len(found) :]:
            contents[page] = key
            known[key] = page
            index.publish(key, page)
        pool.release(table)
    assert pool.num_free == 8


def test_where_a_key_is_known_the_first_page_stays() -> None:
    """Two requests computed the same prompt at once: the second's copy isn't worth keeping."""
    pool = PagePool(3)
    index = PrefixIndex(pool)
    first, second = pool.take(1), pool.take(1)
    index.publish("k", *first)
    index.publish("k", *second)
    pool.release(second)
    pool.release(first)
    assert index.match(["k"]) == first
    assert first[0] not in pool.take(2)
    assert index.match(["k"]) == first
    pool.take(1)
    assert index.match(["k"]) == ()


def test_a_match_ends_at_the_first_unknown_key() -> None:
    """A later page alone is of no use."""
    pool = PagePool(3)
    index = PrefixIndex(pool)
    table = pool.take(3)
    for key, page in zip("abc", table, strict=True):
        index.publish(key, page)
    assert index.match("abx") == table[:2]
    assert index.match("xbc") == ()
    assert index.match("") == ()


def test_pages_that_were_withdrawn_are_found_no_more_and_can_be_published_anew() -> None:
    """A page that the index does not know is skipped, and the keys of other pages stay."""
    pool = PagePool(4)
    index = PrefixIndex(pool)
    good, bad, unknown, other = pool.take(4)
    for key, page in zip("abc", (good, bad, other), strict=True):
        index.publish(key, page)
    index.withdraw((bad, unknown))
    assert index.match("abc") == (good,)
    index.publish("b", unknown)
    assert index.match("abc") == (good, unknown, other)
