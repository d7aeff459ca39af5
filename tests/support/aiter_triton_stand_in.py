"""AITER's Triton kernels of attention and of sparse attention's indexer, and its top-k, as far as they are called.

They compute by core's references, and refuse what the real ones would. Parameters, defaults and checks:
aiter/ops/triton/attention/unified_attention.py at 70e9b025a6e16f2901e0d88c3f6700a3f89c7b71 with the kernel beside it,
aiter/ops/triton/attention/fp8_mqa_logits.py at 1b741c0e3ee2278e123a395fb23767ddbf8f8800, aiter/ops/topk.py at
65a2e34dab0a02d10e4148ce12055365e45bd688 with csrc/kernels/topk_per_row_kernels.cu at
97d2e6a543e14f74a202238e4337d2dff85d6eef, of github.com/ROCm/aiter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hardpoint.reference.attention import attend
from hardpoint_plugin_api import AttentionSpec
from tests.support.aiter_calls import count

_HALF = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def unified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Tensor,
    softcap: float,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    q_scales: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    output_scale: Tensor | None = None,
    qq_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    shuffled_kv_cache: bool = False,
    skip_reduce: bool = False,
) -> Tensor:
    """Writes to ``out`` [T, H, D]. Pages are [P, B, K, D] of 16-bit elements; windows, caps and scales are not stood
    in for."""
    count("unified_attention")
    assert causal, "Only causal attention is supported"
    assert (window_size, softcap, q_descale, k_descale, v_descale) == ((-1, -1), 0.0, None, None, None)
    assert q.dtype in _HALF
    assert k.dtype == v.dtype == q.dtype
    (_, heads, size), (_, block, kv_heads, _) = q.shape, k.shape
    assert k.shape == v.shape
    assert k.stride(3) == v.stride(3) == q.stride(2) == out.stride(2) == 1
    assert out.shape == q.shape
    if sinks is not None:
        assert sinks.shape[0] == heads, "Sinks must be num_query_heads size"
    for array in (cu_seqlens_q, seqused_k, block_table):
        assert array.dtype == torch.int32
        assert array.stride(-1) == 1
    requests, group = len(seqused_k), heads // kv_heads
    assert cu_seqlens_q.numel() == requests + 1
    lengths, queries = seqused_k.tolist(), cu_seqlens_q.diff().tolist()
    assert max(queries) <= max_seqlen_q
    assert max(lengths) <= max_seqlen_k, "a grid of too few programs"
    if max_seqlen_q == 1:
        assert queries == [1] * requests, "a program for each request"
    rows = 128 if max_seqlen_q >= 256 else 16 if group <= 16 else 1 << (group - 1).bit_length()
    assert rows // group >= 1
    tile = min(64, 1 << (block - 1).bit_length())
    assert tile >= 16, "a product of Triton's has 16 rows and columns at least"
    assert tile <= block or tile % block == 0, "TILE_SIZE needs to be divisible by block_size"
    assert block_table.shape[0] == requests
    assert all(-(-length // block) <= block_table.shape[1] for length in lengths)
    spec = AttentionSpec(
        *(heads, kv_heads, size, softmax_scale, "float32", "float32", block),
        sinks=sinks is not None,
        alibi=alibi_slopes is not None,
    )
    for i, length in enumerate(lengths):
        own = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        pages = block_table[i, : -(-length // block)].long()
        keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k, v))
        out[own] = attend(q[own], keys, values, spec, sinks, alibi_slopes)
    return out


def fp8_mqa_logits(
    Q: Tensor,  # noqa: N803  # the real names, which callers pass
    KV: Tensor,  # noqa: N803
    kv_scales: Tensor,
    weights: Tensor,
    cu_starts: Tensor,
    cu_ends: Tensor,
    clean_logits: bool = True,
) -> Tensor:
    """A new tensor float32 [T, S], whose rows are 256 elements or a multiple apart: -inf where a row does not read."""
    count("fp8_mqa_logits")
    tokens, heads, size = Q.shape
    assert Q.dtype in _FP8
    assert KV.dtype == Q.dtype
    assert KV.shape[1] == size
    assert heads & (heads - 1) == 0, "num q. heads should be power of 2."
    assert size & (size - 1) == 0, "head size should be power of 2."
    assert kv_scales.dtype == weights.dtype == torch.float32
    assert kv_scales.shape == KV.shape[:1]
    assert kv_scales.is_contiguous(), "the kernel knows no stride of scales"
    assert weights.shape == (tokens, heads)
    for array in (cu_starts, cu_ends):
        assert array.dtype == torch.int32
        assert array.shape == (tokens,)
        assert array.is_contiguous()
    width = KV.shape[0]
    fill = float("-inf") if clean_logits else float("nan")
    logits = torch.full((tokens, -(-width // 256) * 256), fill)[:, :width]
    dots = torch.einsum("thd,sd->ths", Q.float(), KV.float()) * kv_scales
    scores = torch.einsum("th,ths->ts", weights, dots.relu())
    at = torch.arange(width)
    read = (at >= cu_starts[:, None]) & (at < cu_ends[:, None])
    logits[read] = scores[read]
    return logits


def top_k_per_row_prefill(
    logits: Tensor,
    rowStarts: Tensor,  # noqa: N803
    rowEnds: Tensor,  # noqa: N803
    indices: Tensor,
    values: Tensor | None,
    numRows: int,  # noqa: N803
    stride0: int,
    stride1: int,
    k: int = 2048,
    stable: bool = False,
) -> None:
    """Writes to ``indices`` int32 [numRows, k]: with ``stable`` in rising order, then -1. Bits are compared, so that
    -0 is below 0, and a NaN with a sign below all numbers."""
    count("top_k_per_row_prefill")
    assert stable, "in no order that could be compared"
    assert values is None
    assert logits.dtype == torch.float32
    assert (logits.stride(0), stride1) == (stride0, 1)
    assert logits.stride(1) == 1
    assert indices.is_contiguous()
    assert indices.shape == (numRows, k)
    for array in (rowStarts, rowEnds, indices):
        assert array.dtype == torch.int32
    bits = logits.contiguous().view(torch.int32).long()
    keys = torch.where(bits < 0, -(2**31) - bits - 1, bits)  # in the order of floats, as the kernel's ``twiddle_in``
    for row in range(numRows):
        first, last = int(rowStarts[row]), int(rowEnds[row])
        order = keys[row, first:last].sort(descending=True, stable=True).indices[:k].sort().values
        indices[row] = -1
        indices[row, : len(order)] = order.int() + first
