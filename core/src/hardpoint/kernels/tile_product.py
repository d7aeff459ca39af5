"""A tile of a product with a 4-bit weight that is laid out in tiles (four_bit_tiles.py).

Matrix units do the work for any number of rows. The weight stands on their left side, where operands come from
registers: codes go from memory to registers as they are stored, become numbers there two at a time, and never travel
again.

A pair becomes two numbers without a conversion: masked, each half is a number below the smallest normal one, in which
the code counts units of the last place, or sixteens of them. One multiply-add makes it ``(code - zero point) * step``,
exactly, and the step goes into the result. A group's product is scaled in float32. For float32, codes are converted.
Codes of e2m1 become numbers by their bits. Groups of 16 columns, shorter than a step, are scaled before the product,
which is exact for scales of e4m3.

Axes: M rows of x, N rows of the weight (out), K columns (in), T tiles of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint.kernels import four_bit_tiles
from hardpoint.kernels.weight_only_numbers import (
    code_numbers,
    exchanged_columns,
    exchanged_words,
    quarters,
    read_where,
    scale_of,
    scales_of,
    with_short_groups,
    zero_points_of,
)

TILE_ROWS = tl.constexpr(four_bit_tiles.TILE_ROWS)


@triton.jit
def tile_product(
    x_rows,
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
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    STEP: tl.constexpr,
    E2M1: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows ``tile_n * BLOCK_N`` and on of the weight, times rows of x: float32 [BLOCK_N, BLOCK_M], over the tiles of
    columns from ``start`` to ``end``.

    ``x_rows`` [1, BLOCK_M] points to the rows' beginnings. SPLIT is the number of warps, where each has a tile of
    columns of its own, or 1. WHOLE says that each of these has a whole number of what it takes at a time, EVEN that N
    is a whole number of BLOCK_N; of rows beyond the last one nothing is meant. STAGES is the configuration's; the loop
    itself is told of it, as Triton otherwise reads nothing ahead but what products take: no scales and no zero points.
    """
    dtype: tl.constexpr = x_rows.dtype.element_ty
    words_of_tile: tl.constexpr = TILE // 8
    step_columns: tl.constexpr = TILE // 4
    SHORT: tl.constexpr = GROUP == 16
    parts: tl.constexpr = 1 if GROUP == 0 or GROUP > TILE or SHORT else TILE // GROUP
    out_n = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    n = out_n if EVEN else tl.minimum(out_n, N - 1)
    word, column = tl.arange(0, words_of_tile)[None, :], tl.arange(0, step_columns if SPLIT == 1 else TILE)[:, None]
    row = tl.arange(0, BLOCK_N)[:, None]
    shape: tl.constexpr = (BLOCK_N, step_columns) if SPLIT == 1 else (SPLIT, BLOCK_N, step_columns)
    if SPLIT == 1:
        own = tl.zeros([1, 1], tl.int32)
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        n, x_rows, own = n[None, :, :], x_rows[None, :, :], tl.arange(0, SPLIT)[:, None, None]
        word, column, row = word[None, :, :], column[None, :, :], row[None, :, :]
        sums = tl.zeros([SPLIT, BLOCK_N, BLOCK_M], tl.float32)
    block = tile_n * (BLOCK_N // TILE_ROWS) + row // TILE_ROWS
    if not EVEN:
        block = tl.minimum(block, tl.cdiv(N, TILE_ROWS) - 1)
    tile_words = (block.to(tl.int64) * T + (start + own)) * (TILE_ROWS * words_of_tile)
    words_ptrs = words_ptr + tile_words + (row % TILE_ROWS * words_of_tile + word)
    x_ptrs = x_rows + ((start + own) * TILE + column).to(tl.int64) * x_stride_k
    if GROUP == 0:
        scales = scales_of(scale_ptr, start + own, n, N, None, GROUP, TILE)
    if zero_point_ptr is None:
        added = tl.full(shape, -ZERO_POINT * STEP, dtype)
    for first in tl.range(start, end, SPLIT, num_stages=STAGES):
        tile = first + own
        ahead = None if WHOLE else tile < T
        if GROUP != 0:
            scales = scales_of(scale_ptr, tile, n, N, ahead, GROUP, TILE)
        if zero_point_ptr is not None:
            zero_points = zero_points_of(zero_point_ptr, tile, n, N, ahead)
        words = read_where(words_ptrs, ahead).to(tl.uint32, bitcast=True)
        if SPLIT > 1:
            words = exchanged_words(words)
            xs = tl.load(x_ptrs) if WHOLE else tl.load(x_ptrs, mask=tile * TILE + column < K, other=0.0)
            xs = quarters(xs.reshape(SPLIT, 4, step_columns, BLOCK_M).permute(0, 2, 3, 1))
        for part in tl.static_range(parts):
            product = tl.zeros_like(sums)
            for place in tl.static_range(part * (4 // parts), (part + 1) * (4 // parts)):
                if SPLIT > 1:
                    x = exchanged_columns(xs[place])
                elif WHOLE:
                    x = tl.load(x_ptrs + place * step_columns * x_stride_k)
                else:
                    there = tile * TILE + place * step_columns + column < K
                    x = tl.load(x_ptrs + place * step_columns * x_stride_k, mask=there, other=0.0)
                if zero_point_ptr is not None:
                    added = tl.broadcast_to(zero_points[place], shape)
                weight = code_numbers(words, place, added, STEP, E2M1, shape, dtype)
                if SHORT:
                    weight = with_short_groups(weight, scales, place, SPLIT)
                product = tl.dot(weight, x, product, input_precision="ieee")
            if SHORT:
                sums += product
            else:
                sums += product * scale_of(scales, part, parts, scale_ptr.dtype.element_ty)
        x_ptrs += SPLIT * TILE * x_stride_k
        words_ptrs += SPLIT * TILE_ROWS * words_of_tile
    return (sums if SPLIT == 1 else tl.sum(sums, 0)) * (1 / STEP)
