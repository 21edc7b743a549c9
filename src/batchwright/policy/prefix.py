"""The prefix index: finds pages whose tokens a new request shares, by opaque block keys.

A key stands for all tokens up to the end of its page (whoever makes keys chains them), so pages of equal keys hold
the same KV, up to the rounding of the batches that computed it. The index holds nothing: a page it knows may be
reused for something else, and is then forgotten.
O(1) per key.
"""

from collections.abc import Hashable, Iterable, Sequence

from batchwright.policy.pages import PagePool


class PrefixIndex:
    """Keys of full, computed pages in `pool`."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._page_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}
        pool.on_forget = self._forget

    def match(self, keys: Sequence[Hashable]) -> tuple[int, ...]:
        """The pages of the longest known prefix of `keys`; they are not held by this call."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return tuple(pages)

    def publish(self, key: Hashable, page: int) -> None:
        """`page` (held, full and computed) has `key`. Where the key is known already, the first page stays."""
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key
            self._pool.keep(page)

    def withdraw(self, pages: Iterable[int]) -> None:
        """Stop finding `pages` (held); those it does not know are skipped. Who holds them still does."""
        for page in pages:
            if page in self._key_of:
                self._forget(page)
                self._pool.drop(page)

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
