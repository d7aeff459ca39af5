"""AITER's latent attention as far as it is called: it computes by core's reference, and refuses what it would.

Parameters and defaults: aiter/mla.py at 41d6c5271acee849f3968b722d825c9d167ac12f of github.com/ROCm/aiter. Checks: the
same, csrc/py_itfs_cu/asm_mla.cu and hsa/gfx942/mla/mla_asm.csv at e4048607a535ace3a2b51ded31b1c8c2d45c0879.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hardpoint.reference.latent_attention import attend_latent
from tests.support.aiter_calls import count

LATENT = 512


def mla_decode_fwd(
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    page_size: int = 1,
    nhead_kv: int = 1,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
    num_kv_splits_indptr: Tensor | None = None,
    work_meta_data: Tensor | None = None,
    work_indptr: Tensor | None = None,
    work_info_set: Tensor | None = None,
    reduce_indptr: Tensor | None = None,
    reduce_final_map: Tensor | None = None,
    reduce_partial_map: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    intra_batch_mode: bool = False,
    return_logits: bool = False,
    return_lse: bool = False,
    g_kv_indptr: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    causal: bool = True,
) -> None:
    """Writes to ``o`` [N, H, 512]."""
    count("mla_decode_fwd")
    assert (page_size, nhead_kv, causal) == (1, 1, True)
    assert max_seqlen_q == 1
    assert q.shape[1] in (8, 16, 32, 64, 128), "cannot get heuristic kernel!"
    _attend(q, kv_buffer, o, (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens), max_seqlen_q, sm_scale)


def mla_prefill_fwd(
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
) -> None:
    """Writes to ``o`` [T, H, 512]."""
    count("mla_prefill_fwd")
    assert q.shape[1] in (16, 128), "only support num_q_heads/num_kv_heads==16 or 128 for now"
    _attend(q, kv_buffer, o, (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens), max_seqlen_q, sm_scale)


def _attend(
    q: Tensor, kv: Tensor, o: Tensor, arrays: tuple[Tensor, Tensor, Tensor, Tensor], longest: int, scale: float | None
) -> None:
    assert scale is not None
    assert q.is_contiguous(), "only support Q.is_contiguous() for now"
    assert o.is_contiguous()
    assert q.dtype == kv.dtype == o.dtype == torch.bfloat16, "unsupport Q dtype"
    assert kv.shape[1:] == (1, 1, q.shape[2]), "only support head_size == KV.size(3) for now"
    assert kv.stride(3) == 1
    assert kv.stride(0) == q.shape[2] == LATENT + 64
    assert o.shape == (*q.shape[:2], LATENT)
    assert all(array.dtype == torch.int32 for array in arrays)
    assert all(array.is_contiguous() for array in arrays)
    query_start, key_start, places, last = arrays
    assert last.eq(1).all()
    assert len(last) == len(query_start) - 1 == len(key_start) - 1
    assert int(query_start.diff().max()) <= longest, "a grid of too few programs"
    assert int(key_start[-1]) == len(places)
    for i in range(len(last)):
        rows = slice(int(query_start[i]), int(query_start[i + 1]))
        tokens = kv[places[int(key_start[i]) : int(key_start[i + 1])].long(), 0, 0]
        q_latent, q_rope = q[rows].split([LATENT, 64], dim=-1)
        o[rows] = attend_latent(q_latent, q_rope, tokens[:, :LATENT], tokens[:, LATENT:], scale)
