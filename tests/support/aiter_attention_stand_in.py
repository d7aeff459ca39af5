"""AITER's attention as far as it is called: it computes by core's reference, and refuses what the real one would.

Parameters and defaults: aiter/ops/mha.py at 222170e1f9b6e7ad04ea8ecec24326e71ec67d72, aiter/ops/attention.py at
41042f7a85d5d13adce546973031ed280f18e0fc, of github.com/ROCm/aiter. Checks: the same files, csrc/cpp_itfs/pa/pa_v1.py at
044f906a8d56f8d1577081f0aab730fcf659b9bd and pa_kernels.cuh at d59af8886f31e3e32fa220e900a06a3521cb6afe,
csrc/py_itfs_ck/mha_batch_prefill_kernels.cu at 2a46a69c83b8114a52afb85b8592516e1192215c,
csrc/py_itfs_ck/mha_varlen_fwd_kernels.cu at eb3b3dbd7e0f79d1d53517abb9a86fdf2b904a5a, csrc/py_itfs_cu/asm_pa.cu at
a40c487b3c01dc03fd3872d65b1f7404f669471f with hsa/gfx942/pa/pa_asm.csv. Pages of batch prefill: those of
op_tests/test_batch_prefill.py. The kernels' assumptions about strides are checked, too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hardpoint.reference.attention import attend
from hardpoint_plugin_api import AttentionSpec
from tests.support.aiter_calls import count

_HALF = (torch.float16, torch.bfloat16)
_FP8 = torch.float8_e4m3fnuz


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, ...] = (-1, -1, 0),
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    how_v3_bf16_cvt: int = 1,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
    sink_ptr: Tensor | None = None,
) -> Tensor:
    """Writes to ``out`` [T, H, D]. Only causal attention of packed sequences is stood in for."""
    count("flash_attn_varlen_func")
    assert causal
    assert block_table is None
    assert softmax_scale is not None
    assert q.dtype in _HALF, "FlashAttention only support fp16, bf16 and fp8_e4m3 data type"
    assert k.dtype == v.dtype == q.dtype, "query and key must have the same dtype"
    assert all(t.stride(-1) == 1 for t in (q, k, v)), "Input tensor must have contiguous last dimension"
    for starts in (cu_seqlens_q, cu_seqlens_k):
        assert starts.dtype == torch.int32, "cu_seqlens must have dtype int32"
        assert starts.is_contiguous()
    assert cu_seqlens_q.shape == cu_seqlens_k.shape
    _check_heads(q.shape[1], k.shape[1], q.shape[2])
    assert k.shape == v.shape
    assert out is not None
    assert out.shape == (q.shape[0], *q.shape[1:])
    assert out.dtype == q.dtype
    queries, keys = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    assert int(queries.max()) <= max_seqlen_q, "a grid of too few programs"
    assert int(keys.max()) <= max_seqlen_k
    assert int(cu_seqlens_k[-1]) <= k.shape[0]
    for i in range(len(queries)):
        rows, span = _slice(cu_seqlens_q, i), _slice(cu_seqlens_k, i)
        out[rows] = _attend(q[rows], k[span], v[span], softmax_scale, logits_soft_cap, alibi_slopes)
    return out


def mha_batch_prefill_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    kv_indptr: Tensor,
    kv_page_indices: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    out: Tensor | None = None,
    kv_last_page_lens: Tensor | None = None,
    block_table: Tensor | None = None,
    seqlen_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    kv_block_descale: Tensor | None = None,
    sink_ptr: Tensor | None = None,
    sink_size: int = 0,
) -> Tensor:
    """Writes to ``out`` [T, H, D]. Pages are [P, B, K, D], in a table with a row for each request."""
    count("mha_batch_prefill_func")
    assert causal
    assert softmax_scale is not None
    assert q.dtype in _HALF
    assert k.dtype == v.dtype == q.dtype
    requests, vector = cu_seqlens_q.numel() - 1, 16 // k.element_size()
    _check_heads(q.shape[1], k.shape[2], q.shape[2])
    _, block, heads, size = k.shape
    assert v.shape == k.shape, "K/V linear layout must match page size and head count"
    assert block in (1, 16, 1024), "invalid argument for batch_prefill: no matching kernel found"
    assert size in (128, 256)
    for cache in (k, v):
        assert cache.stride(3) == 1, "Batch prefill requires K/V with contiguous last dimension"
        assert cache.stride(2) >= size
        assert cache.stride(1) >= heads * cache.stride(2)
        assert cache.stride(0) >= block * cache.stride(1)
        assert all(stride % vector == 0 for stride in cache.stride()[:3])
    assert kv_page_indices.dtype == torch.int32, "kv_page_indices must have dtype torch.int32"
    assert kv_page_indices.stride(-1) == 1
    assert cu_seqlens_q.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous()
    assert kv_indptr.is_contiguous()
    assert kv_indptr.shape == (requests + 1,)
    assert block_table is not None
    assert seqlen_k is not None, "block_table requires seqlen_k for per-batch lengths"
    assert block_table.dtype == seqlen_k.dtype == torch.int32
    assert block_table.dim() == 2
    assert block_table.shape[0] == requests
    assert block_table.stride(-1) == 1
    assert seqlen_k.shape == (requests,)
    assert out is not None
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q, "a grid of too few programs"
    for i, length in enumerate(seqlen_k.tolist()):
        assert length <= max_seqlen_k
        keys, values = (_gather(cache, block_table[i], length) for cache in (k, v))
        rows = _slice(cu_seqlens_q, i)
        out[rows] = _attend(q[rows], keys, values, softmax_scale, logits_soft_cap, alibi_slopes)
    return out


def paged_attention_v1(
    out: Tensor,
    workspace_buffer: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    block_tables: Tensor,
    cu_query_lens: Tensor | None,
    context_lens: Tensor,
    max_context_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    kv_cache_layout: str,
    logits_soft_cap: float,
    k_scale: Tensor,
    v_scale: Tensor,
    fp8_out_scale: Tensor | None = None,
    partition_size: int = 256,
    mtp: int = 1,
    sliding_window: int = 0,
) -> Tensor:
    """Writes to ``out`` [N, H, D], and anything to the workspace. Pages are [P, B, K, D] of 16-bit elements."""
    count("paged_attention_v1")
    assert (kv_cache_dtype, kv_cache_layout, mtp, sliding_window, cu_query_lens) == ("auto", "NHD", 1, 0, None)
    if query.dtype not in _HALF or out.dtype not in _HALF:
        raise ValueError(f"Unsupported data type: {query.dtype}")
    assert key_cache.dtype == value_cache.dtype == query.dtype, "the caches are read as the queries' dtype"
    (requests, heads, size), (_, block, kv_heads, _) = query.shape, key_cache.shape
    assert key_cache.stride() == value_cache.stride(), "keys' strides serve for both"
    assert key_cache.stride(3) == 1
    assert query.stride()[1:] == (size, 1)
    assert out.is_contiguous()
    assert size in (64, 128)
    assert block in (16, 32)
    _check_heads(heads, kv_heads, size)
    assert heads // kv_heads <= 16
    for array in (block_tables, context_lens):
        assert array.dtype == torch.int32
        assert array.is_contiguous()
    if block_tables.size(1) < math.ceil(max_context_len / block) or context_lens.size(0) != block_tables.size(0):
        raise ValueError("paged_attention_v1: block_tables.size(1) is too small, or context_lens differ")
    parts = math.ceil(max_context_len / partition_size)
    needed = requests * heads * parts * (size * query.element_size() + 8)
    if workspace_buffer.numel() * workspace_buffer.element_size() < needed:
        raise ValueError(f"paged_attention_v1: workspace_buffer is too small, need at least {needed} bytes")
    assert k_scale.dtype == v_scale.dtype == torch.float32
    assert max_context_len >= int(context_lens.max())
    workspace_buffer[:needed].fill_(0xFF)
    for i, length in enumerate(context_lens.tolist()):
        keys, values = (_gather(cache, block_tables[i], length) for cache in (key_cache, value_cache))
        out[i : i + 1] = _attend(query[i : i + 1], keys, values, scale, logits_soft_cap, alibi_slopes)
    return out


def pa_fwd_asm(
    Q: Tensor,  # noqa: N803  # the real names, which callers pass
    K: Tensor,  # noqa: N803
    V: Tensor,  # noqa: N803
    block_tables: Tensor,
    context_lens: Tensor,
    block_tables_stride0: int,
    max_qlen: int = 1,
    K_QScale: Tensor | None = None,  # noqa: N803
    V_QScale: Tensor | None = None,  # noqa: N803
    out_: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    high_precision: int | None = 1,
    kernelName: str | None = None,  # noqa: N803
) -> Tensor:
    """Writes to ``out_`` [N, H, D]. K [P, heads, D/x, B, x], V [P, heads, B/x, D, x]; scales [P, heads, B]."""
    count("pa_fwd_asm")
    assert (max_qlen, qo_indptr, high_precision, kernelName) == (1, None, 1, None)
    (requests, heads, size), (pages, kv_heads, _, block, unit) = Q.shape, K.shape
    assert size == 128, f"ASM PA only supports head_size=128, got {size}"
    assert Q.dtype in _HALF, "unsupport Q dtype"
    assert K.dtype == V.dtype
    assert K.dtype in (Q.dtype, _FP8), "cannot get heuristic kernel!"
    assert block == 16, "cannot get heuristic kernel!"
    assert heads // kv_heads <= 16, "cannot get heuristic kernel!"
    assert unit == 16 // K.element_size()
    assert K.shape == (pages, kv_heads, size // unit, block, unit)
    assert V.shape == (pages, kv_heads, block // unit, size, unit)
    assert K.stride()[:2] == V.stride()[:2], "keys' strides serve for both"
    assert K[0, 0].is_contiguous()
    assert V[0, 0].is_contiguous()
    assert Q.stride()[1:] == (size, 1)
    assert out_ is not None
    assert out_.is_contiguous()
    assert block_tables.stride() == (block_tables_stride0, 1)
    assert block_tables.dtype == context_lens.dtype == torch.int32
    assert context_lens.is_contiguous()
    assert context_lens.size(0) == requests
    scales: list[Tensor | None] = [K_QScale, V_QScale]
    for scale in scales:
        assert (scale is None) == (K.dtype != _FP8)
        if scale is not None:
            assert scale.shape == (pages, kv_heads, block)
            assert scale.is_contiguous(), "the kernel knows no stride of scales"
            assert scale.dtype == torch.float32
    for i, length in enumerate(context_lens.tolist()):
        used = block_tables[i, : -(-length // block)].long()
        found = []
        for cache, scale, order in ((K, scales[0], (0, 3, 1, 2, 4)), (V, scales[1], (0, 2, 4, 1, 3))):
            numbers = _bytes(cache)[used].view(cache.dtype).float().permute(order)
            numbers = numbers.reshape(len(used), block, kv_heads, size)
            if scale is not None:
                numbers = numbers * scale[used].transpose(1, 2)[..., None]
            found.append(numbers.flatten(0, 1)[:length])
        out_[i : i + 1] = _attend(Q[i : i + 1], found[0], found[1], size**-0.5, 0.0, None)
    return out_


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, soft_cap: float, slopes: Tensor | None) -> Tensor:
    if slopes is not None:
        assert slopes.dtype == torch.float32
        assert slopes.shape == (q.shape[1],)
    shape = q.shape[1], k.shape[1], q.shape[2]
    spec = AttentionSpec(*shape, scale, "float32", "float32", 16, soft_cap=soft_cap or None, alibi=slopes is not None)
    return attend(q, k, v, spec, alibi_slopes=slopes)


def _gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    return cache[table[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]


def _slice(starts: Tensor, i: int) -> slice:
    return slice(int(starts[i]), int(starts[i + 1]))


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _check_heads(heads: int, kv_heads: int, size: int) -> None:
    assert heads % kv_heads == 0, "Number of heads in key/value must divide number of heads in query"
    assert size <= 256, "CK only supports head dimension at most 256"
    assert size % 8 == 0
