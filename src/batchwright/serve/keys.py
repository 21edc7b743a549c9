"""Opaque keys of full pages: equal keys mean equal tokens from the first up to that page's end.

Each key hashes the one before it together with the page's tokens (BLAKE2b, 128 bits), so that a key stands for the
whole prefix, and a request cannot be given another's pages by an accident of hashing. What else keys and values
depend on (an adapter), or who must not share (a prompt whose every position is scored), is told apart by a salt.
"""

from array import array
from collections.abc import Iterable
from hashlib import blake2b


class PageKeys:
    """Takes one request's tokens in order and hands out the key of every page they complete."""

    def __init__(self, page_size: int, salt: str = "") -> None:
        self._page_size = page_size
        self._last = blake2b(salt.encode(), digest_size=16).digest() if salt else b""
        self._pending: list[int] = []

    def push(self, tokens: Iterable[int]) -> tuple[bytes, ...]:
        """The keys of the pages that `tokens` complete, in order."""
        keys = []
        for token in tokens:
            self._pending.append(token)
            if len(self._pending) == self._page_size:
                keys.append(self._complete())
        return tuple(keys)

    def _complete(self) -> bytes:
        page = array("q", self._pending).tobytes()
        self._last = blake2b(self._last + page, digest_size=16).digest()
        self._pending.clear()
        return self._last
