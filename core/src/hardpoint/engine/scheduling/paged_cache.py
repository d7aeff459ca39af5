"""Which pages each request holds, group by group: given, found again, given back.

Layers of one retention form a cache group with a block table of its own (cache_users.py); all groups take their pages
from one pool. A page whose tokens no later query reads is given back while its request goes on, and the null page
stands for what a request never held.

Of a state (``Retention.per_sequence``) a request holds the page of its newest block. It takes this page along to later
blocks. Where the state at the edge of a block is worth keeping for others, the request leaves that page behind instead
and goes on with a copy. Drafts make two exceptions, and the page is taken along: where some are yet to be verified, the
state may be that of an earlier token; and where wrong ones had blocks of their own, the page belongs to those already.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hardpoint.engine.scheduling.block_pool import BlockHash, BlockPool
from hardpoint.engine.scheduling.step import PageCopy
from hardpoint_plugin_api import NULL_PAGE, Retention, Span

Pages = list[list[int]]
"""Pages by cache group, each group's by block. The groups of one request have equally many blocks."""

NewPages = tuple[tuple[int, ...], ...]
"""By cache group, equally many each."""


@dataclass(frozen=True)
class CacheGeometry:
    """How many pages sequences take. ``max_step_tokens`` is the most tokens of one request in a step."""

    block_size: int
    retentions: tuple[Retention, ...]
    max_step_tokens: int

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks ``num_tokens`` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def pages_for(self, num_tokens: int) -> int:
        """The most pages that a sequence of ``num_tokens`` tokens ever holds at once."""
        return sum(self._group_pages(retention, self.blocks_for(num_tokens)) for retention in self.retentions)

    def longest(self, num_pages: int, at_most: int) -> int:
        """The longest sequence, up to ``at_most`` tokens, that ``num_pages`` pages hold."""
        lengths = range(1, at_most + 1)
        return bisect.bisect_right(lengths, num_pages, key=self.pages_for)

    def _group_pages(self, retention: Retention, blocks: int) -> int:
        cached = retention.most_cached(self.max_step_tokens)
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
        return [
            page
            for pages, start in zip(self.pages, self.num_returned, strict=True)
            for page in pages[start:]
            if page != NULL_PAGE
        ]


@dataclass(frozen=True)
class Prefix:
    """The cached start of a request: ``num_blocks`` blocks, not held yet. A group has the null page where the span of
    later queries does not reach back."""

    num_blocks: int = 0
    pages: Pages = field(default_factory=list)

    def found(self) -> list[int]:
        """The pages to hold."""
        return [page for pages in self.pages for page in pages if page != NULL_PAGE]


@dataclass(frozen=True)
class Growth:
    """The pages of a request's next blocks, and the states to copy there before the step that grows it.

    Of a state each new block has the one page that steps go on with, so that a step which ends in an earlier one than
    was expected, behind wrong drafts, finds it, too.
    """

    pages: NewPages
    copies: tuple[PageCopy, ...] = ()


