"""The pool of cache pages: who holds them, and which finished ones may be found again by their content.

A full block's content is known by its cache group and the hash of its tokens and of all before it. A page whose content
was remembered keeps it after its last holder has gone, until the page is given out again; the least recently freed
goes first. Page 0 is the null page and is never given out.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from hardpoint_plugin_api import NULL_PAGE

BlockHash = bytes

Content = tuple[int, BlockHash]
"""The key of a full block: the cache group whose layers computed it, and its tokens' hash."""


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of a full block that follows the block hashed ``parent`` (of a request's first block: its salt's hash).

    BLAKE2b of 16 bytes: a collision, which would mix two users' caches, is beyond reach even on purpose.
    """
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


def hash_salt(salt: str, adapter: int = 0) -> BlockHash:
    """The parent of a request's first block; requests with unlike salts or adapters never share pages.

    ``adapter`` is the number of the request's LoRA adapter, 0 where it has none.
    """
    number = adapter.to_bytes(16, "little")
    return hashlib.blake2b(salt.encode(), digest_size=16, salt=number, person=b"hardpoint-salt").digest()


class BlockPool:
    """Pages by number of holders. Free ones are in the order in which they will be given out."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NULL_PAGE + 1, num_pages))
        self._page_of: dict[Content, int] = {}
        self._hash_of: dict[int, Content] = {}

    @property
    def num_usable(self) -> int:
        """Pages that requests can hold in all."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, those with remembered content included."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` pages, whose content is forgotten, or none at all (None) where fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
            if (content := self._hash_of.pop(page, None)) is not None:
                del self._page_of[content]
        return pages

    def find(self, content: Content) -> int | None:
        """The page that holds ``content``, if any; it is not taken yet."""
        return self._page_of.get(content)

    def num_free_without(self, pages: Iterable[int]) -> int:
        """Free pages that would be left if ``pages`` were held."""
        return len(self._free) - sum(self._holders[page] == 0 for page in pages)

    def is_free(self, page: int) -> bool:
        """Whether nobody holds ``page``."""
        return self._holders[page] == 0

    def num_freed_by(self, pages: Iterable[int]) -> int:
        """Pages that become free once ``pages``, each as often as it stands there, are freed."""
        return sum(self._holders[page] == count for page, count in Counter(pages).items())

    def hold(self, pages: Iterable[int]) -> None:
        """Become one more holder of each of ``pages``, which ``find`` returned."""
        for page in pages:
            if self._holders[page] == 0:
                del self._free[page]
            self._holders[page] += 1

    def remember(self, page: int, content: Content) -> None:
        """Note that ``page``, which somebody holds, has this content, unless another page is known for it."""
        assert self._holders[page] > 0, "a page that nobody holds has no new content"
        if content not in self._page_of and page not in self._hash_of:
            self._page_of[content] = page
            self._hash_of[page] = content

    def forget(self) -> None:
        """Forget what every page holds."""
        self._page_of.clear()
        self._hash_of.clear()

    def free(self, pages: Sequence[int]) -> None:
        """Stop holding ``pages``. The last ones are forgotten first: a prefix is worth more than what follows it."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, "a page is freed more often than it is held"
            if self._holders[page] == 0:
                self._free[page] = None
                if page not in self._hash_of:
                    self._free.move_to_end(page, last=False)
