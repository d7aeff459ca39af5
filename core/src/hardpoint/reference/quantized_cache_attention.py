"""The attention family's truth over a cache of 8-bit elements, with scales from the checkpoint or for each token."""

from __future__ import annotations

import torch

from hardpoint.reference.attention import ReferenceAttention
from hardpoint_plugin_api import CacheLayout, ScaledLayout, StoreCall, write_rounded


class QuantizedCacheAttention(ReferenceAttention):
    """The reference, for caches of 8-bit elements."""

    layout: CacheLayout = ScaledLayout()  # type: ignore[misc]  # a class variable, as the base has it

    def store(self, call: StoreCall) -> None:
        slots = call.slot_mapping.long()
        where = (slots // self.spec.block_size, slots % self.spec.block_size)
        for name, x, scale in zip("kv", (call.k, call.v), self.cache_scales, strict=True):
            write_rounded(call.cache, name, where, x, scale)

    def read(self, cache: dict[str, torch.Tensor], pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().read(cache, pages)
        k_scale, v_scale = self.cache_scales
        return keys if k_scale is None else keys * k_scale, values if v_scale is None else values * v_scale
