"""Decoding of words and scales in registers, for products with 4-bit weights (weight_only.py).

Axes: N rows of the weight, S warps with columns of their own, W words of a tile's row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halves(pairs, dtype: tl.constexpr):
    """The lower and the upper half of 32 bits, side by side in a new last axis."""
    lower, upper = pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16)
    return tl.join(lower.to(dtype, bitcast=True), upper.to(dtype, bitcast=True))


@triton.jit
def code_numbers(
    words,
    place: tl.constexpr,
    added,
    STEP: tl.constexpr,
    E2M1: tl.constexpr,
    shape: tl.constexpr,
    dtype: tl.constexpr,
):
    """Of the codes at ``place`` (0 to 3) of words: ``code * STEP + added``, in ``shape``, twice as long.

    With ``E2M1``, what codes of that element mean.
    """
    if E2M1:
        return _e2m1(words, place, shape, dtype)
    elif dtype == tl.float32:  # noqa: RET505  # Triton reads on after a return
        codes = tl.join((words >> (4 * place)) & 0xF, (words >> (4 * place + 16)) & 0xF)
        return codes.reshape(shape).to(tl.float32) * STEP + added
    else:  # Triton reads on after a return
        # Odd places become sixteens of the smallest number where they are: two places share a shift.
        pairs = (words if place < 2 else words >> 8) & (0x00F000F0 if place % 2 else 0x000F000F)
        smallest: tl.constexpr = (2.0**-133 if dtype == tl.bfloat16 else 2.0**-24) * (16 if place % 2 else 1)
        # Compilers make one instruction of both; with tl.fma, they would not work on pairs where zero points are added.
        return halves(pairs, dtype).reshape(shape) * tl.full(shape, STEP / smallest, dtype) + added


@triton.jit
def zero_points_of(ptr, tile, n, N, there):
    """A tuple: of each quarter of a tile, what is added to the codes of rows ``n``.

    One read for the four, of as many elements as there are lanes: of fewer, Triton makes several copies by some lanes.
    """
    first = tl.expand_dims((tile.to(tl.int64) * N + n) * 4, -1)
    return quarters(read_where(ptr + first + tl.arange(0, 4), None if there is None else tl.expand_dims(there, -1)))


@triton.jit
def quarters(x):
    """A tuple: of x [..., 4], each of four."""
    even, odd = tl.split(x.reshape(x.shape[:-1] + (2, 2)))  # noqa: RUF005  # as Triton reads it
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def scales_of(ptr, tile, n, N, there, GROUP: tl.constexpr, TILE: tl.constexpr):
    """A tuple: the scales of a tile's groups, for rows ``n``, as many in each as 64 bits hold; see ``scale_of``.

    ``there`` None: the tiles are.
    """
    parts: tl.constexpr = TILE // GROUP if GROUP != 0 and GROUP <= TILE else 1
    bits: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    together: tl.constexpr = parts if bits <= 16 else 1
    if GROUP == 0:
        record = tile * 0
    elif GROUP > TILE:
        record = tile // (GROUP // TILE)
    else:
        record = tile
    first = (record.to(tl.int64) * N + n) * (parts // together)
    if together > 1:
        whole: tl.constexpr = tl.int64 if bits * together == 64 else tl.int32 if bits * together == 32 else tl.int16
        ptr = ptr.to(tl.pointer_type(whole))
    found = ()
    for number in tl.static_range(parts // together):
        found = found + (read_where(ptr + first + number, there),)  # type: ignore[assignment]  # noqa: RUF005  # as Triton reads it
    return found


@triton.jit
def read_where(ptrs, there):
    """The elements that ``there`` marks, zeros elsewhere; all where ``there`` is None."""
    if there is None:
        return tl.load(ptrs)
    else:  # noqa: RET505  # Triton reads on after a return
        return tl.load(ptrs, mask=there, other=0)


@triton.jit
def scale_of(scales, part: tl.constexpr, parts: tl.constexpr, dtype: tl.constexpr):
    """Of what ``scales_of`` found, a group's, as float32. Scales in bytes are e8m0."""
    together: tl.constexpr = parts if dtype.primitive_bitwidth <= 16 else 1
    found = scales[part // together]
    if dtype == tl.uint8:
        scale = byte_scale(found >> (part * 8), True)
    elif together > 1:
        scale = (found >> (part * 16)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    else:
        scale = found.to(tl.float32)
    return scale


@triton.jit
def exchanged_columns(x):
    """x's columns [S, C, M] in another order, in which ``exchanged_words`` has the weight's, too.

    Of every 16 columns that they multiply at a time, matrix units take two pairs from each of four lanes, whose lie
    apart. So exchanged, all of a lane's columns lie side by side in memory, in the order in which they are taken.
    """
    split: tl.constexpr = x.shape[0]
    steps: tl.constexpr = x.shape[1] // 32
    rows: tl.constexpr = x.shape[2]
    lanes = x.reshape(split, 4, steps, 2, 2, 2, rows)
    return lanes.permute(0, 2, 4, 1, 3, 5, 6).reshape(x.shape)


@triton.jit
def exchanged_words(words):
    """Words [S, N, C / 2] of the columns that ``exchanged_columns`` has."""
    split: tl.constexpr = words.shape[0]
    rows: tl.constexpr = words.shape[1]
    steps: tl.constexpr = words.shape[2] // 16
    return words.reshape(split, rows, 4, steps, 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(words.shape)


@triton.jit
def _e2m1(words, place: tl.constexpr, shape: tl.constexpr, dtype: tl.constexpr):
    """``code_numbers`` of e2m1: exponent and mantissa, where those of a number of 16 bits end, are a number that is
    smaller by a power of two."""
    narrow: tl.constexpr = tl.float16 if dtype == tl.float32 else dtype
    magnitude: tl.constexpr = 6 if narrow == tl.bfloat16 else 9
    factor: tl.constexpr = 2.0**126 if narrow == tl.bfloat16 else 2.0**14
    codes = words >> (4 * place)
    pairs = ((codes & 0x00070007) << magnitude) | ((codes & 0x00080008) << 12)
    return (halves(pairs, narrow).reshape(shape) * tl.full(shape, factor, narrow)).to(dtype)


@triton.jit
def byte_scale(codes, E8M0: tl.constexpr):
    """Scales of e8m0, or of e4m3, in the low bytes of integers: float32."""
    bits = codes.to(tl.uint32) & 0xFF
    if E8M0:  # an exponent with 127 added, of which 0 is subnormal and 255 NaN
        number = tl.maximum(bits << 23, tl.full(bits.shape, 0x00400000, tl.uint32))
        scales = (number | ((bits + 1) & 0x100)).to(tl.float32, bitcast=True)
    else:  # a number of 16 bits with the same exponent and mantissa is 2^-8 of it
        magnitude = bits & 0x7F
        half = (((bits & 0x80) << 8) | (magnitude << 7)).to(tl.uint16).to(tl.float16, bitcast=True)
        scales = tl.where(magnitude == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    return scales


@triton.jit
def with_short_groups(weight, scales, place: tl.constexpr, SPLIT: tl.constexpr):
    """A place's numbers [N, 32], or [S, N, 32] in the order of ``exchanged_words``, times the scales of e4m3 of its two
    groups, exactly. ``scales`` are what ``scales_of`` found: eight bytes a row."""
    dtype: tl.constexpr = weight.dtype
    first = byte_scale(scales[0] >> (16 * place), False).to(dtype)
    second = byte_scale(scales[0] >> (16 * place + 8), False).to(dtype)
    if SPLIT == 1:
        rows: tl.constexpr = weight.shape[0]
        both = tl.join(first, second).reshape(rows, 2, 1)
        return (weight.reshape(rows, 2, 16) * both).reshape(rows, 32)
    else:  # noqa: RET505  # Triton reads on after a return
        n: tl.constexpr = weight.shape[1]
        each = tl.join(first, second).reshape(SPLIT, n, 1, 2, 1)
        return (weight.reshape(SPLIT, n, 2, 2, 8) * each).reshape(SPLIT, n, 32)
