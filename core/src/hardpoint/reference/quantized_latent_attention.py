"""The truth of latent attention over latents of 8 bits, each with a scale, beside rotated keys in the model's dtype."""

from __future__ import annotations

from hardpoint.reference.latent_attention import ReferenceLatentAttention
from hardpoint_plugin_api import CacheLayout, LatentStoreCall, ScaledLayout, write_rounded


class QuantizedLatentAttention(ReferenceLatentAttention):
    """The reference, for caches of 8-bit elements."""

    layout: CacheLayout = ScaledLayout()  # type: ignore[misc]  # a class variable, as the base has it

    def store(self, call: LatentStoreCall) -> None:
        slots, rope_keys = call.slot_mapping.long(), call.cache["rope_key"]
        where = (slots // self.spec.block_size, slots % self.spec.block_size)
        write_rounded(call.cache, "latent", where, call.latent, None)
        rope_keys[where] = call.rope_key.to(rope_keys.dtype)
