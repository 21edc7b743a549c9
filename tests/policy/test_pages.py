"""Laws of the page pool: every page is held, kept or blank, and is given to nobody else while it is held."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batchwright.errors import ConfigError
from batchwright.policy.pages import Memory, PagePool

NUM_PAGES = 7


class Pool(RuleBasedStateMachine):
    """Tables of pages, taken, shared, kept and released in any order, beside a plain count of their holders."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.tables: list[tuple[int, ...]] = []
        self.forgotten: list[int] = []
        self.pool.on_forget = self.forgotten.append

    @property
    def holders(self) -> Counter[int]:
        return Counter(page for table in self.tables for page in table)

    @rule(count=st.integers(0, NUM_PAGES))
    def take(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(AssertionError):
                self.pool.take(count)
            return
        pages = self.pool.take(count)
        assert len(set(pages)) == count
        assert not set(pages) & set(self.holders), "a held page was given away"
        self.tables.append(pages)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        shared = table[: data.draw(st.integers(0, len(table)))]
        self.pool.hold(shared)
        self.tables.append(shared)

    @precondition(lambda self: self.pool._kept)
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.pool._kept)))
        self.pool.hold((page,))
        self.tables.append((page,))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        self.pool.keep(data.draw(st.sampled_from(sorted(self.holders))))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.pool.drop(data.draw(st.sampled_from(sorted(self.holders))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def laws(self) -> None:
        pool, holders = self.pool, self.holders
        assert pool.num_held == len(holders)
        assert pool.num_held + pool.num_free == NUM_PAGES
        assert sorted([*holders, *pool._kept, *pool._blank]) == list(range(NUM_PAGES))
        assert all(pool.is_held(page) == (page in holders) for page in range(NUM_PAGES))
        assert pool.num_shares == sum(holders.values()) - len(holders)

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.release(table)
        assert self.pool.num_free == NUM_PAGES
        assert self.pool.num_shares == 0


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30)


def test_blank_pages_are_given_out_before_kept_ones() -> None:
    """What is worth finding is overwritten last."""
    pool = PagePool(4)
    table = pool.take(2)
    pool.keep(table[0])
    pool.release(table)
    assert table[0] not in pool.take(3)
    assert pool.take(1) == (table[0],)


def test_the_kept_page_unused_longest_is_reused_first_and_announced() -> None:
    """And of one table the last page first: without a prefix's first page its others can't be found."""
    pool = PagePool(4)
    old, new = pool.take(2), pool.take(2)
    forgotten: list[int] = []
    pool.on_forget = forgotten.append
    for page in old + new:
        pool.keep(page)
    pool.release(old)
    pool.release(new)
    assert pool.take(3) == (old[1], old[0], new[1])
    assert forgotten == [old[1], old[0], new[1]]


def test_a_page_that_was_dropped_is_blank_when_its_holder_has_gone() -> None:
    """Nobody is told that it is forgotten, since whoever dropped it knows."""
    pool = PagePool(1)
    forgotten: list[int] = []
    pool.on_forget = forgotten.append
    table = pool.take(1)
    pool.keep(*table)
    pool.drop(*table)
    pool.release(table)
    assert pool.take(1) == table
    assert not forgotten


def test_a_page_that_is_not_held_cannot_be_released_kept_or_dropped() -> None:
    """All three are bugs of the caller."""
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="page 1 is not held"):
        pool.release((1,))
    with pytest.raises(AssertionError, match="page 1 is not held"):
        pool.keep(1)
    with pytest.raises(AssertionError, match="page 1 is not held"):
        pool.drop(1)


@pytest.mark.parametrize(("num_tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_tokens_round_up_to_pages(num_tokens: int, pages: int) -> None:
    """The last page may be part empty."""
    assert Memory(10, 16, 100).pages_for(num_tokens) == pages


def test_a_pool_counts_its_tokens_and_refuses_to_be_empty() -> None:
    """Ten pages of 16 are 160 tokens."""
    assert Memory(10, 16, 100).num_tokens == 160
    with pytest.raises(ConfigError, match="num_pages=0"):
        Memory(0, 16, 100)
