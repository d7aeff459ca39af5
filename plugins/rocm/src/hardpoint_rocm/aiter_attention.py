"""AITER's attention over the cache of layout "plain": flash attention for prompts, paged attention for decodes.

Both are backends of their own, so either may be replaced: core's Triton attention works on the same cache. Windows are
not claimed. Both kernels multiply values that the mask hides by zero, and a window's table names pages that belong to
other requests by then; a NaN there would reach the result.

Axes: T tokens, N requests, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from hardpoint.ops.store_kv import store_kv
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    AttentionWorkload,
    BuildContext,
    CacheLayout,
    DeviceInfo,
    Feature,
    PlainLayout,
    Reason,
    StoreCall,
)
from hardpoint_rocm.aiter_library import function, reasons_against

WORKSPACE = "aiter_paged_attention"
PARTITION = 256
"""Keys of one program of the paged kernel: each leaves a partial result in the workspace."""
_MOST_GROUP = 16


@dataclass
class PromptMetadata(AttentionMetadata):
    """``whole``: no request has tokens from earlier steps. ``longest``: most queries, and keys, of one request."""

    whole: bool = False
    longest: tuple[int, int] = (0, 0)


class AiterAttention(AttentionBackend):
    """Common to both: they read "plain" pages of 16-bit elements."""

    layout: ClassVar[CacheLayout] = PlainLayout()
    exact_lengths: ClassVar[bool] = False
    functions: ClassVar[tuple[str, ...]]
    """Of AITER, as in ``SIGNATURES``."""

    @classmethod
    def supports(cls, workload: AttentionWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse what AITER's kernels do not take, and an AITER that has other functions."""
        return [*refusals(workload), *reasons_against(*cls.functions)]

    def store(self, call: StoreCall) -> None:
        """See AttentionBackend. Where a fused op writes this layout, it is called instead."""
        store_kv.reference(call.k, call.v, call.cache["k"], call.cache["v"], call.slot_mapping)


class AiterFlashAttention(AiterAttention):
    """Requests with several queries. Prompts that begin in this step are read as they come, others from the cache."""

    functions = ("flash_attn_varlen_func", "mha_batch_prefill_func")

    def plan(self, batch: AttentionBatch) -> PromptMetadata:
        """See AttentionBackend."""
        return PromptMetadata(batch, whole=is_whole(batch), longest=longest(batch))

    def forward(self, call: AttentionCall) -> None:
        """See AttentionBackend."""
        planned, spec = call.metadata, self.spec
        assert isinstance(planned, PromptMetadata)
        batch, (queries, keys) = planned.batch, planned.longest
        q, k, v, out = (x[: batch.num_tokens] for x in (call.q, call.k, call.v, call.out))
        if planned.whole:
            flash_attention(self, q, k, v, (batch.query_start, batch.query_start), planned.longest, out)
            return
        function("mha_batch_prefill_func")(
            q=readable(q),
            k=call.cache["k"],
            v=call.cache["v"],
            cu_seqlens_q=batch.query_start,
            kv_indptr=batch.query_start,  # not read, as the next: pages come from block_table
            kv_page_indices=batch.block_table,
            max_seqlen_q=queries,
            max_seqlen_k=keys,
            softmax_scale=spec.scale,
            logits_soft_cap=spec.soft_cap or 0.0,
            causal=True,
            alibi_slopes=self.alibi_slopes,
            out=out,
            block_table=batch.block_table,
            seqlen_k=batch.seq_lens,
        )


@dataclass
class DecodeMetadata(AttentionMetadata):
    """``parts``: requests of one call, and the keys of the longest of them. ``block_table`` has adjacent rows."""

    parts: Sequence[tuple[slice, int]] = ()
    block_table: torch.Tensor | None = None


