"""A tile of a product with a weight in GGUF's blocks, which is laid out in tiles (block_tiles.py).

As in tile_product.py, the weight stands on the left side of matrix units, and codes become numbers in registers: put
into the mantissa of a power of two that is large enough, a code is that power plus the code, from which power and bias
are subtracted, exactly.

For few rows of x, a group's product is scaled in float32, and a group's minimum is multiplied by the sum of x over the
group: nothing of a weight is rounded. With NUMBERS_FIRST codes are scaled before the product, and rounded to x's dtype,
as a weight that is stored dequantized would be: less work where many rows of x share it, and in float32 no sum of large
terms that cancel.

Axes: M rows of x, N rows of the weight (out), K columns (in), T tiles of a row, W words of one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint.kernels import block_tiles
from hardpoint.kernels.weight_only_numbers import halves, read_where

TILE_ROWS = tl.constexpr(block_tiles.TILE_ROWS)
TILE_COLUMNS = tl.constexpr(block_tiles.TILE_COLUMNS)
WORDS = tl.constexpr(block_tiles.WORDS)
PLACE_COLUMNS = tl.constexpr(block_tiles.TILE_COLUMNS // 4)
TILES_OF_OUTER = tl.constexpr(block_tiles.OUTER_COLUMNS // block_tiles.TILE_COLUMNS)


@triton.jit
def block_product(
    x_rows,
    x_stride_k,
    words_ptr,
    high_ptr,
    scale_ptr,
    outer_ptr,
    min_ptr,
    outer_min_ptr,
    tile_n,
    start,
    end,
    N,
    K,
    T,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    SIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUMBERS_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows ``tile_n * BLOCK_N`` and on of the weight, times rows of x: float32 [BLOCK_N, BLOCK_M], over the tiles of
    columns from ``start`` to ``end``.

    ``x_rows`` [1, BLOCK_M] points to the rows' beginnings. WHOLE: K is a whole number of tiles. ``high_ptr``,
    ``outer_ptr`` and the minima are None where the spec has none. Of rows beyond the last one nothing is meant.
    """
    dtype: tl.constexpr = x_rows.dtype.element_ty
    parts: tl.constexpr = TILE_COLUMNS // GROUP
    n = tl.minimum((tile_n * BLOCK_N + tl.arange(0, BLOCK_N))[:, None], N - 1)
    row, word = n % TILE_ROWS, tl.arange(0, WORDS)[None, :]
    first = ((n // TILE_ROWS).to(tl.int64) * T * TILE_ROWS + row) * WORDS + word
    column = tl.arange(0, PLACE_COLUMNS)[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for tile in tl.range(start, end, num_stages=STAGES):
        at = first + tile * (TILE_ROWS * WORDS)
        words, high = block_words(words_ptr, high_ptr, at)
        scales, minima, outer, outer_min = block_scales(scale_ptr, outer_ptr, min_ptr, outer_min_ptr, tile, n, N)
        for place in tl.static_range(4):
            k = tile * TILE_COLUMNS + place * PLACE_COLUMNS + column
            x = read_where(x_rows + (k * x_stride_k), None if WHOLE else k < K)
            weight = block_codes(words, high, high_ptr, place, BIAS, dtype)
            if NUMBERS_FIRST:
                numbers = scaled_codes(
                    weight.to(tl.float32), scales, minima, outer, outer_min, min_ptr is not None, place, GROUP, SIGNED
                )
                sums = tl.dot(numbers.to(dtype), x, sums, input_precision="ieee")
            elif GROUP == 16:
                # Columns that a scale is not for count as zeros of x: two products, of which each has its half.
                for half in tl.static_range(2):
                    own = tl.where(column // 16 == half, x, tl.zeros_like(x))
                    part = 2 * place + half
                    product = tl.dot(weight, own, tl.zeros_like(sums), input_precision="ieee")
                    sums += product * (number_of(scales, part, parts, SIGNED) * outer)
                    if min_ptr is not None:
                        total = tl.sum(own.to(tl.float32), 0)[None, :]
                        sums += total * (number_of(minima, part, parts, SIGNED) * outer_min)
            else:
                product = tl.dot(weight, x, tl.zeros_like(sums), input_precision="ieee")
                sums += product * (number_of(scales, place, parts, SIGNED) * outer)
                if min_ptr is not None:
                    total = tl.sum(x.to(tl.float32), 0)[None, :]
                    sums += total * (number_of(minima, place, parts, SIGNED) * outer_min)
    return sums


@triton.jit
def block_words(words_ptr, high_ptr, at):
    """The words at ``at``, and beside each the word with its codes' upper bits, uint32: of a half word, the upper byte
    lies in the upper half, too."""
    words = tl.load(words_ptr + at).to(tl.uint32, bitcast=True)
    high = words
    if high_ptr is not None:
        stored = tl.load(high_ptr + at)
        if high_ptr.dtype.element_ty == tl.int16:
            pair = stored.to(tl.uint16, bitcast=True).to(tl.uint32)
            high = pair | (pair << 8)
        else:
            high = stored.to(tl.uint32, bitcast=True)
    return words, high


@triton.jit
def block_scales(scale_ptr, outer_ptr, min_ptr, outer_min_ptr, tile, n, N):
    """For rows ``n`` [BLOCK_N, 1] of a tile: the words with its scales and with its minima, and the factor of each,
    float32."""
    record = n.to(tl.int64) + tile * N
    outer_record = n.to(tl.int64) + tile // TILES_OF_OUTER * N
    scales = tl.load(scale_ptr + record)
    minima, outer, outer_min = scales, 1.0, 1.0
    if outer_ptr is not None:
        outer = tl.load(outer_ptr + outer_record).to(tl.float32)
    if min_ptr is not None:
        minima = tl.load(min_ptr + record)
    if outer_min_ptr is not None:
        outer_min = tl.load(outer_min_ptr + outer_record).to(tl.float32)
    return scales, minima, outer, outer_min


@triton.jit
def block_codes(words, high, high_ptr, place: tl.constexpr, BIAS: tl.constexpr, dtype: tl.constexpr):
    """The weights [BLOCK_N, 32] of a place of words, before any scale: codes less BIAS.

    ``high_ptr`` says by its type how many bits of a code ``high`` has.
    """
    HIGH_BITS: tl.constexpr = 0 if high_ptr is None else high_ptr.dtype.element_ty.primitive_bitwidth // 8
    shape: tl.constexpr = (words.shape[0], 2 * words.shape[1])
    pairs = (words >> (4 * place)) & 0x000F000F
    above = pairs
    if HIGH_BITS == 2:
        pairs = pairs | (((high >> (2 * place)) & 0x00030003) << 4)
    if HIGH_BITS == 4:
        above = (high >> (4 * place)) & 0x000F000F
    if HIGH_BITS == 4 and dtype != tl.bfloat16:
        pairs = pairs | (above << 4)
    if dtype == tl.float32:
        return tl.join(pairs & 0xFFFF, pairs >> 16).reshape(shape).to(tl.float32) - BIAS
    elif HIGH_BITS == 4 and dtype == tl.bfloat16:  # noqa: RET505  # Triton reads on after a return
        # A mantissa of 8 bits has room for seven: the upper four make a number of their own. All sums are exact.
        low = halves(pairs | 0x43004300, dtype).reshape(shape) - tl.full(shape, 128, dtype)
        upper = halves(above | 0x43004300, dtype).reshape(shape) - tl.full(shape, 128 + BIAS // 16, dtype)
        return upper * tl.full(shape, 16, dtype) + low
    else:  # Triton reads on after a return
        # 128 and 1024 are the least powers whose mantissas count ones in their last place, of 8 and of 11 bits.
        power: tl.constexpr = 128 if dtype == tl.bfloat16 else 1024
        bits: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
        return halves(pairs | bits, dtype).reshape(shape) - tl.full(shape, power + BIAS, dtype)


@triton.jit
def scaled_codes(
    codes,
    scales,
    minima,
    outer,
    outer_min,
    MINIMUM: tl.constexpr,
    place: tl.constexpr,
    GROUP: tl.constexpr,
    SIGNED: tl.constexpr,
):
    """The weights of a place, float32: its ``codes`` less the bias, float32 [BLOCK_N, 32], scaled, and with minima."""
    numbers = codes * (_numbers_of_columns(scales, place, GROUP, SIGNED) * outer)
    if MINIMUM:
        numbers += _numbers_of_columns(minima, place, GROUP, SIGNED) * outer_min
    return numbers


@triton.jit
def _numbers_of_columns(record, place: tl.constexpr, GROUP: tl.constexpr, SIGNED: tl.constexpr):
    """A record's numbers for the columns of a place, float32: [BLOCK_N, 1], or [BLOCK_N, 32] of two groups."""
    if GROUP == 16:
        first, second = number_of(record, 2 * place, 8, SIGNED), number_of(record, 2 * place + 1, 8, SIGNED)
        return tl.where(tl.arange(0, PLACE_COLUMNS)[None, :] < 16, first, second)
    else:  # noqa: RET505  # Triton reads on after a return
        return number_of(record, place, 4, SIGNED)


@triton.jit
def number_of(record, part: tl.constexpr, parts: tl.constexpr, SIGNED: tl.constexpr):
    """One of the ``parts`` numbers of a record, as float32: whole ones of 8 bits, or float16."""
    bits: tl.constexpr = record.dtype.primitive_bitwidth // parts
    found = record >> (part * bits)
    if bits == 16:
        return found.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif SIGNED:  # noqa: RET505  # Triton reads on after a return
        return found.to(tl.int8).to(tl.float32)
    else:  # Triton reads on after a return
        return (found & 0xFF).to(tl.float32)
