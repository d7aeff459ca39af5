"""Weights in the blocks of GGUF files, and others of 2 to 6 bits with scales for 16 or 32 columns; activations as they
are, a few rows or many.

block_tiles.py has the layout of weights, block_product.py the product.

Axes: M rows of x, N rows of the weight (out), K columns (in), T tiles of a row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from hardpoint.kernels import block_tiles
from hardpoint.kernels.block_product import (
    PLACE_COLUMNS,
    TILE_COLUMNS,
    TILE_ROWS,
    WORDS,
    block_codes,
    block_product,
    block_scales,
    block_words,
    scaled_codes,
)
from hardpoint.kernels.block_tiles import BlockTiles, unsupported_blocks
from hardpoint.kernels.block_tuning import BlockCut, BlockTable, block_cut, block_table
from hardpoint.kernels.launch import begun, in_stages_that_fit
from hardpoint.kernels.weight_only import TiledLinear, sum_pieces
from hardpoint_plugin_api import BuildContext, DeviceInfo, LinearCall, LinearWorkload, Reason


class TritonBlockLinear(TiledLinear):
    """Integers of 2 to 6 bits in groups of 16 or 32 columns, in one or two levels, with or without minima."""

    layout = "triton_block_tiles"
    tiles: BlockTiles

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse elements, scales and columns that are no blocks of GGUF's kinds."""
        assert workload.spec is not None
        return unsupported_blocks(workload.spec[0], workload.in_features or 0)

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.spec is not None
        assert workload.in_features is not None
        self.tiles = BlockTiles(workload.spec[0], workload.in_features, ctx.dtype)
        self._cuts = block_table(ctx)

    def apply(self, call: LinearCall) -> torch.Tensor:
        rows = call.x.reshape(-1, call.x.shape[-1])
        y = block_matmul(rows, call.weights, call.bias, self.tiles, cuts=self._cuts)
        return y.view(*call.x.shape[:-1], y.shape[1])


class DequantizedBlockLinear(TritonBlockLinear):
    """Makes numbers of the whole weight before each product, which is torch's: for very many rows of activations.

    The numbers take as much memory for that time as a plain weight.
    """

    def apply(self, call: LinearCall) -> torch.Tensor:
        return torch.nn.functional.linear(call.x, block_numbers(call.weights, self.tiles, call.x.dtype), call.bias)


def block_matmul(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    bias: torch.Tensor | None,
    tiles: BlockTiles,
    cut: BlockCut | None = None,
    *,
    cuts: BlockTable | None = None,
) -> torch.Tensor:
    """``x`` [M, K] times ``weights`` that ``tiles`` packed, plus ``bias`` [N]: a new [M, N].

    A device whose multiprocessors have less shared memory than a cut takes has fewer blocks of columns on their way.
    ``cuts`` is a device's table, by default core's.
    """
    num_rows, n = x.shape[0], weights["weight_scale"].shape[1]
    if not num_rows:
        return x.new_empty(num_rows, n)
    chosen = cut or block_cut(num_rows, n, x.element_size(), cuts)

    def product(num_stages: int) -> torch.Tensor:
        return _product(x, weights, bias, tiles, replace(chosen, num_stages=num_stages))

    kind = chosen, str(tiles.spec), x.dtype, x.device
    return in_stages_that_fit(kind, chosen.num_stages, product)


def _product(
    x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None, tiles: BlockTiles, cut: BlockCut
) -> torch.Tensor:
    """``block_matmul`` of at least one row, in one cut. Raises OutOfResources, with nothing launched."""
    (num_rows, k), n = x.shape, weights["weight_scale"].shape[1]
    out = x.new_empty(num_rows, n)
    found = out if cut.pieces == 1 else torch.empty(cut.pieces, num_rows, n, dtype=torch.float32, device=x.device)
    _block_matmul[(triton.cdiv(n, cut.block_n), triton.cdiv(num_rows, cut.block_m), cut.pieces)](
        x,
        weights["weight"],
        weights.get("high"),
        weights["weight_scale"],
        weights.get("weight_scale_2"),
        weights.get("weight_min"),
        weights.get("weight_min_2"),
        bias if cut.pieces == 1 else None,
        found,
        num_rows,
        n,
        k,
        weights["weight"].shape[1],
        x.stride(0),
        x.stride(1),
        GROUP=tiles.group,
        BIAS=tiles.bias,
        SIGNED=tiles.is_signed,
        WHOLE=k % block_tiles.TILE_COLUMNS == 0,
        PIECES=cut.pieces,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        NUMBERS_FIRST=cut.numbers_first,
        STAGES=cut.num_stages,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **cut.options,
        **begun(x),
    )
    if cut.pieces > 1:
        sum_pieces(found, bias, out)
    return out


