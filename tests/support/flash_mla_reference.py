"""The reference over FlashMLA's cache of 8 bits."""

from __future__ import annotations

from typing import cast

from hardpoint.reference.latent_attention import ReferenceLatentAttention
from hardpoint_cuda.flash_mla_cache import FlashMlaRows
from hardpoint_cuda.flash_mla_sparse import FlashMlaSparse8Bit
from hardpoint_plugin_api import CacheLayout, LatentStoreCall


class ReferenceOver8Bits(ReferenceLatentAttention):
    """Stores what ``FlashMlaSparse8Bit`` stores, and attends as the reference does."""

    layout: CacheLayout = FlashMlaRows()  # type: ignore[misc]  # a class variable, as the base has it

    def store(self, call: LatentStoreCall) -> None:
        FlashMlaSparse8Bit.store(cast(FlashMlaSparse8Bit, self), call)  # which needs the spec alone
