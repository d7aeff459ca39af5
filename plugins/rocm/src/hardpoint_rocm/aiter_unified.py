"""AITER's unified attention, a Triton kernel over pages of nearly any size. It never ran on hardware.

Of AITER's kernels it alone takes the pages of hybrids, which are as large as a state: 544 tokens, for example.
"""

from __future__ import annotations

from hardpoint_plugin_api import (
    AttentionBatch,
    AttentionCall,
    AttentionWorkload,
    DeviceInfo,
    Reason,
)
from hardpoint_rocm.aiter_attention import AiterAttention, PromptMetadata, kv_dtype_reasons, longest, readable
from hardpoint_rocm.aiter_library import function, reasons_against

UNIFIED = "ops.triton.attention.unified_attention.unified_attention"
_TILES = (16, 64)
"""Keys of a tile: as many as a page has, within these bounds. Of the largest, smaller pages must be a whole part."""
_MOST_GROUP = 128
"""Rows of a prompt's tile: those of all query heads of a KV head, for one token at least."""


class AiterUnifiedAttention(AiterAttention):
    """All steps, over pages of 16-bit elements.

    Soft caps are not claimed: the kernel makes a tanh of two powers of two, which overflow where a score is more than
    88 times the cap. Windows are not, since it multiplies values before the window by zero.
    """

    functions = (UNIFIED,)

    @classmethod
    def supports(cls, workload: AttentionWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse pages and groups of heads that its tiles do not take, and an AITER that has the function otherwise."""
        found = kv_dtype_reasons(workload)
        block, heads, kv_heads = workload.block_size, workload.num_heads, workload.num_kv_heads
        if block and block < _TILES[1] and (block < _TILES[0] or block & (block - 1)):
            supported = "16, 32, and 64 or more"
            found.append(Reason("block-size", "tokens of a page", wanted=str(block), supported=supported))
        if heads and kv_heads and heads > _MOST_GROUP * kv_heads:
            most = f"up to {_MOST_GROUP}"
            found.append(Reason("head-group", "query heads of a KV head", str(heads // kv_heads), most))
        return [*found, *reasons_against(*cls.functions)]

    def plan(self, batch: AttentionBatch) -> PromptMetadata:
        """See AttentionBackend. Nothing waits for the device."""
        return PromptMetadata(batch, longest=longest(batch))

    def forward(self, call: AttentionCall) -> None:
        """See AttentionBackend."""
        planned = call.metadata
        assert isinstance(planned, PromptMetadata)
        batch, (queries, keys) = planned.batch, planned.longest
        function(UNIFIED)(
            q=readable(call.q[: batch.num_tokens]),
            k=call.cache["k"],
            v=call.cache["v"],
            out=call.out[: batch.num_tokens],
            cu_seqlens_q=batch.query_start,
            max_seqlen_q=queries,
            seqused_k=batch.seq_lens,
            max_seqlen_k=keys,
            softmax_scale=self.spec.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=batch.block_table,
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
        )
