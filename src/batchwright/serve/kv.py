"""The tensors behind the page pool: keys and values of every layer, in pages.

A page holds `page_size` tokens, head by head, so that gathering a row's pages gives each head one contiguous
(tokens x head_dim) matrix; our kernels lay the same bytes out in their own order (kernels/attention.cpp). One page
beyond the pool is scratch: rows that hold no page write there. When a row begins to fill a page, what it has not
written yet is zeroed, so that it is finite and a mask suffices to hide it.

Shapes: L layers, P pages (scratch last), M = 2K heads (keys, then values), S tokens per page, D head_dim.
"""

from collections.abc import Iterable, Sequence

import torch

from batchwright.facts.shape import ModelShape
from batchwright.policy.pages import Memory


class PagedKV:
    """Keys and values for `memory.num_pages` pages. The system provides them as they are first written."""

    def __init__(self, shape: ModelShape, memory: Memory, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = memory.page_size
        self.scratch = memory.num_pages
        self.num_heads = shape.num_kv_heads
        self.pages_LPMSD = torch.empty(
            shape.num_layers,
            memory.num_pages + 1,
            2 * shape.num_kv_heads,
            memory.page_size,
            shape.head_dim,
            dtype=dtype,
            device=device,
        )

    @property
    def num_bytes(self) -> int:
        return self.pages_LPMSD.nbytes

    def clear(self, pages: Iterable[int]) -> None:
        """Zero `pages` in every layer."""
        index = list(pages)
        if index:
            self.pages_LPMSD.index_fill_(1, torch.tensor(index, device=self.pages_LPMSD.device), 0)


def slots(table: Sequence[int], page_size: int, start: int, num_tokens: int, scratch: int) -> list[int]:
    """Where positions `start ..` are stored: page * page_size + offset; beyond `table`, in page `scratch`."""
    found = []
    for position in range(start, start + num_tokens):
        index, offset = divmod(position, page_size)
        page = table[index] if index < len(table) else scratch
        found.append(page * page_size + offset)
    return found
