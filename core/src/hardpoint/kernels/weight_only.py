"""4-bit weights with scales for groups of columns; activations as they are, a few rows or many.

four_bit_tiles.py has the layout of weights, tile_product.py the product.

Axes: M rows of x, N rows of the weight (out), K columns (in), T tiles of a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
import triton
import triton.language as tl

from hardpoint.kernels.four_bit_tiles import STEP, FourBitTiles, tile_columns, unsupported_groups
from hardpoint.kernels.int4_tuning import Int4Configuration, Int4Table, int4_configuration, int4_table
from hardpoint.kernels.launch import begun, in_stages_that_fit
from hardpoint.kernels.tile_product import TILE_ROWS, tile_product
from hardpoint.kernels.weight_only_numbers import code_numbers, scale_of, scales_of, zero_points_of
from hardpoint_plugin_api import BuildContext, DeviceInfo, LinearCall, LinearKernel, LinearWorkload, Reason

_TILES_TOGETHER = 8
_SUMS = 1024
"""Of pieces, that a program makes."""


class Tiles(Protocol):
    """A layout of weights in tiles, such as FourBitTiles: from a weight's slots, and back to numbers."""

    def packed(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]: ...
    def unpacked(self, packed: dict[str, torch.Tensor]) -> torch.Tensor: ...
    def rows(self, packed: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor: ...


class TiledLinear(LinearKernel):
    """A kernel whose weights are laid out by ``tiles``, which a subclass sets."""

    tiles: Tiles

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.tiles.packed(weights)

    def unpack(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.tiles.unpacked(weights)

    def rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return self.tiles.rows(weights, ids)


class TritonInt4Linear(TiledLinear):
    """4-bit integers, or e2m1 with scales of a byte, for any number of rows of activations."""

    layout = "triton_int4_tiles"
    tiles: FourBitTiles

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse groups that are no whole number of places in a tile, or of tiles, or end within the last group."""
        assert workload.spec is not None
        return unsupported_groups(workload.spec[0], workload.in_features or 0)

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.spec is not None
        assert workload.in_features is not None
        self.tiles = FourBitTiles(workload.spec[0], workload.in_features, ctx.dtype)
        self._cuts = int4_table(ctx)

    def apply(self, call: LinearCall) -> torch.Tensor:
        x = call.x
        rows = x.reshape(-1, x.shape[-1])
        tiles = self.tiles
        y = int4_matmul(rows, call.weights, call.bias, tiles.group, tiles.flip, e2m1=tiles.is_e2m1, cuts=self._cuts)
        return y.view(*x.shape[:-1], y.shape[1])


class DequantizedInt4Linear(TritonInt4Linear):
    """Makes numbers of the whole weight before each product, which is torch's: for very many rows of activations.

    The numbers take as much memory for that time as a plain weight.
    """

    def apply(self, call: LinearCall) -> torch.Tensor:
        tiles = self.tiles
        weight = int4_dequantize(call.weights, tiles.columns, call.x.dtype, tiles.group, tiles.flip)
        return torch.nn.functional.linear(call.x, weight, call.bias)


def int4_matmul(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    bias: torch.Tensor | None,
    group: int,
    zero_point: int,
    configuration: Int4Configuration | None = None,
    *,
    e2m1: bool = False,
    cuts: Int4Table | None = None,
) -> torch.Tensor:
    """``x`` [M, K] times packed ``weights``, plus ``bias`` [N]: a new [M, N].

    ``group`` 0 is a scale for each row; ``zero_point``, 0 or 8, is for all, where the weights have none of their own.
    With ``e2m1`` codes are that element's, with scales of a byte. A device whose multiprocessors have less shared
    memory than a cut takes has fewer blocks of columns on their way.
    ``cuts`` is a device's table, by default core's.
    """
    num_rows, n = x.shape[0], weights["weight_scale"].shape[1]
    if not num_rows:
        return x.new_empty(num_rows, n)
    cut = configuration or int4_configuration(num_rows, n, x.element_size(), cuts)

    def product(num_stages: int) -> torch.Tensor:
        fitting = cut if num_stages == cut.num_stages else replace(cut, num_stages=num_stages)
        return _product(x, weights, bias, group, zero_point, e2m1, fitting)

    kind = cut, group, x.dtype, "weight_zero_point" in weights, e2m1, x.device
    return in_stages_that_fit(kind, cut.num_stages, product)


def _product(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    bias: torch.Tensor | None,
    group: int,
    zero_point: int,
    e2m1: bool,
    cut: Int4Configuration,
) -> torch.Tensor:
    """``int4_matmul`` of at least one row, in one cut. Raises OutOfResources, with nothing launched."""
    (num_rows, k), n = x.shape, weights["weight_scale"].shape[1]
    out = x.new_empty(num_rows, n)
    tile = tile_columns(group)
    split = cut.num_warps if cut.split else 1
    found = out if cut.pieces == 1 else torch.empty(cut.pieces, num_rows, n, dtype=torch.float32, device=x.device)
    tiles_n, tiles_m = triton.cdiv(n, cut.block_n), triton.cdiv(num_rows, cut.block_m)
    together = 1 if cut.split or tiles_m == 1 else _TILES_TOGETHER
    _int4_matmul[(tiles_n, cut.pieces, tiles_m) if together == 1 else (tiles_n * tiles_m, cut.pieces)](
        x,
        weights["weight"],
        weights["weight_scale"],
        weights.get("weight_zero_point"),
        weights.get("weight_scale_2"),
        bias if cut.pieces == 1 else None,
        found,
        num_rows,
        n,
        k,
        weights["weight"].shape[1],
        x.stride(0),
        x.stride(1),
        GROUP=group,
        ZERO_POINT=zero_point,
        STEP=1.0 if e2m1 else STEP[x.dtype],
        E2M1=e2m1,
        TILE=tile,
        WHOLE=k % (tile * split * cut.pieces) == 0,
        EVEN=n % cut.block_n == 0,
        SPLIT=split,
        PIECES=cut.pieces,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        TILES_TOGETHER=together,
        STAGES=cut.num_stages,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **cut.options,
        **begun(x),
    )
    if cut.pieces > 1:
        sum_pieces(found, bias, out)
    return out


def sum_pieces(found: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write ``found`` [pieces, M, N], added up in order, plus ``bias`` [N], to ``out`` [M, N]."""
    num_pieces, num_rows, n = found.shape
    grid = (triton.cdiv(num_rows * n, _SUMS),)
    _sum_pieces[grid](found, bias, out, num_rows, n, num_pieces, _SUMS, num_warps=4, **begun(out))


def int4_dequantize(
    weights: dict[str, torch.Tensor], k: int, dtype: torch.dtype, group: int, zero_point: int
) -> torch.Tensor:
    """Packed ``weights`` as a new [N, K] of ``dtype``; see ``int4_matmul``."""
    words = weights["weight"]
    n, tile = weights["weight_scale"].shape[1], tile_columns(group)
    out = torch.empty(n, k, dtype=dtype, device=words.device)
    _int4_dequantize[words.shape[:2]](
        words,
        weights["weight_scale"],
        weights.get("weight_zero_point"),
        out,
        n,
        k,
        words.shape[1],
        GROUP=group,
        ZERO_POINT=zero_point,
        STEP=STEP[dtype],
        TILE=tile,
        num_warps=4,
        **begun(out),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _int4_matmul(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_point_ptr,
    outer_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    N,
    K,
    T,
    x_stride_m,
    x_stride_k,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    STEP: tl.constexpr,
    E2M1: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """A tile of the product, transposed. TILES_TOGETHER rows of tiles are worked on at a time: they share the weight.

    SPLIT and WHOLE as in ``tile_product``. A program's second number says which of PIECES of the columns it has, its
    third, where TILES_TOGETHER is 1, which row of tiles. In place of rows beyond the last, the last one is read again.
    ``outer_ptr``, where it is not None, has a factor for each row of the weight.
    """
    if BEGIN is not None:
        BEGIN()
    if TILES_TOGETHER > 1:
        tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
        stripe = tl.program_id(0) // (TILES_TOGETHER * tiles_n)
        height = tl.minimum(tiles_m - stripe * TILES_TOGETHER, TILES_TOGETHER)
        within = tl.program_id(0) % (TILES_TOGETHER * tiles_n)
        tile_n, tile_m = within // height, stripe * TILES_TOGETHER + within % height
    else:
        tile_n, tile_m = tl.program_id(0), tl.program_id(2)
    out_n = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    out_m = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M))[None, :]
    m = out_m if BLOCK_M == 1 else tl.minimum(out_m, num_rows - 1)
    start, end = 0, T
    if PIECES > 1:
        piece = tl.cdiv(T, SPLIT * PIECES) * SPLIT
        start = tl.program_id(1) * piece
        end = tl.minimum(start + piece, T)
    y = tile_product(
        x_ptr + m.to(tl.int64) * x_stride_m,
        x_stride_k,
        words_ptr,
        scale_ptr,
        zero_point_ptr,
        tile_n,
        start,
        end,
        N,
        K,
        T,
        GROUP,
        ZERO_POINT,
        STEP,
        E2M1,
        TILE,
        WHOLE,
        EVEN,
        SPLIT,
        BLOCK_M,
        BLOCK_N,
        STAGES,
    )
    if outer_ptr is not None:
        y = y * tl.load(outer_ptr + out_n, mask=out_n < N, other=0.0)
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + out_n, mask=out_n < N, other=0.0).to(tl.float32)
    there = (out_n < N) & (out_m < num_rows)
    out_row = tl.program_id(1).to(tl.int64) * num_rows + out_m
    tl.store(out_ptr + out_row * N + out_n, y.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _int4_dequantize(
    words_ptr,
    scale_ptr,
    zero_point_ptr,
    out_ptr,
    N,
    K,
    T,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """A tile's columns of 16 rows."""
    if BEGIN is not None:
        BEGIN()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    words_of_tile: tl.constexpr = TILE // 8
    step_columns: tl.constexpr = TILE // 4
    parts: tl.constexpr = 1 if GROUP == 0 or GROUP > TILE else TILE // GROUP
    shape: tl.constexpr = (TILE_ROWS, step_columns)
    row, tile = tl.arange(0, TILE_ROWS)[:, None], tl.program_id(1)
    n = tl.program_id(0) * TILE_ROWS + row
    first = (tl.program_id(0).to(tl.int64) * T + tile) * (TILE_ROWS * words_of_tile)
    word = row * words_of_tile + tl.arange(0, words_of_tile)[None, :]
    words = tl.load(words_ptr + first + word).to(tl.uint32, bitcast=True)
    scales = scales_of(scale_ptr, tile, n, N, n < N, GROUP, TILE)
    added = tl.full(shape, -ZERO_POINT * STEP, dtype)
    if zero_point_ptr is not None:
        zero_points = zero_points_of(zero_point_ptr, tile, n, N, n < N)
    for part in tl.static_range(parts):
        for place in tl.static_range(part * (4 // parts), (part + 1) * (4 // parts)):
            if zero_point_ptr is not None:
                added = tl.broadcast_to(zero_points[place], shape)
            weight = code_numbers(words, place, added, STEP, False, shape, dtype).to(tl.float32)
            weight = weight * (scale_of(scales, part, parts, scale_ptr.dtype.element_ty) * (1 / STEP))
            k = tile * TILE + place * step_columns + tl.arange(0, step_columns)[None, :]
            tl.store(out_ptr + n.to(tl.int64) * K + k, weight.to(dtype), mask=(n < N) & (k < K))


@triton.jit(do_not_specialize=["num_rows"])
def _sum_pieces(
    found_ptr, bias_ptr, out_ptr, num_rows, N, PIECES: tl.constexpr, BLOCK: tl.constexpr, BEGIN: tl.constexpr
):
    """``found`` [PIECES, M, N], added up in order, plus the bias."""
    if BEGIN is not None:
        BEGIN()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = num_rows.to(tl.int64) * N
    y = tl.load(found_ptr + place, mask=place < size, other=0.0)
    for piece in tl.static_range(1, PIECES):
        y += tl.load(found_ptr + piece * size + place, mask=place < size, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + place % N, mask=place < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=place < size)
