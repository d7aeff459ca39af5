"""FlashMLA as far as it is called: it computes by core's reference, and refuses what it would.

Parameters, defaults and assertions: ``flash_mla/flash_mla_interface.py`` of github.com/deepseek-ai/FlashMLA at
9241ae3ef9bac614dd25e45e507e089f888280e0. Other checks: ``csrc/api/dense_decode.h``, ``csrc/api/sparse_decode.h`` and
``csrc/api/sparse_fwd.h`` there, and what their kernels assert of lists and strides. Eight-bit caches are read as its
``tests/quant.py`` reads them. The device is an H100 or, where ``ARCH`` says so, a B200.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch
from torch import Tensor

from hardpoint.reference.latent_attention import attend_latent

CALLS: Counter[str] = Counter()
"""How often each function was called, and how often the device computed a schedule."""
ARCH = ["sm_90"]
LATENT, ROW, TOKEN_BYTES = 512, 576, 656


@dataclasses.dataclass
class FlashMLASchedMeta:
    """``config``: shapes and flags of the first call; ``lengths``: what its schedule was computed of."""

    have_initialized: bool = False
    config: tuple[object, ...] | None = None
    lengths: tuple[int, ...] = ()


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns results [B, Q, H, 512] and log-sum-exps [B, H, Q]."""
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta)
    assert num_splits is None, "num_splits must be None"
    assert softmax_scale is not None, "by default it would be that of 576 elements"
    unused = attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length
    assert all(x is None for x in unused)
    config = (*q.shape[:3], *k_cache.shape[1:3], causal, is_fp8_kvcache, None if indices is None else indices.shape[-1])
    lengths = () if cache_seqlens is None else tuple(cache_seqlens.tolist())
    if not tile_scheduler_metadata.have_initialized:
        CALLS["schedules"] += 1
        tile_scheduler_metadata.have_initialized = True
        tile_scheduler_metadata.config, tile_scheduler_metadata.lengths = config, lengths
    assert tile_scheduler_metadata.config == config, "input arguments are inconsistent with sched_meta"
    assert tile_scheduler_metadata.lengths == lengths, "a schedule of other lengths"
    assert head_dim_v == LATENT
    _check(q.shape[3] == ROW, q.stride(-1) == 1, k_cache.stride(-1) == 1)
    if indices is not None:
        assert not causal, "causal must be False when sparse attention is enabled"
        assert is_fp8_kvcache, "is_fp8_kvcache must be True when sparse attention is enabled"
        CALLS["sparse_decode_fwd"] += 1
        return _sparse_decode(q, k_cache, indices, softmax_scale)
    assert block_table is not None
    assert cache_seqlens is not None
    CALLS["dense_decode_fwd"] += 1
    return _dense_decode(q, k_cache, block_table, cache_seqlens, softmax_scale, causal)


def _dense_decode(
    q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    _check(ARCH[0] == "sm_90", q.dtype in (torch.bfloat16, torch.float16), cache.dtype == q.dtype)
    _check(lengths.dtype == torch.int32, table.dtype == torch.int32, lengths.is_contiguous(), table.stride(-1) == 1)
    _check(cache.shape[1:] == (64, 1, ROW), len(q) > 0, lengths.shape == (len(q),), table.shape[0] == len(q))
    _check(cache.stride(0) * cache.element_size() % 16 == 0)
    q.view(*q.shape[:2], 1, *q.shape[2:])  # as it does: some strides have no view
    count = q.shape[1]
    assert causal == (count > 1), "several queries read each other"
    out = torch.full((*q.shape[:3], LATENT), float("nan"), dtype=q.dtype)
    for i, length in enumerate(lengths.tolist()):
        rows = cache[table[i, : -(-length // 64)].long(), :, 0].flatten(0, 1)[:length]
        out[i] = attend_latent(q[i, ..., :LATENT], q[i, ..., LATENT:], rows[:, :LATENT], rows[:, LATENT:], scale)
    return out, torch.full((len(q), q.shape[2], count), float("nan"))


def _sparse_decode(q: Tensor, cache: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    _check(q.dtype == torch.bfloat16, q.shape[2] in (64, 128), indices.dtype == torch.int32, indices.stride(-1) == 1)
    _check(cache.dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn), cache.shape[2:] == (1, TOKEN_BYTES))
    _check(cache.stride(1) == TOKEN_BYTES, indices.shape[:2] == q.shape[:2], indices.shape[2] % 64 == 0)
    if ARCH[0] == "sm_100":
        _check(cache.data_ptr() % 16 == 0, cache.stride(0) % TOKEN_BYTES == 0)
    out = torch.empty((*q.shape[:3], LATENT), dtype=q.dtype)
    for i, j in ((i, j) for i in range(q.shape[0]) for j in range(q.shape[1])):
        read = indices[i, j][indices[i, j] != -1].long()
        out[i, j] = _attend(q[i, j], _widened(cache[read // cache.shape[1], read % cache.shape[1], 0]), scale)
    return out, torch.full((len(q), q.shape[2], q.shape[1]), float("nan"))


def _widened(tokens: Tensor) -> Tensor:
    """Tokens of 656 bytes [S, 656] in bfloat16 [S, 576]."""
    elements = tokens[:, :LATENT].contiguous().view(torch.float8_e4m3fn)
    scales = tokens[:, LATENT : LATENT + 16].contiguous().view(torch.float32)
    number = ~scales.isnan()
    _check((torch.frexp(scales[number]).mantissa == 0.5).all(), scales[number].isfinite().all())
    latent = elements.float().view(-1, 4, 128) * scales.unsqueeze(-1)
    rope = tokens[:, LATENT + 16 :].contiguous().view(torch.bfloat16)
    return torch.cat([latent.flatten(1).bfloat16(), rope], dim=-1)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns results [T, H, 512], and two tensors of other numbers."""
    CALLS["sparse_prefill_fwd"] += 1
    assert attn_sink is topk_length is None
    _check(q.dim() == kv.dim() == indices.dim() == 3, d_v == LATENT, q.shape[2] == kv.shape[2] == ROW)
    _check(q.dtype == kv.dtype == torch.bfloat16, indices.dtype == torch.int32, q.shape[1] in (64, 128))
    _check(kv.shape[1] == 1, indices.shape[:2] == (len(q), 1), indices.shape[2] > 0, indices.shape[2] % 128 == 0)
    _check(*(x.stride(-1) == 1 for x in (q, kv, indices)), kv.stride(0) < 2**31)
    out = torch.empty((*q.shape[:2], LATENT), dtype=q.dtype)
    for i in range(len(q)):
        read = indices[i, 0]
        out[i] = _attend(q[i], kv[read[(read >= 0) & (read < len(kv))].long(), 0], sm_scale)
    return out, torch.empty(0), torch.empty(0)


def _attend(q: Tensor, rows: Tensor, scale: float) -> Tensor:
    """One query [H, 576] over all of ``rows`` [S, 576]: zeros where there are none."""
    if not len(rows):
        return torch.zeros(q.shape[0], LATENT, dtype=q.dtype)
    q = q.unsqueeze(0)
    return attend_latent(q[..., :LATENT], q[..., LATENT:], rows[:, :LATENT], rows[:, LATENT:], scale)[0]


def _check(*conditions: object) -> None:
    """As TORCH_CHECK and KU_ASSERT."""
    for number, condition in enumerate(conditions):
        if not condition:
            raise RuntimeError(f"check {number} of this call")