class PagedCache:
    """The pool as requests see it."""

    def __init__(self, pool: BlockPool, geometry: CacheGeometry, keep_states: bool = True) -> None:
        """``keep_states``: whether states at the edges of blocks are kept, for requests that begin alike."""
        self.pool, self.geometry = pool, geometry
        self._retentions = retentions = geometry.retentions
        self._limited = [group for group, retention in enumerate(retentions) if retention != Span()]
        self._num_states = sum(retention.per_sequence for retention in retentions)
        self._keeps_states = keep_states and self._num_states > 0
        self.no_growth = Growth(((),) * len(retentions))

    def first_block(self, group: int, position: int) -> int:
        """The first block of ``group`` that a query at ``position``, or any later one, reads."""
        return self._retentions[group].first(position) // self.geometry.block_size

    def find(self, hashes: Iterable[BlockHash]) -> Prefix:
        """The longest start of a sequence, given its blocks' hashes, from which it can go on. It asks for no more of
        them than it needs to see.

        Every group needs what a query behind that start reads: all of it, or the last few blocks.
        """
        groups = range(len(self._retentions))
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
        firsts = [self.first_block(group, position) for group in range(len(self._retentions))]
        return HeldPages([list(pages) for pages in prefix.pages] or [[] for _ in self._retentions], firsts)

    def to_edge(self, start: int, count: int) -> int:
        """How many of the ``count`` tokens from position ``start`` on a step should have.

        A state is found again only where a step ended at the edge of a block, so one that goes beyond the last edge
        ends there.
        """
        if not self._keeps_states:
            return count
        size = self.geometry.block_size
        edge = (start + count) // size * size
        return edge - start if edge > start else count

    def num_fresh(self, num_blocks: int, start: int, end: int, is_exact: bool = True) -> int:
        """Fresh pages that a request with ``num_blocks`` blocks needs for the tokens from ``start`` to ``end``.

        ``is_exact``: no draft before ``start`` is yet to be verified.
        """
        missing = self.geometry.blocks_for(end) - num_blocks
        if missing <= 0:
            return 0
        by_token = missing * (len(self._retentions) - self._num_states)
        return by_token + (self._num_states if self._leaves_states(num_blocks, start, is_exact) else 0)

    def _leaves_states(self, num_blocks: int, start: int, is_exact: bool) -> bool:
        """Whether a request that goes on to other blocks from ``start`` has no page for its states, or leaves it."""
        return start == 0 or (self._keeps_states and is_exact and start == num_blocks * self.geometry.block_size)

    def grow(self, held: HeldPages, start: int, end: int, is_exact: bool = True) -> Growth | None:
        """Add pages for the tokens from ``start`` to ``end``: ``num_fresh`` fresh ones, None where fewer are free."""
        missing = self.geometry.blocks_for(end) - held.num_blocks
        if missing <= 0:
            return self.no_growth
        fresh = self.pool.allocate(self.num_fresh(held.num_blocks, start, end, is_exact))
        if fresh is None:
            return None
        leaves = self._leaves_states(held.num_blocks, start, is_exact)
        copies, new_pages = [], []
        for group, pages in enumerate(held.pages):
            if not self._retentions[group].per_sequence:
                pages += fresh[:missing]
                new_pages.append(tuple(fresh[:missing]))
                del fresh[:missing]
                continue
            if leaves:
                page = fresh.pop()
                if start:
                    copies.append(PageCopy(group, pages[-1], page))
            else:
                page, pages[-1] = pages[-1], NULL_PAGE
            pages += [NULL_PAGE] * (missing - 1) + [page]
            new_pages.append((page,) * missing)
        return Growth(tuple(new_pages), tuple(copies))

    def take_back(self, held: HeldPages, position: int) -> list[int]:
        """The pages that no query at ``position`` or later reads; the caller frees them when no step uses them."""
        taken = []
        for group in self._limited:
            pages, returned = held.pages[group], held.num_returned[group]
            first = min(self.first_block(group, position), len(pages))
            if first > returned:
                taken += [page for page in pages[returned:first] if page != NULL_PAGE]
                held.num_returned[group] = first
        return taken

    def remember(self, held: HeldPages, first: int, hashes: Sequence[BlockHash], num_stored: int) -> None:
        """Note what the blocks from ``first`` on hold: ``hashes`` has one for each block up to its end.

        ``num_stored`` tokens are stored once the step is done that filled these blocks; states are those after them.
        """
        for group, pages in enumerate(held.pages):
            blocks = range(first, len(hashes))
            if self._retentions[group].per_sequence:
                blocks = blocks[-1:] if num_stored == len(hashes) * self.geometry.block_size else blocks[:0]
            for block in blocks:
                if pages[block] != NULL_PAGE:  # a state's page that was taken along
                    self.pool.remember(pages[block], (group, hashes[block]))

    def free(self, pages: Iterable[int]) -> None:
        """Stop holding ``pages``."""
        self.pool.free(list(pages))
