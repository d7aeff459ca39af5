"""Activations times a weight on matrix units: plain elements, or 8-bit ones with scales.

For few rows the weight is all that is read, and the product is as fast as that: narrow tiles, for enough programs, and
many of them on their way at a time.

Axes: M rows of x, N rows of the weight (out), K columns (in).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl

from hardpoint.kernels.gemv import Scales
from hardpoint.kernels.launch import begun, in_stages_that_fit
from hardpoint.kernels.tables import NO_OPTIONS, Options, Table, table, table_of
from hardpoint_plugin_api import BuildContext, DeviceInfo, LinearCall, LinearKernel, LinearWorkload, Reason

_MOST_PLAIN_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class GemmConfiguration:
    """A tile of the product, the columns read at a time, warps, and how many of these blocks are on their way.

    ``turned`` multiplies the weight's rows by those of x: matrix units take 64 rows of the left operand at a time, but
    as few as 16 of the right. ``parts`` cuts the columns of both, and takes the parts of a row for so many rows: with
    16 rows of the weight in 4 parts, a program has 64. Of the products, those of like parts are meant. Blocks of
    columns with scales of their own are neither turned nor cut.

    Hopper's matrix units add up products of 8-bit floats with some 14 bits, 32 columns at a time. With ``apart``,
    float32 adders add up the sums of blocks, so units add ``block_k`` / 32 times, each time less than 2^-13 of the sum
    off. (Sums of less than a block would make units wait for every 32 columns.)
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    turned: bool = False
    parts: int = 1
    apart: bool = True
    options: Options = NO_OPTIONS


GemmTable = Table[GemmConfiguration]

_FACTS: Mapping[str, type] = {"rows": int, "n": int, "itemsize": int, "grouped": bool, "mixed": bool}


def gemm_table(ctx: BuildContext) -> GemmTable:
    """The tuning table of the context's device. Raises ConfigError for a file that is not right."""
    return table_of(ctx, "gemm", GemmConfiguration, _FACTS)


@cache
def _portable_table() -> GemmTable:
    return table("gemm", GemmConfiguration, tuple(_FACTS.items()))


def gemm_configuration(
    num_rows: int, n: int, itemsize: int, group: int = 0, *, mixed: bool = False, cuts: GemmTable | None = None
) -> GemmConfiguration:
    """The tiles for ``num_rows`` rows of x, a weight of ``n`` rows, and elements of at most ``itemsize`` bytes.

    ``group`` is the fewest columns that share a scale, 0 where all of a row do: a block of columns keeps within them.
    ``mixed``: the weight's elements are smaller, and converted. ``cuts`` is a device's table, by default core's.
    """
    known = cuts or _portable_table()
    found = known.find(rows=num_rows, n=n, itemsize=itemsize, grouped=group > 0, mixed=mixed)
    return replace(found, block_k=group) if 0 < group < found.block_k else found


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    x_scales: Scales | None = None,
    weight_scales: Scales | None = None,
    *,
    configuration: GemmConfiguration | None = None,
    cuts: GemmTable | None = None,
) -> torch.Tensor:
    """``x`` [M, K] times ``weight`` [N, K] (columns one by one), plus ``bias`` [N]: a new [M, N] in ``dtype``.

    Both are of the same elements, or ``x`` is plain and the weight is not: then its elements become numbers of x's
    dtype, exactly. Products are added up in float32, those of whole numbers exactly. Tiles are those of
    ``configuration``, or else of the table ``cuts``, by default core's.
    """
    (num_rows, k), n = x.shape, weight.shape[0]
    out = torch.empty(num_rows, n, dtype=dtype, device=x.device)
    if not num_rows:
        return out
    groups = [scales.group for scales in (x_scales, weight_scales) if scales is not None and scales.group]
    mixed = weight.element_size() < x.element_size()
    cut = configuration or gemm_configuration(
        num_rows, n, x.element_size(), min(groups, default=0), mixed=mixed, cuts=cuts
    )
    turned, parts = (False, 1) if groups else (cut.turned, cut.parts if k % cut.parts == 0 else 1)
    tiles = triton.cdiv(num_rows, cut.block_m), triton.cdiv(n, cut.block_n)

    def launch(num_stages: int) -> None:
        _gemm[tiles if turned else (tiles[0] * tiles[1],)](
            x,
            weight,
            x_scales and x_scales.values,
            weight_scales and weight_scales.values,
            bias,
            out,
            num_rows,
            n,
            k // parts,
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
            WHOLE=n % cut.block_n == 0 and k // parts % cut.block_k == 0,
            TURNED=turned,
            PARTS=parts,
            APART=cut.apart,
            TILES_TOGETHER=8,
            num_warps=cut.num_warps,
            num_stages=num_stages,
            **cut.options,
            **begun(x),
        )

    in_stages_that_fit((cut, turned, parts, x.dtype, weight.dtype, x.device), cut.num_stages, launch)
    return out