def block_numbers(weights: dict[str, torch.Tensor], tiles: BlockTiles, dtype: torch.dtype) -> torch.Tensor:
    """Packed ``weights`` as a new [N, K] of ``dtype``."""
    words = weights["weight"]
    n = weights["weight_scale"].shape[1]
    out = torch.empty(n, tiles.columns, dtype=dtype, device=words.device)
    _block_numbers[words.shape[:2]](
        words,
        weights.get("high"),
        weights["weight_scale"],
        weights.get("weight_scale_2"),
        weights.get("weight_min"),
        weights.get("weight_min_2"),
        out,
        n,
        tiles.columns,
        words.shape[1],
        GROUP=tiles.group,
        BIAS=tiles.bias,
        SIGNED=tiles.is_signed,
        num_warps=4,
        **begun(out),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _block_matmul(
    x_ptr,
    words_ptr,
    high_ptr,
    scale_ptr,
    outer_ptr,
    min_ptr,
    outer_min_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    N,
    K,
    T,
    x_stride_m,
    x_stride_k,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    SIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUMBERS_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """A tile of the product, transposed. A program's third number says which of PIECES of the columns it has."""
    if BEGIN is not None:
        BEGIN()
    tile_n = tl.program_id(0)
    out_n = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    out_m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))[None, :]
    m = out_m if BLOCK_M == 1 else tl.minimum(out_m, num_rows - 1)
    piece = tl.cdiv(T, PIECES)
    start = tl.program_id(2) * piece
    y = block_product(
        x_ptr + m.to(tl.int64) * x_stride_m,
        x_stride_k,
        words_ptr,
        high_ptr,
        scale_ptr,
        outer_ptr,
        min_ptr,
        outer_min_ptr,
        tile_n,
        start,
        tl.minimum(start + piece, T),
        N,
        K,
        T,
        GROUP,
        BIAS,
        SIGNED,
        WHOLE,
        BLOCK_M,
        BLOCK_N,
        NUMBERS_FIRST,
        STAGES,
    )
    there = (out_n < N) & (out_m < num_rows)
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + out_n, mask=out_n < N, other=0.0).to(tl.float32)
    out_row = tl.program_id(2).to(tl.int64) * num_rows + out_m
    tl.store(out_ptr + out_row * N + out_n, y.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _block_numbers(
    words_ptr,
    high_ptr,
    scale_ptr,
    outer_ptr,
    min_ptr,
    outer_min_ptr,
    out_ptr,
    N,
    K,
    T,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    SIGNED: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """A tile's columns of 16 rows: code * scale + minimum, in float32."""
    if BEGIN is not None:
        BEGIN()
    tile, row = tl.program_id(1), tl.arange(0, TILE_ROWS)[:, None]
    n = tl.program_id(0) * TILE_ROWS + row
    at = (tl.program_id(0).to(tl.int64) * T + tile) * (TILE_ROWS * WORDS) + row * WORDS + tl.arange(0, WORDS)[None, :]
    words, high = block_words(words_ptr, high_ptr, at)
    scales, minima, outer, outer_min = block_scales(
        scale_ptr, outer_ptr, min_ptr, outer_min_ptr, tile, tl.minimum(n, N - 1), N
    )
    within = tl.arange(0, PLACE_COLUMNS)[None, :]
    for place in tl.static_range(4):
        weight = block_codes(words, high, high_ptr, place, BIAS, tl.float32)
        numbers = scaled_codes(weight, scales, minima, outer, outer_min, min_ptr is not None, place, GROUP, SIGNED)
        k = tile * TILE_COLUMNS + place * PLACE_COLUMNS + within
        there = (n < N) & (k < K)
        tl.store(out_ptr + n.to(tl.int64) * K + k, numbers.to(out_ptr.dtype.element_ty), mask=there)
