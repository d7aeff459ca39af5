"""The attention family's truth over a cache of 4-bit floats, whose groups of 16 have scales."""

from __future__ import annotations

from hardpoint.reference.quantized_cache_attention import QuantizedCacheAttention
from hardpoint_plugin_api import CacheLayout, GroupScaledLayout, StoreCall, write_group_rounded


class Nvfp4CacheAttention(QuantizedCacheAttention):
    """The reference, for caches of NVFP4."""

    layout: CacheLayout = GroupScaledLayout()  # type: ignore[misc]  # a class variable, as the base has it

    def store(self, call: StoreCall) -> None:
        slots = call.slot_mapping.long()
        where = (slots // self.spec.block_size, slots % self.spec.block_size)
        for name, x, scale in zip("kv", (call.k, call.v), self.cache_scales, strict=True):
            write_group_rounded(call.cache, name, where, x, scale)