class TritonGemm(LinearKernel):
    """Small plain weights as they stand in the checkpoint, for a few dozen rows of activations."""

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        self._cuts = gemm_table(ctx)

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse what libraries read faster: what is small, they do not launch as early."""
        size = (workload.out_features or 0) * (workload.in_features or 0)
        most = f"up to {_MOST_PLAIN_ELEMENTS} elements"
        large = Reason("size", "libraries read larger weights faster", wanted=str(size), supported=most)
        return [large] if size > _MOST_PLAIN_ELEMENTS else []

    def apply(self, call: LinearCall) -> torch.Tensor:
        x, weight = call.x, call.weights["weight"]
        y = gemm(x.reshape(-1, x.shape[-1]), weight, call.bias, x.dtype, cuts=self._cuts)
        return y.view(*x.shape[:-1], weight.shape[0])


@triton.jit
def _diagonal(y, PARTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The sum [M, N] of what parts make with their like, of all products [PARTS * M, PARTS * N]."""
    part = tl.arange(0, PARTS)
    alike = part[:, None, None, None] == part[None, None, :, None]
    return tl.sum(tl.sum(tl.where(alike, y.reshape(PARTS, M, PARTS, N), 0), 2), 0)


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
    WHOLE: tl.constexpr,
    TURNED: tl.constexpr,
    PARTS: tl.constexpr,
    APART: tl.constexpr,
    TILES_TOGETHER: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """A tile of the product. K are the columns of each of the PARTS; WHOLE: tiles of the weight end where it does.

    TILES_TOGETHER rows of tiles are worked on at a time: they share the weight in the cache. Of TURNED ones all are.
    A block of columns never straddles a group. Where there are groups, each block's product is scaled in float32.
    Scales of the weight's rows are read while the kernel before this one may still run.
    """
    if TURNED:
        first_m, first_n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    else:
        tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
        stripe = tl.program_id(0) // (TILES_TOGETHER * tiles_n) * TILES_TOGETHER
        height = tl.minimum(tiles_m - stripe, TILES_TOGETHER)
        within = tl.program_id(0) % (TILES_TOGETHER * tiles_n)
        first_m, first_n = (stripe + within % height) * BLOCK_M, within // height * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    weight_scale_ptrs = weight_scale_ptr
    if weight_scale_ptr is not None:
        weight_scale_ptrs = weight_scale_ptr + (n // WEIGHT_TILE_ROWS).to(tl.int64) * weight_scale_stride_n
    weight_scale = tl.full([BLOCK_N], 1.0, tl.float32)  # what all columns share is read before they are
    if weight_scale_ptr is not None and WEIGHT_GROUP == 0:
        weight_scale = tl.load(weight_scale_ptrs, mask=n < N, other=0.0).to(tl.float32)
    if BEGIN is not None:
        BEGIN()
    x_scale_ptrs = x_scale_ptr
    if x_scale_ptr is not None:
        x_scale_ptrs = x_scale_ptr + m.to(tl.int64) * x_scale_stride_m
    x_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if x_scale_ptr is not None and X_GROUP == 0:
        x_scale = tl.load(x_scale_ptrs, mask=m < num_rows, other=0.0)

    columns = tl.arange(0, BLOCK_K)
    x_row, weight_row = tl.arange(0, BLOCK_M * PARTS), tl.arange(0, BLOCK_N * PARTS)
    x_columns = (x_row // BLOCK_M * K)[:, None] + columns[None, :]
    weight_columns = (weight_row // BLOCK_N * K)[:, None] + columns[None, :]
    x_m, weight_n = first_m + x_row % BLOCK_M, first_n + weight_row % BLOCK_N
    x_ptrs = x_ptr + x_m.to(tl.int64)[:, None] * x_stride_m + x_columns.to(tl.int64) * x_stride_k
    weight_ptrs = weight_ptr + weight_n.to(tl.int64)[:, None] * weight_stride_n + weight_columns
    sum_type: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    grouped: tl.constexpr = X_GROUP != 0 or WEIGHT_GROUP != 0
    left: tl.constexpr = BLOCK_N if TURNED else BLOCK_M
    right: tl.constexpr = BLOCK_M if TURNED else BLOCK_N
    total = tl.zeros([left * PARTS, right * PARTS], tl.float32 if grouped else sum_type)
    for start in tl.range(0, K, BLOCK_K):
        if WHOLE:
            x = tl.load(x_ptrs, mask=(x_m < num_rows)[:, None], other=0.0)
            weight = tl.load(weight_ptrs)
        else:
            inside = (start + columns < K)[None, :]
            x = tl.load(x_ptrs, mask=(x_m < num_rows)[:, None] & inside, other=0.0)
            weight = tl.load(weight_ptrs, mask=(weight_n < N)[:, None] & inside, other=0.0)
        if x.dtype.is_fp8() and out_ptr.dtype.element_ty == tl.float16:  # which has more digits than such sums
            x = x.to(tl.float16)
            weight = weight.to(tl.float16)
        elif x_scale_ptr is None and weight.dtype != x.dtype:
            if x.dtype == tl.bfloat16:
                weight = weight.to(tl.float32)  # devices convert to it faster than to bfloat16
            weight = weight.to(x.dtype)
        if TURNED:
            first, second = weight, tl.trans(x)
        else:
            first, second = x, tl.trans(weight)
        if grouped:
            product = tl.dot(first, second, out_dtype=sum_type, input_precision="ieee").to(tl.float32)
            if X_GROUP != 0:
                x_scale_of_group = tl.load(x_scale_ptrs + start // X_GROUP, mask=m < num_rows, other=0.0)
                product = product * x_scale_of_group[:, None]
            if WEIGHT_GROUP != 0:
                of_group = tl.load(weight_scale_ptrs + start // WEIGHT_GROUP, mask=n < N, other=0.0)
                product = product * of_group.to(tl.float32)[None, :]
            total += product
        else:
            total = tl.dot(
                first,
                second,
                total,
                out_dtype=sum_type,
                input_precision="ieee",
                max_num_imprecise_acc=BLOCK_K if APART else None,
            )
        x_ptrs += BLOCK_K * x_stride_k
        weight_ptrs += BLOCK_K
    if TURNED:
        total = tl.trans(total)
    if PARTS != 1:
        total = _diagonal(total, PARTS, BLOCK_M, BLOCK_N)
    y = total.to(tl.float32) * weight_scale[None, :] * x_scale[:, None]
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    there = (m < num_rows)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m.to(tl.int64)[:, None] * N + n[None, :], y.to(out_ptr.dtype.element_ty), mask=there)
