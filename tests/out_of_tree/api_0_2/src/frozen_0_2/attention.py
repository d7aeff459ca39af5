"""An attention backend with a cache layout of its own: one region, keys beside values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

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
    CaptureGrade,
    DeviceInfo,
    Reason,
    Region,
    StepLimits,
    StoreCall,
)


class FrozenLayout(CacheLayout):
    """[block, K, 2 D]."""

    name = "frozen"
    alignment = 32

    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        keys = spec["k"]
        assert spec == CacheSpec((keys, spec["v"]), spec.retention)
        heads, size = keys.shape
        shape = (block_size, heads, 2 * size)
        item = getattr(torch, keys.dtype).itemsize
        return (Region("kv", 0, block_size * 2 * keys.numel * item, shape, keys.dtype),)

    def to_logical(self, views: Mapping[str, torch.Tensor], pages: torch.Tensor) -> dict[str, torch.Tensor]:
        k, v = views["kv"][pages].chunk(2, dim=-1)
        return {"k": k, "v": v}

    def from_logical(
        self, views: Mapping[str, torch.Tensor], pages: torch.Tensor, planes: Mapping[str, torch.Tensor]
    ) -> None:
        views["kv"][pages] = torch.cat([planes["k"], planes["v"]], dim=-1)


@dataclass
class FrozenMetadata(AttentionMetadata):
    """Adds nothing but itself."""

    planned: bool = True


class FrozenAttention(AttentionBackend):
    """One request at a time."""

    layout: ClassVar[CacheLayout] = FrozenLayout()
    capture: ClassVar[CaptureGrade] = CaptureGrade.NEVER

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        super().__init__(ctx, spec)
        assert spec.cache_spec == self.cache_spec
        assert spec.workload().head_size == spec.head_size

    @classmethod
    def supports(cls, workload: AttentionWorkload, device: DeviceInfo) -> list[Reason]:
        return []

    def set_head_constants(self, sinks: torch.Tensor | None, alibi_slopes: torch.Tensor | None) -> None:
        super().set_head_constants(sinks, alibi_slopes)
        assert self.sinks is None
        assert self.alibi_slopes is None

    def step_limits(self) -> StepLimits:
        return StepLimits(max_requests=64)

    def store(self, call: StoreCall) -> None:
        kv, slots = call.cache["kv"], call.slot_mapping.long()
        block = kv.shape[1]
        kv[slots // block, slots % block] = torch.cat([call.k, call.v], dim=-1).to(kv.dtype)

    def plan(self, batch: AttentionBatch) -> FrozenMetadata:
        assert batch.num_requests >= batch.num_decodes
        assert batch.num_tokens == batch.query_start_host[-1]
        return FrozenMetadata(batch)

    def forward(self, call: AttentionCall) -> None:
        q, cache, metadata, out = call.q, call.cache, call.metadata, call.out
        assert isinstance(metadata, FrozenMetadata)
        batch, spec = metadata.batch, self.spec
        for i, length in enumerate(batch.seq_lens_host):
            rows = slice(batch.query_start_host[i], batch.query_start_host[i + 1])
            first = length - (rows.stop - rows.start)
            block = spec.span.first(first) // spec.block_size
            pages = batch.block_table[i, block : -(-length // spec.block_size)].long()
            start = block * spec.block_size
            planes = self.layout.to_logical(cache, pages)
            keys, values = (planes[name].flatten(0, 1)[: length - start].to(q.dtype) for name in ("k", "v"))
            hidden = spec.span.hides(torch.arange(first, length)[:, None], torch.arange(start, length))
            one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in (q[rows], keys, values))
            attended = scaled_dot_product_attention(
                one_q, one_k, one_v, attn_mask=~hidden, scale=spec.scale, enable_gqa=True
            )
            out[rows] = attended[0].transpose(0, 1)
