"""Activations times a weight on matrix units: plain elements, or 8-bit ones with scales.

For few rows the weight is all that is read, and the product is as fast as that: narrow tiles, for enough programs, and
many of them on their way at a time.

Axes: M rows of x, N rows of the weight (out), K columns (in).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint.kernels.gemv import Scales
from hardpoint.kernels.launch import begun
from hardpoint_plugin_api import DeviceInfo, LinearKernel, LinearWorkload, Reason

WIDE = 16384
"""Rows of a weight from which on narrow tiles are too many. Of 8 bits, it is then read fastest in wide tiles even for
one row of activations."""

_MOST_PLAIN_ELEMENTS = 1 << 23

_SUMMED_BY_UNITS = tl.constexpr(128)
"""Products of 8-bit floats. Hopper's matrix units add them up with some 14 bits; float32 adders add up these sums."""


@dataclass(frozen=True)
class GemmConfiguration:
    """A tile of the product, the columns read at a time, warps, and how many of these blocks are on their way."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def gemm_configuration(num_rows: int, n: int, itemsize: int, group: int = 0) -> GemmConfiguration:
    """The tiles for ``num_rows`` rows of x, a weight of ``n`` rows, and elements of at most ``itemsize`` bytes.

    ``group`` is the fewest columns that share a scale, 0 where all of a row do: a block of columns keeps within them.
    """
    if itemsize == 4:  # no matrix units: what is multiplied at a time stands in registers
        return GemmConfiguration(32, 32, 32, 4, 2)
    if itemsize == 1 and not group and num_rows <= 128:
        return _of_decodes(num_rows, n)
    block_k = min(128, group or 128)
    if num_rows <= 16:
        block_n, num_warps, num_stages = (16, 2, 6) if n < 4096 else (32, 4, 6) if n < WIDE else (64, 4, 4)
        return GemmConfiguration(16, block_n, block_k, num_warps, num_stages)
    if num_rows <= 32 and n >= WIDE:
        return GemmConfiguration(32, 64, block_k, 4, 4)
    if num_rows <= 64:
        return GemmConfiguration(64, 32 if n < 5000 else 64 if n < WIDE else 128, block_k, 4, 4)
    if num_rows <= 128:
        return GemmConfiguration(64, 64, block_k, 4, 4)
    return GemmConfiguration(128, 128, block_k, 8, 3)


def _of_decodes(num_rows: int, n: int) -> GemmConfiguration:
    """For 8-bit elements, as measured on an H200 (docs/measurements/h200.md).

    Even one row as a tile of 64: that is what its matrix units take of both operands in shared memory.
    """
    if n >= WIDE:
        return GemmConfiguration(64, 128, 128, 4, 4)
    return GemmConfiguration(64, 32 if n < 5000 and num_rows <= 64 else 64, 256, 4, 6)


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    x_scales: Scales | None = None,
    weight_scales: Scales | None = None,
    *,
    configuration: GemmConfiguration | None = None,
) -> torch.Tensor:
    """``x`` [M, K] times ``weight`` [N, K] (columns one by one), plus ``bias`` [N]: a new [M, N] in ``dtype``.

    Both are of the same elements, or ``x`` is plain and the weight is not: then its elements become numbers of x's
    dtype, exactly. Products are added up in float32, those of whole numbers exactly.
    """
    (num_rows, k), n = x.shape, weight.shape[0]
    out = torch.empty(num_rows, n, dtype=dtype, device=x.device)
    if not num_rows:
        return out
    groups = [scales.group for scales in (x_scales, weight_scales) if scales is not None and scales.group]
    cut = configuration or gemm_configuration(num_rows, n, x.element_size(), min(groups, default=0))
    _gemm[triton.cdiv(num_rows, cut.block_m) * triton.cdiv(n, cut.block_n),](
        x,
        weight,
        x_scales and x_scales.values,
        weight_scales and weight_scales.values,
        bias,
        out,
        num_rows,
        n,
        k,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        x_scales.stride if x_scales else 0,
        weight_scales.stride if weight_scales else 0,
        X_GROUP=x_scales.group if x_scales else 0,
        WEIGHT_TILE_ROWS=(weight_scales and weight_scales.tile_rows) or 1,
        WEIGHT_GROUP=weight_scales.group if weight_scales else 0,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        TILES_TOGETHER=8,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **begun(x),
    )
    return out


class TritonGemm(LinearKernel):
    """Small plain weights as they stand in the checkpoint, for a few dozen rows of activations."""

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse what libraries read faster: what is small, they do not launch as early."""
        size = (workload.out_features or 0) * (workload.in_features or 0)
        most = f"up to {_MOST_PLAIN_ELEMENTS} elements"
        large = Reason("size", "libraries read larger weights faster", wanted=str(size), supported=most)
        return [large] if size > _MOST_PLAIN_ELEMENTS else []

    def apply(self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        weight = weights["weight"]
        y = gemm(x.reshape(-1, x.shape[-1]), weight, bias, x.dtype)
        return y.view(*x.shape[:-1], weight.shape[0])


@triton.jit(do_not_specialize=["num_rows"])
def _gemm(
    x_ptr,
    weight_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    N,
    K,
    x_stride_m,
    x_stride_k,
    weight_stride_n,
    x_scale_stride_m,
    weight_scale_stride_n,
    X_GROUP: tl.constexpr,
    WEIGHT_TILE_ROWS: tl.constexpr,
    WEIGHT_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES_TOGETHER: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """A tile of the product. TILES_TOGETHER rows of tiles are worked on at a time: they share the weight in the cache.

    A block of columns never straddles a group. Where there are groups, each block's product is scaled in float32.
    """
    if BEGIN is not None:
        BEGIN()
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    stripe = tl.program_id(0) // (TILES_TOGETHER * tiles_n)
    first_m = stripe * TILES_TOGETHER
    height = tl.minimum(tiles_m - first_m, TILES_TOGETHER)
    within = tl.program_id(0) % (TILES_TOGETHER * tiles_n)
    m = (first_m + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride_m + columns[None, :].to(tl.int64) * x_stride_k
    weight_ptrs = weight_ptr + n.to(tl.int64)[None, :] * weight_stride_n + columns[:, None]
    x_scale_ptrs = x_scale_ptr
    if x_scale_ptr is not None:
        x_scale_ptrs = x_scale_ptr + m.to(tl.int64) * x_scale_stride_m
    weight_scale_ptrs = weight_scale_ptr
    if weight_scale_ptr is not None:
        weight_scale_ptrs = weight_scale_ptr + (n // WEIGHT_TILE_ROWS).to(tl.int64) * weight_scale_stride_n
    sum_type: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    grouped: tl.constexpr = X_GROUP != 0 or WEIGHT_GROUP != 0
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if grouped else sum_type)
    for start in tl.range(0, K, BLOCK_K):
        inside = start + columns < K
        x = tl.load(x_ptrs, mask=(m < num_rows)[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs, mask=(n < N)[None, :] & inside[:, None], other=0.0)
        if x.dtype.is_fp8() and out_ptr.dtype.element_ty == tl.float16:  # which has more digits than such sums
            x = x.to(tl.float16)
            weight = weight.to(tl.float16)
        elif x_scale_ptr is None and weight.dtype != x.dtype:
            if x.dtype == tl.bfloat16:
                weight = weight.to(tl.float32)  # devices convert to it faster than to bfloat16
            weight = weight.to(x.dtype)
        if grouped:
            product = tl.dot(x, weight, out_dtype=sum_type, input_precision="ieee").to(tl.float32)
            if X_GROUP != 0:
                x_scale = tl.load(x_scale_ptrs + start // X_GROUP, mask=m < num_rows, other=0.0)
                product = product * x_scale[:, None]
            if WEIGHT_GROUP != 0:
                weight_scale = tl.load(weight_scale_ptrs + start // WEIGHT_GROUP, mask=n < N, other=0.0)
                product = product * weight_scale.to(tl.float32)[None, :]
            total += product
        else:
            total = tl.dot(
                x, weight, total, out_dtype=sum_type, input_precision="ieee", max_num_imprecise_acc=_SUMMED_BY_UNITS
            )
        x_ptrs += BLOCK_K * x_stride_k
        weight_ptrs += BLOCK_K
    y = total.to(tl.float32)
    if weight_scale_ptr is not None and WEIGHT_GROUP == 0:
        y = y * tl.load(weight_scale_ptrs, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if x_scale_ptr is not None and X_GROUP == 0:
        y = y * tl.load(x_scale_ptrs, mask=m < num_rows, other=0.0)[:, None]
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    there = (m < num_rows)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m.to(tl.int64)[:, None] * N + n[None, :], y.to(out_ptr.dtype.element_ty), mask=there)
