"""Sizing and allocating the cache."""

from __future__ import annotations

import logging

import torch

from hardpoint.attention.groups import AttentionLayers
from hardpoint_plugin_api import CapacityError

logger = logging.getLogger(__name__)


class CacheMemory:
    """The pages of every attention layer. A page id means one page in each layer's buffer.

    ``views`` are each layer's named views, in the order of the layers.
    """

    def __init__(self, layers: AttentionLayers, block_size: int, budget: int, device: torch.device) -> None:
        """Take as many pages as ``budget`` bytes hold; raises CapacityError if that is not even one beside the null
        page."""
        self.block_size = block_size
        sizes = [layer.backend.layout.page_bytes(layer.backend.cache_spec, block_size) for layer in layers.layers]
        self.page_bytes = sum(sizes)
        self.num_pages = budget // self.page_bytes
        if self.num_pages < 2:
            raise CapacityError(
                f"a cache of {budget:,} bytes holds no page of {block_size} tokens ({self.page_bytes:,} bytes over "
                f"{len(sizes)} layers, and one page is reserved); raise --kv-cache-memory to {2 * self.page_bytes:,}"
            )
        self._buffers = [torch.empty(self.num_pages * size, dtype=torch.uint8, device=device) for size in sizes]
        self.views = []
        for layer, buffer, size in zip(layers.layers, self._buffers, sizes, strict=True):
            buffer[:size].zero_()
            backend = layer.backend
            self.views.append(backend.layout.views(buffer, self.num_pages, backend.cache_spec, block_size))
        logger.info("the cache holds %d tokens in %d pages", self.num_tokens, self.num_pages - 1)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return (self.num_pages - 1) * self.block_size

    def longest_sequence(self, wanted: int, user_asked: bool) -> int:
        """How long a sequence may become: ``wanted``, or what fits where the user did not insist.

        Raises CapacityError, with both remedies, where the user did.
        """
        if wanted <= self.num_tokens:
            return wanted
        if user_asked:
            need = (-(-wanted // self.block_size) + 1) * self.page_bytes
            raise CapacityError(
                f"one sequence of {wanted} tokens does not fit the cache, which holds {self.num_tokens}; "
                f"set --kv-cache-memory to {need:,} bytes or more, or --max-model-len to {self.num_tokens} or less"
            )
        logger.warning("sequences are limited to the %d tokens that the cache holds, of %d", self.num_tokens, wanted)
        return self.num_tokens
