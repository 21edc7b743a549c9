"""Pages as memory: every position has one place, and places never overlap."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from batchwright.facts.shape import ModelShape
from batchwright.policy.pages import Memory
from batchwright.serve.kv import PagedKV, slots
from tests.serve.scripted import tiny


def paged(num_pages: int = 5, page_size: int = 4, dtype: torch.dtype = torch.float32) -> PagedKV:
    shape: ModelShape = tiny().decoder.shape
    return PagedKV(shape, Memory(num_pages, page_size, 512), dtype, torch.device("cpu"))


def test_positions_follow_the_page_table() -> None:
    """Page 32, table [2, 5, 8], 60 tokens past, 10 new: slots 188..191, then 256..261."""
    assert slots([2, 5, 8], 32, 60, 10, scratch=99) == [*range(188, 192), *range(256, 262)]


def test_positions_beyond_the_table_go_to_scratch() -> None:
    """A row without pages, or past them, writes where nobody reads."""
    assert slots([], 4, 2, 4, scratch=7) == [30, 31, 28, 29]
    assert slots([3], 4, 3, 2, scratch=7) == [15, 28]


@given(st.integers(1, 9), st.lists(st.integers(0, 50), min_size=1, max_size=8, unique=True), st.data())
def test_each_position_has_its_own_slot_in_its_own_page(page_size: int, table: list[int], data: st.DataObject) -> None:
    """Slot // page size is the position's page and slot % page size its offset, however the span is cut."""
    num_tokens = len(table) * page_size
    cut = data.draw(st.integers(0, num_tokens))
    found = [*slots(table, page_size, 0, cut, 51), *slots(table, page_size, cut, num_tokens - cut, 51)]
    assert [(slot // page_size, slot % page_size) for slot in found] == [
        (page, offset) for page in table for offset in range(page_size)
    ]


def test_memory_is_what_the_shape_says_plus_one_scratch_page() -> None:
    """Bytes are pages x page size x bytes per token, scratch included, in either dtype."""
    shape = tiny().decoder.shape
    for dtype in (torch.float32, torch.bfloat16):
        assert paged(5, 4, dtype).num_bytes == 6 * 4 * shape.kv_bytes_per_token(dtype.itemsize)


def test_clearing_pages_leaves_the_others() -> None:
    """Zeroed in every layer are just the pages named; naming none is fine."""
    kv = paged()
    kv.pages_LPMSD.fill_(torch.nan)
    kv.clear([])
    assert kv.pages_LPMSD.isnan().all()
    kv.clear(iter([1, 3]))
    assert [bool((kv.pages_LPMSD[:, page] == 0).all()) for page in range(6)] == [False, True, False, True, False, False]
    assert kv.pages_LPMSD[:, [0, 2, 4, 5]].isnan().all()
