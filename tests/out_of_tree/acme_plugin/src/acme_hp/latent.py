"""Acme's latent attention: each element of the cached latents lies in a row of its own, one column per token.

Axes: T tokens, H query heads, L latent size, R rope size, S cached tokens of one request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from hardpoint_plugin_api import (
    AttentionBatch,
    AttentionMetadata,
    CacheLayout,
    CacheSpec,
    DeviceInfo,
    LatentBackend,
    LatentCall,
    LatentStoreCall,
    LatentWorkload,
    Reason,
    Region,
)

PLANES = ("latent", "rope_key")


class ColumnsLayout(CacheLayout):
    """Each plane of a page is [size, block]."""

    name = "acme_latent_columns"

    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        regions, start = [], 0
        for plane in spec.planes:
            nbytes = plane.numel * block_size * getattr(torch, plane.dtype).itemsize
            regions.append(Region(plane.name, start, nbytes, (plane.numel, block_size), plane.dtype))
            start += nbytes
        return tuple(regions)

    def to_logical(self, views: Mapping[str, torch.Tensor], pages: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: view[pages].transpose(1, 2) for name, view in views.items()}

    def from_logical(
        self, views: Mapping[str, torch.Tensor], pages: torch.Tensor, planes: Mapping[str, torch.Tensor]
    ) -> None:
        for name, values in planes.items():
            views[name][pages] = values.transpose(1, 2)


class AcmeLatent(LatentBackend):
    """Serves one request after the other; the latents are keys and values of one head that all query heads share."""

    layout: ClassVar[CacheLayout] = ColumnsLayout()

    @classmethod
    def supports(cls, workload: LatentWorkload, device: DeviceInfo) -> list[Reason]:
        """Acme's kernel takes latents in groups of four elements."""
        assert workload.latent_size is not None
        if workload.latent_size % 4 == 0:
            return []
        return [Reason("latent-size", "latents come in fours", wanted=str(workload.latent_size), supported="4, 8, ...")]

    def store(self, call: LatentStoreCall) -> None:
        slots, block = call.slot_mapping.long(), self.spec.block_size
        for name, x in zip(PLANES, (call.latent, call.rope_key), strict=True):
            call.cache[name][slots // block, :, slots % block] = x.to(call.cache[name].dtype)

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        return AttentionMetadata(batch)

    def forward(self, call: LatentCall) -> None:
        batch, block = call.metadata.batch, self.spec.block_size
        queries = torch.cat([call.q_latent, call.q_rope], dim=-1).transpose(0, 1)  # [H, T, L + R]
        for i, length in enumerate(batch.seq_lens_host):
            rows = slice(batch.query_start_host[i], batch.query_start_host[i + 1])
            planes = self.layout.to_logical(call.cache, batch.block_table[i, : -(-length // block)].long())
            latents, rope_keys = (planes[name].flatten(0, 1)[:length].to(queries.dtype) for name in PLANES)
            first = length - (rows.stop - rows.start)
            visible = torch.arange(first, length)[:, None] >= torch.arange(length)
            keys, values = torch.cat([latents, rope_keys], dim=-1)[None, None], latents[None, None]
            attended = scaled_dot_product_attention(
                queries[None, :, rows], keys, values, attn_mask=visible, scale=self.spec.scale, enable_gqa=True
            )
            call.out[rows] = attended[0].transpose(0, 1)
