"""Experts: pairs of a token and an expert, brought together by expert in tiles of one matmul.

Rows are never copied into order. A tile is a list of pairs of one expert; the first matmul gathers their tokens, and
each result is stored where its pair stands, so that summing a token's results needs no list. Behind the first matmul
the activation is applied to what is still in registers.

Axes: T tokens, K experts of a token, P = T * K pairs, E experts, H hidden, I width of an expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint.kernels.activation import activate, gated
from hardpoint.kernels.pair_lists import pairs_of_tile
from hardpoint.kernels.weight_only_numbers import byte_scale


@triton.jit(do_not_specialize=["num_pairs"])
def expert_tiles(
    x,
    x_scale,
    weight,
    weight_scale,
    zero_point,
    outer,
    bias,
    out,
    ids,
    listed,
    num_pairs,
    columns,
    depth,
    divisor,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    SHORT: tl.constexpr,
    X_GROUP: tl.constexpr,
    NIBBLES: tl.constexpr,
    FLIP: tl.constexpr,
    E2M1: tl.constexpr,
    LISTED_IN_PLACE: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WHOLE_DEPTH: tl.constexpr,
    HALF_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Rows ``pair // divisor`` of x [., depth] times the matrix of the pairs' expert -> rows ``pair`` of out.

    weight is [E, columns, depth], or [E, 2 * columns, depth] with ``GATED``. ``LISTED_IN_PLACE`` is 0 where ``listed``
    holds a tile's pairs, and as many lanes as hold all pairs where there is no list. With ``HALF_ROWS`` an expert's
    last tile is half as high where that is enough: at two tiles an expert, whole ones would waste a quarter.

    Pointers to scales, zero points and biases are None where there are none. A scale of weights is for SCALE_ROWS rows
    and GROUP columns, one of x for a row and X_GROUP columns; 0 is all of them. Scales in bytes are e8m0. With
    ``SHORT`` they are for as many columns, e4m3 for 16 and e8m0 for 32; ``outer`` has a factor for each row beside
    them. ``NIBBLES``: two columns are in a byte, as codes of e2m1 with ``E2M1``, else of integers of which FLIP is the
    bit that is a sign, if any. A bias is [E, rows of weight], added before the activation.

    With ``DESCRIBED`` weight is a tensor descriptor, of blocks of COLUMNS of all experts' rows. Such blocks may reach
    into the next expert's rows, and nothing of that is stored.
    """
    if BEGIN is not None:
        BEGIN()
    blocks = tl.cdiv(columns, COLUMNS)
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    expert, pairs = pairs_of_tile(ids, listed, tile, num_pairs, LISTED_IN_PLACE, ROWS)
    if expert < 0:
        return
    mine = listed + tile.to(tl.int64) * ROWS
    is_half = False
    if HALF_ROWS:
        is_half = tl.load(mine + ROWS // 2) >= num_pairs
    if HALF_ROWS and is_half:
        _multiply(
            x,
            x_scale,
            weight,
            weight_scale,
            zero_point,
            outer,
            bias,
            out,
            tl.load(mine + tl.arange(0, ROWS // 2)),
            expert,
            block,
            num_pairs,
            columns,
            depth,
            divisor,
            ACTIVATION,
            GATED,
            SCALE_ROWS,
            GROUP,
            SHORT,
            X_GROUP,
            NIBBLES,
            FLIP,
            E2M1,
            DESCRIBED,
            WHOLE_DEPTH,
            ROWS // 2,
            COLUMNS,
            DEPTH,
        )
    else:
        _multiply(
            x,
            x_scale,
            weight,
            weight_scale,
            zero_point,
            outer,
            bias,
            out,
            pairs,
            expert,
            block,
            num_pairs,
            columns,
            depth,
            divisor,
            ACTIVATION,
            GATED,
            SCALE_ROWS,
            GROUP,
            SHORT,
            X_GROUP,
            NIBBLES,
            FLIP,
            E2M1,
            DESCRIBED,
            WHOLE_DEPTH,
            ROWS,
            COLUMNS,
            DEPTH,
        )


@triton.jit
def _multiply(
    x,
    x_scale,
    weight,
    weight_scale,
    zero_point,
    outer,
    bias,
    out,
    pairs,
    expert,
    block,
    num_pairs,
    columns,
    depth,
    divisor,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    SHORT: tl.constexpr,
    X_GROUP: tl.constexpr,
    NIBBLES: tl.constexpr,
    FLIP: tl.constexpr,
    E2M1: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WHOLE_DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile: ``pairs`` [ROWS] of one expert, the columns of number ``block``."""
    is_row = pairs < num_pairs
    sources = tl.where(is_row, pairs, 0) // divisor
    at = block * COLUMNS + tl.arange(0, COLUMNS)
    row = at % columns  # behind the last column the first ones are read again, without a mask; nothing is stored there
    height = columns * 2 if GATED else columns
    inner, per_byte = tl.arange(0, DEPTH), 2 if NIBBLES else 1
    stored = tl.arange(0, DEPTH // 2) if NIBBLES else inner
    x_at = x + sources.to(tl.int64)[:, None] * depth + inner[None, :]
    first_row = expert * height + block * COLUMNS
    if DESCRIBED:
        w_at = None
        up_at = None
    else:
        w_at = weight + (expert.to(tl.int64) * height + row)[:, None] * (depth // per_byte) + stored[None, :]
        up_at = w_at + columns * (depth // per_byte)
    COLUMNS_OF_SCALE: tl.constexpr = SHORT + GROUP  # one of them is 0
    groups = tl.cdiv(depth, COLUMNS_OF_SCALE) if COLUMNS_OF_SCALE else 1
    scales = expert.to(tl.int64) * (tl.cdiv(height, SCALE_ROWS) if SCALE_ROWS else 1) * groups
    scale_at = scales + (row // SCALE_ROWS * groups if SCALE_ROWS else row * 0)
    up_scale_at = scales + ((row + columns) // SCALE_ROWS * groups if SCALE_ROWS else row * 0)
    # Scales that change on the way are applied to each round's products. Sums of products of 8-bit floats are added up
    # round by round too: matrix units may keep few of their bits.
    IS_ROUNDED: tl.constexpr = x_scale is not None
    BY_ROUND: tl.constexpr = GROUP > 0 or X_GROUP > 0 or (IS_ROUNDED and x.dtype.element_ty != tl.int8)
    SUMS: tl.constexpr = tl.int32 if IS_ROUNDED and not BY_ROUND else tl.float32
    total = tl.zeros([ROWS, COLUMNS], SUMS)
    up = tl.zeros([ROWS, COLUMNS], SUMS)
    for start in range(0, depth, DEPTH):
        if WHOLE_DEPTH:
            a = tl.load(x_at + start)
        else:
            a = tl.load(x_at + start, mask=(start + inner < depth)[None, :], other=0.0)
        is_stored = (start // per_byte + stored < depth // per_byte)[None, :]
        group = start // GROUP if GROUP else 0
        factor = None
        if X_GROUP:
            of_x = tl.load(x_scale + sources.to(tl.int64) * tl.cdiv(depth, X_GROUP) + start // X_GROUP)
            factor = of_x[:, None]
        b = _stored(weight, w_at, first_row, start // per_byte, is_stored, DESCRIBED, WHOLE_DEPTH)
        b = _numbers(b, zero_point, scale_at + group, a.dtype, NIBBLES, FLIP, E2M1, COLUMNS, DEPTH)
        if SHORT:
            short = start // SHORT + tl.arange(0, DEPTH // SHORT)[None, :]
            b = _in_short_groups(b, weight_scale + scale_at[:, None] + short, short < groups, SHORT, COLUMNS, DEPTH)
        total = _add_products(total, a, b, factor, weight_scale, scale_at + group, BY_ROUND)
        if GATED:
            c = _stored(weight, up_at, first_row + columns, start // per_byte, is_stored, DESCRIBED, WHOLE_DEPTH)
            c = _numbers(c, zero_point, up_scale_at + group, a.dtype, NIBBLES, FLIP, E2M1, COLUMNS, DEPTH)
            if SHORT:
                short_at = weight_scale + up_scale_at[:, None] + short
                c = _in_short_groups(c, short_at, short < groups, SHORT, COLUMNS, DEPTH)
            up = _add_products(up, a, c, factor, weight_scale, up_scale_at + group, BY_ROUND)
    if outer is not None:
        outer_at = outer + expert.to(tl.int64) * height + row
        total = total * tl.load(outer_at)[None, :]
        up = up * tl.load(outer_at + columns)[None, :] if GATED else up
    elif weight_scale is not None and GROUP == 0 and SHORT == 0 and not BY_ROUND:
        total = total.to(tl.float32) * _scale(weight_scale + scale_at)[None, :]
        up = up.to(tl.float32) * _scale(weight_scale + up_scale_at)[None, :] if GATED else up
    if IS_ROUNDED and X_GROUP == 0:
        of_row = tl.load(x_scale + sources)[:, None]
        total = total * of_row
        up = up * of_row if GATED else up
    if bias is not None:
        bias_at = bias + expert.to(tl.int64) * height + row
        total = total.to(tl.float32) + tl.load(bias_at).to(tl.float32)[None, :]
        up = up.to(tl.float32) + tl.load(bias_at + columns).to(tl.float32)[None, :] if GATED else up
    dtype = out.dtype.element_ty
    result = total.to(dtype)
    if GATED:
        result = gated(result, up.to(dtype), ACTIVATION)
    elif ACTIVATION is not None:
        result = activate(result.to(tl.float32), ACTIVATION).to(dtype)
    targets = out + pairs.to(tl.int64)[:, None] * columns + at[None, :]
    tl.store(targets, result, mask=is_row[:, None] & (at < columns)[None, :])


@triton.jit
def _stored(weight, at, row, column, is_stored, DESCRIBED: tl.constexpr, WHOLE_DEPTH: tl.constexpr):
    """A block of a matrix as it is stored."""
    if DESCRIBED:
        found = weight.load([row, column])
    elif WHOLE_DEPTH:
        found = tl.load(at + column)
    else:
        found = tl.load(at + column, mask=is_stored, other=0.0)
    return found


@triton.jit
def _numbers(
    stored,
    zero_point,
    scale_at,
    dtype: tl.constexpr,
    NIBBLES: tl.constexpr,
    FLIP: tl.constexpr,
    E2M1: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The values of a block's elements, before any scale, [COLUMNS, DEPTH] in ``dtype``."""
    if E2M1:
        numbers = tl.join(e2m1(stored, dtype), e2m1(stored >> 4, dtype)).reshape(COLUMNS, DEPTH)
    elif NIBBLES:
        codes = tl.join(stored & 0xF, stored >> 4).reshape(COLUMNS, DEPTH)
        numbers = ((codes ^ FLIP).to(tl.int32) - FLIP).to(tl.float32)
    else:
        numbers = stored
    if zero_point is not None:
        numbers = numbers.to(tl.float32) - tl.load(zero_point + scale_at).to(tl.float32)[:, None]
    return numbers.to(dtype)


@triton.jit
def e2m1(codes, dtype: tl.constexpr):
    """The values in ``dtype`` of codes in the low four bits of bytes.

    Exponent and mantissa, where those of a number of 16 bits end, are one that is smaller by a power of two.
    """
    wide = codes.to(tl.uint16)
    if dtype == tl.bfloat16:
        bits = ((wide & 7) << 6) | ((wide & 8) << 12)
        numbers = bits.to(tl.bfloat16, bitcast=True) * tl.full(codes.shape, 2.0**126, tl.bfloat16)
    else:
        bits = ((wide & 7) << 9) | ((wide & 8) << 12)
        numbers = (bits.to(tl.float16, bitcast=True) * tl.full(codes.shape, 2.0**14, tl.float16)).to(dtype)
    return numbers


@triton.jit
def _in_short_groups(numbers, ptrs, there, SHORT: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """Numbers [COLUMNS, DEPTH] times the scales at ``ptrs`` [COLUMNS, DEPTH / SHORT], exact for e2m1: scales of 32
    columns are of e8m0, others of e4m3."""
    scales = byte_scale(tl.load(ptrs, mask=there, other=0), SHORT == 32).to(numbers.dtype)
    apart = numbers.reshape(COLUMNS, DEPTH // SHORT, SHORT) * tl.expand_dims(scales, 2)
    return apart.reshape(COLUMNS, DEPTH)


@triton.jit
def _scale(ptrs):
    """Scales as float32; bytes are e8m0."""
    found = tl.load(ptrs)
    return byte_scale(found, True) if found.dtype == tl.uint8 else found.to(tl.float32)


@triton.jit
def _add_products(sums, a, b, factor, weight_scale, scale_at, BY_ROUND: tl.constexpr):
    """Sums [ROWS, COLUMNS] with another round's products added, times their scales where those are the round's."""
    if BY_ROUND:
        products = tl.dot(a, b.T, input_precision="ieee").to(tl.float32)
        products *= _scale(weight_scale + scale_at)[None, :]
        if factor is not None:
            products *= factor
        found = sums + products
    else:
        found = tl.dot(a, b.T, sums, input_precision="ieee", out_dtype=sums.dtype)
    return found


@triton.jit
def sum_of_results(
    results,
    ids,
    weights,
    out,
    hidden,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """A token's results, each times its weight; those of experts that are not here were never written."""
    if BEGIN is not None:
        BEGIN()
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        is_here = tl.load(ids + pair) >= 0
        found = tl.load(results + pair * hidden + at, mask=is_here & (at < hidden), other=0.0).to(tl.float32)
        total += tl.where(is_here, found * tl.load(weights + pair), 0.0)
    tl.store(out + token * hidden + at, total, mask=at < hidden)
