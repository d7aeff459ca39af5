"""A few rows of activations times a weight, at the speed at which the weight is read.

A program has a few rows of the weight and all its columns: its threads stand side by side along the columns, each reads
16 bytes of every row at a time, and the partial sums of a row are added up once, at the end. So sums have one order,
nothing is added across programs, and even a small weight is spread over the whole device.

Axes: M rows of x, N rows of the weight (out), K columns (in). A *vector* is the columns that a thread reads at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from hardpoint.kernels.launch import begun
from hardpoint.kernels.tables import NO_OPTIONS, Options, Table, table, table_of
from hardpoint_plugin_api import BuildContext, LinearCall, LinearKernel, LinearWorkload

_READ_BYTES = 16


@triton.jit(do_not_specialize=["num_rows"])
def _gemv(
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
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VECTOR: tl.constexpr,
    VECTORS: tl.constexpr,
    UNROLL: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """ROWS rows of x times BLOCK_N rows of the weight.

    Groups are the columns that share a scale, 0 where all of a row do; a null pointer is no scales at all.
    """
    if BEGIN is not None:
        BEGIN()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_row = tl.program_id(1) * ROWS
    columns = tl.arange(0, VECTORS * VECTOR)
    weight_ptrs = weight_ptr + n.to(tl.int64)[:, None] * weight_stride_n + columns[None, :]
    weight_scale_ptrs = weight_scale_ptr
    if weight_scale_ptr is not None:
        weight_scale_ptrs = weight_scale_ptr + (n // WEIGHT_TILE_ROWS).to(tl.int64) * weight_scale_stride_n
    block: tl.constexpr = VECTORS * VECTOR
    x_scales = (1.0,) * ROWS
    if x_scale_ptr is not None and X_GROUP == 0:
        x_scales = ()
        for row in tl.static_range(ROWS):
            m = (first_row + row).to(tl.int64)
            x_scale = tl.load(x_scale_ptr + m * x_scale_stride_m, mask=m < num_rows, other=1.0)
            x_scales = x_scales + (x_scale,)  # noqa: RUF005  # as Triton reads it
    sums = (tl.zeros([BLOCK_N, VECTORS], tl.float32),) * ROWS
    for start in tl.range(0, K, block, loop_unroll_factor=UNROLL):
        k = start + columns
        weight = tl.load(weight_ptrs + start, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        weight = weight.to(tl.float32).reshape(BLOCK_N, VECTORS, VECTOR)
        group_start = start + tl.arange(0, VECTORS) * VECTOR
        if WEIGHT_GROUP != 0:
            weight_scale = tl.load(
                weight_scale_ptrs[:, None] + (group_start // WEIGHT_GROUP)[None, :],
                mask=(n < N)[:, None] & (group_start < K)[None, :],
                other=0.0,
            ).to(tl.float32)
        added = ()  # a tuple: Triton has no lists of tensors
        for row in tl.static_range(ROWS):
            m = (first_row + row).to(tl.int64)
            x = tl.load(
                x_ptr + m * x_stride_m + k.to(tl.int64) * x_stride_k, mask=(m < num_rows) & (k < K), other=0.0
            ).to(tl.float32)
            product = tl.sum(weight * x.reshape(1, VECTORS, VECTOR), 2)
            if WEIGHT_GROUP != 0:
                product = product * weight_scale
            if X_GROUP != 0:
                x_scale = tl.load(
                    x_scale_ptr + m * x_scale_stride_m + group_start // X_GROUP,
                    mask=(m < num_rows) & (group_start < K),
                    other=0.0,
                )
                product = product * x_scale[None, :]
            added = added + (sums[row] + product,)  # type: ignore[assignment]  # noqa: RUF005  # as Triton reads it
        sums = added
    for row in tl.static_range(ROWS):
        m = (first_row + row).to(tl.int64)
        total = tl.sum(sums[row], 1)
        if weight_scale_ptr is not None and WEIGHT_GROUP == 0:
            total = total * tl.load(weight_scale_ptrs, mask=n < N, other=0.0).to(tl.float32)
        total = total * x_scales[row]
        if bias_ptr is not None:
            total = total + tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + m * N + n, total.to(out_ptr.dtype.element_ty), mask=(n < N) & (m < num_rows))


@dataclass(frozen=True)
class GemvConfiguration:
    """How a product is cut: the rows of x and of the weight that a program has, its warps, and reads ahead.

    ``lanes`` are the threads of a warp, each of which reads 16 bytes of a row at a time: with fewer than the device
    has, and one row of the weight, threads repeat each other's work.
    """

    rows: int
    block_n: int
    num_warps: int
    unroll: int = 1
    lanes: int = 32
    options: Options = NO_OPTIONS


GemvTable = Table[GemvConfiguration]

_FACTS: Mapping[str, type] = {"rows": int, "n": int, "row_bytes": int}


def gemv_table(ctx: BuildContext) -> GemvTable:
    """The tuning table of the context's device. Raises ConfigError for a file that is not right."""
    return table_of(ctx, "gemv", GemvConfiguration, _FACTS)


@cache
def _portable_table() -> GemvTable:
    return table("gemv", GemvConfiguration, tuple(_FACTS.items()))


def gemv_configuration(num_rows: int, n: int, row_bytes: int, cuts: GemvTable | None = None) -> GemvConfiguration:
    """The cut for ``num_rows`` rows of x and a weight of ``n`` rows, each of ``row_bytes``.

    ``cuts`` is a device's table, by default core's.
    """
    return (cuts or _portable_table()).find(rows=num_rows, n=n, row_bytes=row_bytes)


@dataclass(frozen=True)
class Scales:
    """The scales of one operand: a float tensor [blocks of rows, blocks of columns], and a block's rows and columns.

    Both are 0 for a block that extends over all there are.
    """

    values: torch.Tensor
    tile_rows: int = 1
    group: int = 0

    @property
    def stride(self) -> int:
        """From a block of rows to the next."""
        return self.values.stride(0) if self.tile_rows else 0


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    x_scales: Scales | None = None,
    weight_scales: Scales | None = None,
    *,
    configuration: GemvConfiguration | None = None,
    cuts: GemvTable | None = None,
) -> torch.Tensor:
    """``x`` [M, K] times ``weight`` [N, K] (columns one by one), plus ``bias`` [N]: a new [M, N] in ``dtype``.

    Products are added up in float32. It takes any number of rows; many are slower than a matmul. ``cuts`` is a device's
    table, by default core's.
    """
    (num_rows, k), n = x.shape, weight.shape[0]
    out = torch.empty(num_rows, n, dtype=dtype, device=x.device)
    if not num_rows:
        return out
    cut = configuration or gemv_configuration(num_rows, n, k * weight.element_size(), cuts)
    _gemv[-(-n // cut.block_n), -(-num_rows // cut.rows)](
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
        ROWS=cut.rows,
        BLOCK_N=cut.block_n,
        VECTOR=_READ_BYTES // weight.element_size(),
        VECTORS=cut.lanes * cut.num_warps,
        UNROLL=cut.unroll,
        num_warps=cut.num_warps,
        num_stages=1,
        **cut.options,
        **begun(x),
    )
    return out


class TritonGemv(LinearKernel):
    """Plain weights as they stand in the checkpoint, for a few rows of activations."""

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        self._cuts = gemv_table(ctx)

    def apply(self, call: LinearCall) -> torch.Tensor:
        x, weight = call.x, call.weights["weight"]
        y = gemv(x.reshape(-1, x.shape[-1]), weight, call.bias, x.dtype, cuts=self._cuts)
        return y.view(*x.shape[:-1], weight.shape[0])
