"""Acme's paged attention, with a cache layout of its own.

Keys lie in tiles, [K, D / tile, block, tile]; each head's values are followed by padding, [K, block * D + 16].
Axes: T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    AttentionWorkload,
    BuildContext,
    CacheLayout,
    CacheSpec,
    ConfigError,
    DeviceInfo,
    OpWorkload,
    Reason,
    Region,
    StoreCall,
)

TILE = 8
PADDING = 16
"""Elements after each head's values."""


class TiledLayout(CacheLayout):
    """See the top of this file."""

    name = "acme_tiled"
    alignment = 128

    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        dtype, (heads, size) = spec["k"].dtype, spec["k"].shape
        item = getattr(torch, dtype).itemsize
        keys = Region("k", 0, heads * size * block_size * item, (heads, size // TILE, block_size, TILE), dtype)
        row = block_size * size + PADDING
        values = Region("v", keys.nbytes, heads * row * item, (heads, row), dtype)
        return keys, values

    def to_logical(self, views: Mapping[str, torch.Tensor], pages: torch.Tensor) -> dict[str, torch.Tensor]:
        k, v = views["k"][pages], views["v"][pages]
        count, heads, tiles, block, tile = k.shape
        keys = k.permute(0, 3, 1, 2, 4).reshape(count, block, heads, tiles * tile)
        values = v[..., :-PADDING].view(count, heads, block, tiles * tile).transpose(1, 2)
        return {"k": keys, "v": values}

    def from_logical(
        self, views: Mapping[str, torch.Tensor], pages: torch.Tensor, planes: Mapping[str, torch.Tensor]
    ) -> None:
        k, v = planes["k"], planes["v"]
        count, block, heads, size = k.shape
        views["k"][pages] = k.view(count, block, heads, size // TILE, TILE).permute(0, 2, 3, 1, 4).to(views["k"].dtype)
        views["v"][pages, :, :-PADDING] = v.transpose(1, 2).reshape(count, heads, -1).to(views["v"].dtype)


def store(k: torch.Tensor, v: torch.Tensor, cache: dict[str, torch.Tensor], slot_mapping: torch.Tensor) -> None:
    """Write k and v [T, K, D] at their slots; mutates the cache."""
    tokens, heads, size = k.shape
    block = cache["k"].shape[3]
    page, offset = slot_mapping.long() // block, slot_mapping.long() % block
    cache["k"][page, :, :, offset] = k.reshape(tokens, heads, size // TILE, TILE).to(cache["k"].dtype)
    rows = cache["v"][..., :-PADDING].unflatten(-1, (block, size))
    rows[page, :, offset] = v.to(rows.dtype)


class AcmeAttention(AttentionBackend):
    """Serves one request after the other."""

    layout: ClassVar[CacheLayout] = TiledLayout()

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        super().__init__(ctx, spec)
        if ctx.plugin_config("acme")["tile"] != TILE:
            raise ConfigError(f"acme.tile: only {TILE} is compiled into this build")

    @classmethod
    def supports(cls, workload: AttentionWorkload, device: DeviceInfo) -> list[Reason]:
        """Acme's kernel serves at most 16 query heads for each KV head."""
        assert workload.num_heads is not None
        assert workload.num_kv_heads is not None
        ratio = workload.num_heads // workload.num_kv_heads
        if ratio <= 16:
            return []
        return [Reason("gqa-ratio", "too many query heads share a KV head", wanted=str(ratio), supported="up to 16")]

    def store(self, call: StoreCall) -> None:
        store(call.k, call.v, call.cache, call.slot_mapping)

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        return AttentionMetadata(batch)

    def forward(self, call: AttentionCall) -> None:
        q, cache, metadata, out = call.q, call.cache, call.metadata, call.out
        batch, spec = metadata.batch, self.spec
        for i, length in enumerate(batch.seq_lens_host):
            rows = slice(batch.query_start_host[i], batch.query_start_host[i + 1])
            first = length - (rows.stop - rows.start)
            block = spec.span.first(first) // spec.block_size  # what lies before it is not the request's own
            pages = batch.block_table[i, block : -(-length // spec.block_size)].long()
            start = block * spec.block_size
            planes = self.layout.to_logical(cache, pages)
            keys, values = (planes[name].flatten(0, 1)[: length - start].to(q.dtype) for name in ("k", "v"))
            visible = ~spec.span.hides(torch.arange(first, length)[:, None], torch.arange(start, length))
            one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in (q[rows], keys, values))
            attended = scaled_dot_product_attention(
                one_q, one_k, one_v, attn_mask=visible, scale=spec.scale, enable_gqa=True
            )
            out[rows] = attended[0].transpose(0, 1)


def qk_norm_rope_store(
    ctx: BuildContext, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Make Acme's version of the composite op, which knows the tiled cache."""

    def fused(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor | None,
        positions: torch.Tensor,
        cache: dict[str, torch.Tensor],
        slot_mapping: torch.Tensor,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        *,
        eps: float,
        interleaved: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = []
        for x, weight in ((q, q_weight), (k, k_weight)):
            y = x if weight is None else torch.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight
            both.append(y if cos_sin is None else _rotate(y, cos_sin[positions], interleaved))
        store(both[1], v, cache, slot_mapping)
        return both[0], both[1]

    return fused


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the leading elements of each head of x [T, N, D] by the angles of cos_sin [T, R], cosines then sines."""
    size = cos_sin.shape[-1]
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    turning, rest = x[..., :size].float(), x[..., size:]
    a, b = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([joined.to(x.dtype), rest], dim=-1)
