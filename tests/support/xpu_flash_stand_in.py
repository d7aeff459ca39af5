"""Stands for vllm_xpu_kernels/flash_attn_interface.py: computes by core's reference, refuses what the real one would.

Parameters and defaults: that file of vllm-xpu-kernels 0.1.16.2. Checks: the same, and csrc/flash_attn/flash_api.cpp at
6268291, csrc/utils.h at 0eb8edb, csrc/xpu/attn/paged_kv_utils.h at 16092b5 of github.com/vllm-project/vllm-xpu-kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hardpoint.reference.attention import attend
from hardpoint_plugin_api import AttentionSpec
from tests.support.xpu_stand_in import count


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: list[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: object = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
    num_splits_kv: int | None = None,
    is_mix_batch: bool = True,
    host_kv_lens: Tensor | None = None,
) -> Tensor:
    """Writes to ``out`` [T, H, D]. Only causal attention over pages [P, B, K, D] is stood in for."""
    count("flash_attn_varlen_func")
    assert causal
    assert softmax_scale is not None
    assert block_table is not None
    assert cu_seqlens_k is None, "cu_seqlens_k and seqused_k cannot be provided at the same time"
    assert seqused_k is not None, "when enable block_table, seqused_k is needed"
    assert q.dtype in (torch.float16, torch.bfloat16), "VLLM Kernel XPU only supports fp16 and bf16 type"
    assert q.dtype == k.dtype == v.dtype, "query and key must have the same dtype"
    for x in (q, k, v):
        assert x.stride(-1) == 1
        assert x.shape[-1] * x.element_size() % 16 == 0
    assert k.stride(0) % k.stride(1) == 0, "Paged K page stride must be divisible by K sequence stride"
    assert k.stride() == v.stride()
    assert k.shape[1] % 16 == 0
    for array in (cu_seqlens_q, seqused_k, block_table):
        assert array.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous()
    assert block_table.stride(-1) == 1
    assert out is not None
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    counts = cu_seqlens_q.diff()
    assert int(counts.max()) <= max_seqlen_q
    assert is_mix_batch or max_seqlen_q == 1 or int(counts.min()) > 0
    for i, length in enumerate(seqused_k.tolist()):
        assert length <= max_seqlen_k
        pages = block_table[i, : -(-length // k.shape[1])].long()
        keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k, v))
        rows = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        spec = AttentionSpec(q.shape[1], k.shape[2], q.shape[2], softmax_scale, "float32", "float32", 16)
        out[rows] = attend(q[rows], keys, values, spec)
    return out
