"""Sizing and allocating the cache."""

from __future__ import annotations

import logging
import math

import torch

from hardpoint.cache_users import ModelCaches
from hardpoint.engine.scheduling.paged_cache import CacheGeometry
from hardpoint_plugin_api import CapacityError, Memory

logger = logging.getLogger(__name__)


class CacheMemory:
    """The pages of all cache groups. A page has a place for each user of a group, and each place a buffer of its own.

    Users of unlike size that share a place have pages of the larger size. ``views`` are each user's named views, in
    the order of the users.
    """

    def __init__(self, users: ModelCaches, geometry: CacheGeometry, budget: int, device: torch.device) -> None:
        """Take as many pages as ``budget`` bytes hold; raises CapacityError if a token does not fit beside the null
        page."""
        self.geometry = geometry
        sizes = place_bytes(users, geometry.block_size)
        self.page_bytes = page_bytes(users, geometry.block_size)
        self.num_pages = budget // self.page_bytes
        least = geometry.pages_for(1) + 1
        if self.num_pages < least:
            raise CapacityError(
                f"a cache of {budget:,} bytes holds no page of {geometry.block_size} tokens ({self.page_bytes:,} bytes "
                f"over {len(sizes)} places, and one page is reserved); raise --kv-cache-memory to "
                f"{least * self.page_bytes:,}"
            )
        self._buffers = [torch.empty(self.num_pages * size, dtype=torch.uint8, device=device) for size in sizes]
        self.clear()
        views = {}
        for group in users.cache_groups():
            for number, buffer, size in zip(group.users, self._buffers, sizes, strict=False):
                user = users.users[number]
                views[number] = user.layout.views(buffer, self.num_pages, user.spec, geometry.block_size, size)
        self.views = [views[number] for number in range(len(users.users))]
        if states := [user for user in users.users if user.spec.retention.per_sequence]:
            taken = sum(user.layout.page_bytes(user.spec, geometry.block_size) for user in states)
            logger.info("a sequence's states take %d KiB in %d layers", taken >> 10, len(states))

    def clear(self) -> None:
        """Fill the null page with zeros, as it is read, if without consequence. The contents of all other pages are
        undefined."""
        for buffer in self._buffers:
            buffer[: buffer.numel() // self.num_pages].zero_()

    def drop(self) -> None:
        """Give the memory back. The views stay, over nothing, until ``restore``."""
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take the memory again, perhaps elsewhere; all views are over it."""
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(buffer.numel())
        self.clear()

    def longest_sequence(self, wanted: int, user_asked: bool) -> int:
        """How long a sequence may become: ``wanted``, or what fits where the user did not insist.

        Raises CapacityError, with both remedies, where the user did.
        """
        usable = self.num_pages - 1
        longest = self.geometry.longest(usable, wanted)
        if longest < wanted and user_asked:
            need = (self.geometry.pages_for(wanted) + 1) * self.page_bytes
            raise CapacityError(
                f"one sequence of {wanted} tokens does not fit the cache, which holds {longest}; "
                f"set --kv-cache-memory to {need:,} bytes or more, or --max-model-len to {longest} or less"
            )
        if longest < wanted:
            logger.warning("sequences are limited to the %d tokens that the cache holds, of %d", longest, wanted)
        at_once = usable / self.geometry.pages_for(longest)
        logger.info(
            "the cache holds %d tokens in %d pages: %.1f sequences of %d tokens",
            at_once * longest,
            usable,
            at_once,
            longest,
        )
        return longest


def require_free(wanted: int, reserved: int, memory: Memory, device: str) -> None:
    """Raise CapacityError where a cache of ``wanted`` bytes, and ``reserved`` others, do not fit ``device``."""
    if wanted + reserved > memory.snapshot().free:
        memory.trim()  # what an allocator keeps for later is free, too
    now = memory.snapshot()
    if wanted + reserved > now.free:
        also = f", of which sampling takes {reserved:,}" if reserved else ""
        raise CapacityError(
            f"a cache of {wanted:,} bytes does not fit {device}, where {now.free:,} of {now.total:,} bytes are free "
            f"beside the weights{also}; lower --kv-cache-memory, or leave it out to have it chosen"
        )


def page_bytes(users: ModelCaches, block_size: int) -> int:
    """Bytes of a page in all places; 1 on a pipeline stage without caches, which has as many pages as the others."""
    return sum(place_bytes(users, block_size)) or 1


def place_bytes(users: ModelCaches, block_size: int) -> list[int]:
    """Bytes of each part of a page. Part i holds the cache of the i-th layer of every cache group, so it is as large as
    the largest of these layers needs, rounded up to an alignment that suits all of them.
    """
    groups = users.cache_groups()
    sizes = []
    for place in range(max(len(group.users) for group in groups)):
        sharing = [users.users[group.users[place]] for group in groups if place < len(group.users)]
        largest = max(user.layout.page_bytes(user.spec, block_size) for user in sharing)
        align = math.lcm(*(user.layout.alignment for user in sharing))
        sizes.append(-(-largest // align) * align)
    return sizes