class AiterPagedAttention(AiterAttention):
    """Requests with one query each.

    A call leaves a partial result for every head and 256 keys of the longest request. A step whose results do not fit
    the workspace is made in several calls.
    """

    functions = ("paged_attention_v1",)

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        super().__init__(ctx, spec)
        self._partial_bytes = spec.num_heads * (spec.head_size * 2 + 8)  # a result, a maximum and a sum
        self._ones: torch.Tensor | None = None
        wanted = int(ctx.plugin_config("rocm")["aiter_workspace_mib"]) * 2**20
        one_request = self._partial_bytes * partitions(ctx.limits.max_model_len)
        ctx.resources.declare(WORKSPACE, max(wanted, one_request), scope="step")

    def plan(self, batch: AttentionBatch) -> DecodeMetadata:
        """See AttentionBackend. Nothing waits for the device."""
        room = self.ctx.resources.get(WORKSPACE).numel() // self._partial_bytes
        return DecodeMetadata(
            batch, parts=parts_within(batch.seq_lens_host, room), block_table=batch.block_table.contiguous()
        )

    def forward(self, call: AttentionCall) -> None:
        """See AttentionBackend."""
        planned, spec = call.metadata, self.spec
        assert isinstance(planned, DecodeMetadata)
        assert planned.block_table is not None
        if self._ones is None:
            self._ones = torch.ones(1, dtype=torch.float32, device=call.q.device)
        for part, keys in planned.parts:
            function("paged_attention_v1")(
                out=call.out[part],
                workspace_buffer=self.ctx.resources.get(WORKSPACE),
                query=readable(call.q[part]),
                key_cache=call.cache["k"],
                value_cache=call.cache["v"],
                scale=spec.scale,
                block_tables=planned.block_table[part],
                cu_query_lens=None,
                context_lens=planned.batch.seq_lens[part],
                max_context_len=keys,
                alibi_slopes=self.alibi_slopes,
                kv_cache_dtype="auto",
                kv_cache_layout="NHD",
                logits_soft_cap=spec.soft_cap or 0.0,
                k_scale=self._ones,
                v_scale=self._ones,
            )


def refusals(workload: AttentionWorkload) -> list[Reason]:
    """Why AITER's kernels over pages of 16-bit elements do not take ``workload``, whichever of them it is for."""
    found = [*group_reasons(workload), *kv_dtype_reasons(workload)]
    if {Feature.SOFT_CAP, Feature.ALIBI} <= workload.features:
        message = "AITER adds ALiBi's slopes before it caps scores, and the model after"
        found.append(Reason("feature", message, wanted="alibi, soft_cap", supported="either"))
    return found


def kv_dtype_reasons(workload: AttentionWorkload) -> list[Reason]:
    """Refuse a cache in another dtype than that of queries."""
    if workload.kv_dtype in (None, workload.dtype):
        return []
    message = "the cache's dtype is not the queries'"
    return [Reason("kv-dtype", message, wanted=workload.kv_dtype, supported=workload.dtype)]


def group_reasons(workload: AttentionWorkload) -> list[Reason]:
    """Refuse more query heads for each KV head than a tile of AITER's decode kernels has rows."""
    heads, kv_heads = workload.num_heads, workload.num_kv_heads
    if not heads or not kv_heads or heads <= _MOST_GROUP * kv_heads:
        return []
    message, most = "too many query heads share a KV head", f"up to {_MOST_GROUP}"
    return [Reason("head-group", message, wanted=str(heads // kv_heads), supported=most)]


def flash_attention(
    backend: AttentionBackend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    out: torch.Tensor,
) -> None:
    """Attention of requests whose queries ``q`` [T, H, D], and keys and values ``k``, ``v`` [S, K, D], are adjacent.

    ``starts``, int32 [N+1] each: where the queries, and the keys, of each request begin. ``longest``: most queries, and
    keys, of one request. Mutates ``out`` [T, H, D].
    """
    function("flash_attn_varlen_func")(
        q=readable(q),
        k=readable(k),
        v=readable(v),
        cu_seqlens_q=starts[0],
        cu_seqlens_k=starts[1],
        max_seqlen_q=longest[0],
        max_seqlen_k=longest[1],
        softmax_scale=backend.spec.scale,
        logits_soft_cap=backend.spec.soft_cap or 0.0,
        causal=True,
        alibi_slopes=backend.alibi_slopes,
        out=out,
    )


def is_whole(batch: AttentionBatch) -> bool:
    """Whether no request of ``batch`` has tokens from earlier steps."""
    starts = batch.query_start_host
    return all(length == starts[i + 1] - starts[i] for i, length in enumerate(batch.seq_lens_host))


def longest(batch: AttentionBatch) -> tuple[int, int]:
    """The most queries and the most keys of one request; of keys an upper bound where lengths are such."""
    starts = batch.query_start_host
    return max(last - first for first, last in itertools.pairwise(starts)), max(batch.seq_lens_host)


def parts_within(lengths: Sequence[int], room: int) -> list[tuple[slice, int]]:
    """Requests in order, in parts whose partial results fit ``room``, with the longest of each.

    ``lengths``: keys of each request. A part of n requests has n times the partitions of its longest one.
    """
    found, first = [], 0
    while first < len(lengths):
        last, most = first, 0
        while last < len(lengths):
            grown = max(most, lengths[last])
            if last > first and (last + 1 - first) * partitions(grown) > room:
                break
            last, most = last + 1, grown
        found.append((slice(first, last), most))
        first = last
    return found


def partitions(keys: int) -> int:
    """Partial results of one head over ``keys``."""
    return -(-keys // PARTITION)


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` [T, H, D], or a copy: AITER takes rows that are apart, whose heads are adjacent."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
