"""The page pool: who holds which page of KV cache, as integers; `serve/kv.py` maps them to memory.

A page is held (by one or several requests), kept (held by nobody, its contents still worth finding) or blank.
Invariant: held + kept + blank == total. Blank pages are given out first, then the kept page unused longest.
Every operation is O(1) per page.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from batchwright.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Memory:
    """KV memory and what a request may be: `num_pages` pages of `page_size` tokens; at most `context` tokens each."""

    num_pages: int
    page_size: int
    context: int

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"use {name}={getattr(self, name)}", "it must be at least 1", f"raise {name}")

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens`."""
        return -(-num_tokens // self.page_size)

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_pages * self.page_size


class PagePool:
    """Reference counts over `num_pages` pages. `on_forget(page)` is called when a kept page is reused."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.on_forget: Callable[[int], None] = lambda page: None
        self.num_shares = 0  # holds beyond the first, over all pages
        self._holders = [0] * num_pages
        self._blank = list(range(num_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._worth_keeping: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be taken: blank or kept."""
        return len(self._blank) + len(self._kept)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free

    def is_held(self, page: int) -> bool:
        return self._holders[page] > 0

    def take(self, count: int) -> tuple[int, ...]:
        """`count` pages, each now held once. The caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        return tuple(self._take_one() for _ in range(count))

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each of `pages`, which are held or kept."""
        for page in pages:
            if self._holders[page]:
                self.num_shares += 1
            else:
                del self._kept[page]
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder fewer for each page; from the last, so that a prefix's first pages are reused last."""
        for page in reversed(pages):
            assert self._holders[page], f"page {page} is not held"
            self._holders[page] -= 1
            if self._holders[page]:
                self.num_shares -= 1
            elif page in self._worth_keeping:
                self._kept[page] = None
            else:
                self._blank.append(page)

    def keep(self, page: int) -> None:
        """Keep this (held) page's contents findable after its last holder has gone, until the page is needed."""
        assert self._holders[page], f"page {page} is not held"
        self._worth_keeping.add(page)

    def drop(self, page: int) -> None:
        """Undo `keep`: this (held) page is blank after its last holder has gone."""
        assert self._holders[page], f"page {page} is not held"
        self._worth_keeping.discard(page)

    def _take_one(self) -> int:
        if self._blank:
            page = self._blank.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            self._worth_keeping.remove(page)
            self.on_forget(page)
        self._holders[page] = 1
        return page
