"""Which pages each request holds, group by group: given, found again, given back.

Layers of one retention form a cache group with a block table of its own (cache_users.py); all groups take their pages
from one pool. A page whose tokens no later query reads is given back while its request goes on, and the null page
stands for what a request never held.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hardpoint.engine.scheduling.block_pool import BlockHash, BlockPool
from hardpoint_plugin_api import NULL_PAGE, Span

Pages = list[list[int]]
"""Pages by cache group, each group's by block. The groups of one request have equally many blocks."""

NewPages = tuple[tuple[int, ...], ...]
"""By cache group, equally many each."""


@dataclass(frozen=True)
class CacheGeometry:
    """How many pages sequences take. ``max_step_tokens`` is the most tokens of one request in a step."""

    block_size: int
    spans: tuple[Span, ...]
    max_step_tokens: int

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks ``num_tokens`` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def pages_for(self, num_tokens: int) -> int:
        """The most pages that a sequence of ``num_tokens`` tokens ever holds at once."""
        return sum(self._group_pages(span, self.blocks_for(num_tokens)) for span in self.spans)

    def longest(self, num_pages: int, at_most: int) -> int:
        """The longest sequence, up to ``at_most`` tokens, that ``num_pages`` pages hold."""
        lengths = range(1, at_most + 1)
        return bisect.bisect_right(lengths, num_pages, key=self.pages_for)

    def _group_pages(self, span: Span, blocks: int) -> int:
        cached = span.most_cached(self.max_step_tokens)
        return blocks if cached is None else min(blocks, self.blocks_for(cached) + 1)


@dataclass
class HeldPages:
    """A request's pages. Of group g the first ``num_returned[g]`` blocks are not held any more, or never were."""

    pages: Pages
    num_returned: list[int]

    @property
    def num_blocks(self) -> int:
        """Blocks in each group's table."""
        return len(self.pages[0])

    def held(self) -> list[int]:
        """Every page that is to be given back."""
        return [page for pages, start in zip(self.pages, self.num_returned, strict=True) for page in pages[start:]]


@dataclass(frozen=True)
class Prefix:
    """The cached start of a request: ``num_blocks`` blocks, not held yet. A group has the null page where the span of
    later queries does not reach back."""

    num_blocks: int = 0
    pages: Pages = field(default_factory=list)

    def found(self) -> list[int]:
        """The pages to hold."""
        return [page for pages in self.pages for page in pages if page != NULL_PAGE]


class PagedCache:
    """The pool as requests see it."""

    def __init__(self, pool: BlockPool, geometry: CacheGeometry) -> None:
        self.pool, self.geometry = pool, geometry
        self._spans = geometry.spans
        self._limited = [group for group, span in enumerate(self._spans) if span != Span()]
        self._no_pages: NewPages = ((),) * len(self._spans)

    def first_block(self, group: int, position: int) -> int:
        """The first block of ``group`` that a query at ``position``, or any later one, reads."""
        return self._spans[group].first(position) // self.geometry.block_size

    def find(self, hashes: Iterable[BlockHash]) -> Prefix:
        """The longest start of a sequence, given its blocks' hashes, from which it can go on. It asks for no more of
        them than it needs to see.

        Every group needs what a query behind that start reads: all of it, or the last few blocks.
        """
        groups = range(len(self._spans))
        found: Pages = [[] for _ in groups]
        run, best = [0] * len(found), 0  # known blocks in a row, up to the one looked at
        for block, content in enumerate(hashes):
            for group in groups:
                page = self.pool.find((group, content))
                found[group].append(NULL_PAGE if page is None else page)
                run[group] = 0 if page is None else run[group] + 1
            position = (block + 1) * self.geometry.block_size
            if all(run[group] > block - self.first_block(group, position) for group in groups):
                best = block + 1
            if any(run[group] == 0 for group in groups if group not in self._limited):
                break
        firsts = [self.first_block(group, best * self.geometry.block_size) for group in groups]
        return Prefix(
            best, [[NULL_PAGE] * first + found[g][first:best] for g, first in zip(groups, firsts, strict=True)]
        )

    def start(self, prefix: Prefix) -> HeldPages:
        """Hold the pages of ``prefix`` for a request that starts from it."""
        self.pool.hold(prefix.found())
        position = prefix.num_blocks * self.geometry.block_size
        firsts = [self.first_block(group, position) for group in range(len(self._spans))]
        return HeldPages([list(pages) for pages in prefix.pages] or [[] for _ in self._spans], firsts)

    def num_fresh(self, num_blocks: int, num_tokens: int) -> int:
        """Fresh pages that a request with ``num_blocks`` blocks needs to reach ``num_tokens`` tokens."""
        missing = self.geometry.blocks_for(num_tokens) - num_blocks
        return missing * len(self._spans) if missing > 0 else 0

    def grow(self, held: HeldPages, count: int) -> NewPages | None:
        """Take ``count`` fresh pages (see ``num_fresh``), or none at all (None) where fewer are free."""
        if count == 0:
            return self._no_pages
        fresh = self.pool.allocate(count)
        if fresh is None:
            return None
        each = count // len(self._spans)
        for group, pages in enumerate(held.pages):
            pages += fresh[group * each : (group + 1) * each]
        return tuple(tuple(pages[-each:]) for pages in held.pages)

    def take_back(self, held: HeldPages, position: int) -> list[int]:
        """The pages that no query at ``position`` or later reads; the caller frees them when no step uses them."""
        taken = []
        for group in self._limited:
            pages, returned = held.pages[group], held.num_returned[group]
            first = min(self.first_block(group, position), len(pages))
            if first > returned:
                taken += pages[returned:first]
                held.num_returned[group] = first
        return taken

    def remember(self, held: HeldPages, first: int, hashes: Sequence[BlockHash]) -> None:
        """Note what the blocks from ``first`` on hold: ``hashes`` has one for each block up to its end."""
        for group, pages in enumerate(held.pages):
            for block in range(first, len(hashes)):
                self.pool.remember(pages[block], (group, hashes[block]))

    def free(self, pages: Iterable[int]) -> None:
        """Stop holding ``pages``."""
        self.pool.free(list(pages))
