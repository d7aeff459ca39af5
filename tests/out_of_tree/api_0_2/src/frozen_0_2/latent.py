"""A backend of latent attention over the plain cache, one request at a time."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from hardpoint_plugin_api import (
    AttentionBatch,
    AttentionMetadata,
    BuildContext,
    CacheLayout,
    DeviceInfo,
    LatentBackend,
    LatentCall,
    LatentSpec,
    LatentStoreCall,
    LatentWorkload,
    PlainLayout,
    Reason,
)


class FrozenLatent(LatentBackend):
    """Latents stand for keys and values of one head that all query heads share."""

    layout: ClassVar[CacheLayout] = PlainLayout()

    def __init__(self, ctx: BuildContext, spec: LatentSpec) -> None:
        super().__init__(ctx, spec)
        assert spec.workload().latent_size == spec.latent_size
        assert self.cache_spec["rope_key"].shape == (spec.rope_size,)

    @classmethod
    def supports(cls, workload: LatentWorkload, device: DeviceInfo) -> list[Reason]:
        return []

    def store(self, call: LatentStoreCall) -> None:
        slots, block = call.slot_mapping.long(), self.spec.block_size
        for name, x in (("latent", call.latent), ("rope_key", call.rope_key)):
            call.cache[name][slots // block, slots % block] = x.to(call.cache[name].dtype)

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        return AttentionMetadata(batch)

    def forward(self, call: LatentCall) -> None:
        batch, block = call.metadata.batch, self.spec.block_size
        queries = torch.cat([call.q_latent, call.q_rope], dim=-1).transpose(0, 1)
        for i, length in enumerate(batch.seq_lens_host):
            rows = slice(batch.query_start_host[i], batch.query_start_host[i + 1])
            planes = self.layout.to_logical(call.cache, batch.block_table[i, : -(-length // block)].long())
            latents, rope = (planes[name].flatten(0, 1)[:length].to(queries.dtype) for name in ("latent", "rope_key"))
            first = length - (rows.stop - rows.start)
            visible = torch.arange(first, length)[:, None] >= torch.arange(length)
            keys = torch.cat([latents, rope], dim=-1)
            attended = scaled_dot_product_attention(
                queries[None, :, rows],
                keys[None, None],
                latents[None, None],
                attn_mask=visible,
                scale=self.spec.scale,
                enable_gqa=True,
            )
            call.out[rows] = attended[0].transpose(0, 1)
