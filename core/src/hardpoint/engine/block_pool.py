"""The pool of cache pages. Page 0 is the null page and is never given out."""

from __future__ import annotations

from collections import deque

from hardpoint_plugin_api import NULL_PAGE


class BlockPool:
    """Hands out page ids; the oldest freed page comes first."""

    def __init__(self, num_pages: int, block_size: int) -> None:
        self.num_pages, self.block_size = num_pages, block_size
        self._free = deque(range(NULL_PAGE + 1, num_pages))

    @property
    def num_usable(self) -> int:
        """Pages that requests can hold in all."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` pages, or none at all (None) where fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.popleft() for _ in range(count)]

    def free(self, pages: list[int]) -> None:
        """Give ``pages`` back."""
        self._free.extend(pages)
