"""Flash attention of vllm-xpu-kernels over the cache of layout "plain".

Features are not claimed: ALiBi's slopes and soft caps are taken and not used (csrc/flash_attn/flash_api.cpp), and
windows and sinks are compiled for few shapes; without its kernel, the library computes in torch, far slower.

Axes: T tokens, N requests, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch

from hardpoint.attention.phases import sub_batch
from hardpoint.ops.store_kv import store_kv
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionMetadata,
    AttentionWorkload,
    CacheLayout,
    DeviceInfo,
    PlainLayout,
    Reason,
    StoreCall,
)
from hardpoint_xpu.vllm_library import FLASH, flash_attention, reasons_against


@dataclass
class FlashMetadata(AttentionMetadata):
    """``parts``: the rows of decodes, and of all others; each with its requests as a batch of their own, and the most
    queries of one."""

    parts: Sequence[tuple[slice, AttentionBatch, int]] = ()


class XpuFlashAttention(AttentionBackend):
    """Decodes in one call, which splits long contexts, and all other requests in another."""

    layout: ClassVar[CacheLayout] = PlainLayout()
    exact_lengths: ClassVar[bool] = False

    @classmethod
    def supports(cls, workload: AttentionWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse caches of another dtype, and a library that has another function."""
        found = reasons_against(FLASH)
        if workload.kv_dtype not in (None, workload.dtype):
            message = "the cache's dtype is not the queries'"
            found.append(Reason("kv-dtype", message, wanted=workload.kv_dtype, supported=workload.dtype))
        return found

    def store(self, call: StoreCall) -> None:
        """See AttentionBackend. Where a fused op writes this layout, it is called instead."""
        store_kv.reference(call.k, call.v, call.cache["k"], call.cache["v"], call.slot_mapping)

    def plan(self, batch: AttentionBatch) -> FlashMetadata:
        """See AttentionBackend."""
        starts, split, last = batch.query_start_host, batch.num_decodes, batch.num_requests
        parts = [
            (
                slice(starts[begin], starts[end]),
                sub_batch(batch, begin, end),
                max(after - before for before, after in pairwise(starts[begin : end + 1])),
            )
            for begin, end in ((0, split), (split, last))
            if begin < end
        ]
        return FlashMetadata(batch, parts=parts)

    def forward(self, call: AttentionCall) -> None:
        """See AttentionBackend."""
        assert isinstance(call.metadata, FlashMetadata)
        for rows, batch, queries in call.metadata.parts:
            k, v, table = _pages(call.cache["k"], call.cache["v"], batch)
            flash_attention()(
                q=call.q[rows],
                k=k,
                v=v,
                max_seqlen_q=queries,
                cu_seqlens_q=batch.query_start,
                max_seqlen_k=max(batch.seq_lens_host),
                seqused_k=batch.seq_lens,
                softmax_scale=self.spec.scale,
                causal=True,
                block_table=table,
                out=call.out[rows],
                is_mix_batch=False,
            )


def _pages(k: torch.Tensor, v: torch.Tensor, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages of keys and values [P, B, K, D], and the table of them, int32.

    The kernels count the distance of pages in tokens. Where pages are padded, as those of layers are that share memory
    with larger pages, that may be no whole number: then the pages that ``batch`` reads are copied first.
    """
    if k.stride(0) % k.stride(1) == 0:
        return k, v, batch.block_table
    table = batch.block_table[:, : -(-max(batch.seq_lens_host) // k.shape[1])]
    ids = table.flatten().long()
    return k[ids], v[ids], torch.arange(len(ids), dtype=torch.int32, device=k.device).view(table.shape)
