"""Drawing tokens, without sorting a vocabulary and without asking the device anything.

Axes: N rows, V vocabulary, T tiles of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint.kernels.launch import begun

_TILE = 128
"""Tokens whose highest logit is kept. Small, so that what truncation leaves lies in few tiles."""
_TILES_PER_PROGRAM = 8
_TILES_AT_ONCE = 32
_ARGMAX_PROGRAMS = 1024
"""About as many programs as large devices run at once: with fewer rows than that, a row is shared by several."""
_LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Bits of a float32 that a widened number of the dtype does not use: a search passes over them."""


def argmax_tokens(logits: torch.Tensor) -> torch.Tensor:
    """See core's op. The first NaN of a row comes before all numbers, as in torch."""
    rows = _rows(logits)
    count, vocabulary = rows.shape
    tokens = torch.empty(count, dtype=torch.int64, device=rows.device)
    if not count:
        return tokens
    block, num_warps = (1024, 4) if count < 16 else (4096, 8)
    blocks = triton.cdiv(vocabulary, block)
    parts = min(blocks, max(_ARGMAX_PROGRAMS // count, 1))
    best = tokens if parts == 1 else torch.empty(count, parts, dtype=torch.int64, device=rows.device)
    _argmax_of_parts[count, parts](
        rows,
        rows.stride(0),
        best,
        vocabulary,
        triton.cdiv(blocks, parts),
        parts == 1,
        block,
        num_warps=num_warps,
        **begun(rows),
    )
    if parts > 1:
        _argmax_of_row[count,](best, tokens, parts, triton.next_power_of_2(parts), num_warps=4, **begun(rows))
    return tokens


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """See core's op. Rows without a finite highest logit give what argmax_tokens gives.

    Two launches. The first notes each tile's highest logit and its mass. The second has a program for each row: where
    nothing is truncated it finds the drawn tile by the masses and reads that tile alone. Otherwise the highest logits
    of tiles bound the lowest logit that is kept, and only tiles that reach it are read again, while a search over the
    order of floating-point numbers narrows it down.
    """
    rows = _rows(logits)
    count, vocabulary = rows.shape
    tokens = torch.empty(count, dtype=torch.int64, device=rows.device)
    if not count:
        return tokens
    tiles = triton.cdiv(vocabulary, _TILE)
    highest, listed = torch.empty(2, count, tiles, dtype=torch.int32, device=rows.device)
    masses = torch.empty(count, tiles, dtype=torch.float32, device=rows.device)
    temperature = temperature.contiguous()
    grid = count, triton.cdiv(tiles, _TILES_PER_PROGRAM)
    _tiles_of_rows[grid](
        rows, rows.stride(0), temperature, highest, masses, vocabulary, tiles, _TILE, _TILES_PER_PROGRAM, num_warps=4
    )
    _draw_of_row[count,](
        rows,
        rows.stride(0),
        temperature,
        top_k.contiguous(),
        top_p.contiguous(),
        min_p.contiguous(),
        uniform.contiguous(),
        highest,
        masses,
        listed,
        tokens,
        vocabulary,
        tiles,
        _LOW_BITS[rows.dtype],
        _TILE,
        triton.next_power_of_2(tiles),
        min(_TILES_AT_ONCE, triton.next_power_of_2(tiles)),
        num_warps=8,
    )
    return tokens


def philox_uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """See core's op."""
    out = torch.empty(seeds.shape, dtype=torch.float32, device=seeds.device)
    if count := out.numel():
        _philox[triton.cdiv(count, 128),](seeds.contiguous(), positions.contiguous(), out, count, 128, num_warps=4)
    return out


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """The logits, with each row's elements one behind the other."""
    return logits if logits.stride(-1) == 1 else logits.contiguous()


# Numbers by their order.


@triton.jit
def order_of(x):
    """Map float32 numbers to int32 keys of the same order. -0.0 and 0.0 have one key; every NaN has the highest."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _number_at(order):
    """The inverse of order_of."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


# The likeliest token.


@triton.jit(do_not_specialize=["blocks_per_part"])
def _argmax_of_parts(
    logits,
    stride,
    best,
    vocabulary,
    blocks_per_part,
    IS_WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Where a part's highest logit is: with ``IS_WHOLE`` its token, otherwise its order and place in one number."""
    if BEGIN is not None:
        BEGIN()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = part * blocks_per_part * BLOCK
    lanes = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], -(2**31), tl.int32)
    places = lanes + first
    for block in range(blocks_per_part):
        tokens = first + block * BLOCK + lanes
        x = tl.load(logits + row * stride + tokens, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32)
        order = tl.where(tokens < vocabulary, order_of(x), -(2**31))
        is_higher = order > highest
        highest = tl.where(is_higher, order, highest)
        places = tl.where(is_higher, tokens, places)
    # Of equals, the one that stands first has the larger number.
    packed = tl.max((highest.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64), axis=0)
    if IS_WHOLE:
        tl.store(best + row, 0x7FFFFFFF - (packed & 0x7FFFFFFF))
    else:
        tl.store(best + row * tl.num_programs(1) + part, packed)


@triton.jit(do_not_specialize=["parts"])
def _argmax_of_row(best, tokens, parts, PARTS: tl.constexpr, BEGIN: tl.constexpr):
    if BEGIN is not None:
        BEGIN()
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    packed = tl.max(tl.load(best + row * parts + lanes, mask=lanes < parts, other=-(2**63)), axis=0)
    tl.store(tokens + row, 0x7FFFFFFF - (packed & 0x7FFFFFFF))


# A drawn token.


@triton.jit
def _tiles_of_rows(
    logits,
    stride,
    temperature,
    highest,
    masses,
    vocabulary,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Each tile's highest logit, by its order, and the sum of e^(x - that) over its scaled logits."""
    row, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILES + tl.arange(0, TILES)
    tokens = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    x = tl.load(logits + row * stride + tokens, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32)
    most = tl.max(order_of(x), axis=1)
    divisor = tl.load(temperature + row)
    divisor = tl.where(divisor == 0.0, 1.0, divisor)
    high = _number_at(most)
    weights = tl.exp(tl.div_rn(x, divisor) - tl.div_rn(high, divisor)[:, None])
    mass = tl.where(high == float("-inf"), 0.0, tl.sum(weights, axis=1))
    tl.store(highest + row * num_tiles + tiles, most, mask=tiles < num_tiles)
    tl.store(masses + row * num_tiles + tiles, mass, mask=tiles < num_tiles)


@triton.jit
def _listed_tiles(
    row,
    listed,
    first,
    count,
    vocabulary,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Tokens and logits [TILES, TILE] of a row's listed tiles from number ``first`` on; -inf where there are none."""
    places = first + tl.arange(0, TILES)
    tiles = tl.load(listed + places, mask=places < count, other=0)
    tokens = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    is_there = (places < count)[:, None] & (tokens < vocabulary)
    return tokens, tl.load(row + tokens, mask=is_there, other=float("-inf")).to(tl.float32)


@triton.jit
def _weights(x, divisor, least, high):
    """E^(x - high) of the scaled logits from ``least`` on, 0 of all others."""
    scaled = tl.div_rn(x, divisor)
    return tl.where(scaled >= least, tl.exp(scaled - high), 0.0)


@triton.jit
def _mass_listed(
    row,
    listed,
    count,
    vocabulary,
    divisor,
    least,
    high,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The sum of _weights over listed tiles."""
    total = tl.zeros([TILES, TILE], tl.float32)
    for first in range(0, count, TILES):
        _, x = _listed_tiles(row, listed, first, count, vocabulary, TILE, TILES)
        total += _weights(x, divisor, least, high)
    return tl.sum(total)


@triton.jit
def _lowest_of(order, weights, limit, low, high):
    """The lowest from ``low`` to ``high`` above which the weights are less than ``limit``; ``high`` without any."""
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)  # a sum might overflow
        if tl.sum(tl.where(order > middle, weights, 0.0), axis=0) < limit:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _lowest_listed(
    row,
    listed,
    count,
    vocabulary,
    divisor,
    least,
    highest,
    limit,
    low,
    high,
    IS_COUNT: tl.constexpr,
    LOW_BITS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """As _lowest_of, over the logits of listed tiles, each of weight 1 or as _weights says.

    Three places are tried in one pass, which quarters the range.
    """
    while low < high:
        span = high.to(tl.int64) - low
        a, b, c = (low + span // 4).to(tl.int32), (low + span // 2).to(tl.int32), (low + span * 3 // 4).to(tl.int32)
        above_a = tl.zeros([TILES, TILE], tl.float32)
        above_b = tl.zeros([TILES, TILE], tl.float32)
        above_c = tl.zeros([TILES, TILE], tl.float32)
        for first in range(0, count, TILES):
            _, x = _listed_tiles(row, listed, first, count, vocabulary, TILE, TILES)
            order = order_of(x) >> LOW_BITS
            weights = tl.full([TILES, TILE], 1.0, tl.float32)
            if not IS_COUNT:
                weights = _weights(x, divisor, least, highest)
            above_a += tl.where(order > a, weights, 0.0)
            above_b += tl.where(order > b, weights, 0.0)
            above_c += tl.where(order > c, weights, 0.0)
        if tl.sum(above_b) < limit:
            if tl.sum(above_a) < limit:
                high = a
            else:
                low, high = a + 1, b
        else:
            if tl.sum(above_c) < limit:
                low, high = b + 1, c
            else:
                low = c + 1
    return low


@triton.jit
def _scaled_at(order, divisor, LOW_BITS: tl.constexpr):
    """The scaled logit of a place in the order, without its low bits."""
    is_negative = order < 0
    whole = (order << LOW_BITS) | tl.where(is_negative, (1 << LOW_BITS) - 1, 0)
    return tl.div_rn(_number_at(whole), divisor)


@triton.jit
def _draw_of_row(
    logits,
    stride,
    temperature,
    top_k,
    top_p,
    min_p,
    uniform,
    highest,
    masses,
    listed,
    tokens,
    vocabulary,
    num_tiles,
    LOW_BITS: tl.constexpr,
    TILE: tl.constexpr,
    ALL_TILES: tl.constexpr,
    TILES: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    row, listed = logits + number * stride, listed + number * num_tiles
    divisor, k, p = tl.load(temperature + number), tl.load(top_k + number), tl.load(top_p + number)
    is_greedy = divisor == 0.0
    divisor = tl.where(is_greedy, 1.0, divisor)
    tiles, lanes = tl.arange(0, ALL_TILES), tl.arange(0, TILE)
    is_tile = tiles < num_tiles
    tile_order = tl.load(highest + number * num_tiles + tiles, mask=is_tile, other=-(2**31))
    top = tl.max(tile_order, axis=0)
    high = tl.div_rn(_number_at(top), divisor)
    least = high + tl.log(tl.load(min_p + number))
    is_limited = (k > 0) & (k < vocabulary)
    if is_greedy | (high - high != 0.0):  # infinite, or NaN
        tile = tl.min(tl.where(tile_order == top, tiles, ALL_TILES), axis=0)
        at = tile * TILE + lanes
        x = tl.load(row + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        token = tl.min(tl.where((order_of(x) == top) & (at < vocabulary), at, vocabulary), axis=0)
        tl.store(tokens + number, token.to(tl.int64))
    elif is_limited | (p < 1.0) | (least > float("-inf")):
        # Everything from here on is about logits by their order, without the bits that their dtype has not.
        tile_order = tile_order >> LOW_BITS
        top = top >> LOW_BITS
        lowest_tile = tl.min(tl.where(is_tile, tile_order, top), axis=0)
        low = tl.full([], -2139095041, tl.int32) >> LOW_BITS  # the order of negative infinity
        low = low.to(tl.int32)
        # As many tiles as k reach the k-th highest of them: so do as many logits.
        if is_limited & (k <= num_tiles):
            ones = tl.where(is_tile, 1.0, 0.0)
            low = tl.maximum(low, _lowest_of(tile_order, ones, k.to(tl.float32), lowest_tile, top))
        mass_kept = 0.0
        is_only_p = (p < 1.0) & ~is_limited & (least == float("-inf"))
        if is_only_p:  # otherwise what top_p is a share of is known only when the tiles have been read
            peaks = tl.where(is_tile, tl.exp(_scaled_at(tile_order, divisor, LOW_BITS) - high), 0.0)
            mass = tl.load(masses + number * num_tiles + tiles, mask=is_tile, other=0.0)
            mass_kept = tl.sum(tl.where(is_tile, mass * peaks, 0.0), axis=0)
            if tl.sum(peaks, axis=0) >= p * mass_kept:
                low = tl.maximum(low, _lowest_of(tile_order, peaks, p * mass_kept, lowest_tile, top))
            # All logits below this together weigh at most half of what top_p leaves out.
            reach = high - tl.log(2.0 * vocabulary / (1.0 - p))
            low = tl.minimum(tl.maximum(low, order_of(reach * divisor) >> LOW_BITS), top)
        is_kept = is_tile & (tile_order >= low) & (_scaled_at(tile_order, divisor, LOW_BITS) >= least)
        count = tl.sum(is_kept.to(tl.int32), axis=0)
        tl.store(listed + tl.cumsum(is_kept.to(tl.int32), axis=0) - 1, tiles, mask=is_kept)
        tl.debug_barrier()  # what some threads have stored is read by others
        if is_limited:
            limit = k.to(tl.float32)
            low = _lowest_listed(
                row, listed, count, vocabulary, divisor, least, high, limit, low, top, True, LOW_BITS, TILE, TILES
            )
            least = tl.maximum(least, _scaled_at(low, divisor, LOW_BITS))
        if ~is_only_p:
            mass_kept = _mass_listed(row, listed, count, vocabulary, divisor, least, high, TILE, TILES)
        if p < 1.0:
            limit = p * mass_kept
            low = _lowest_listed(
                row, listed, count, vocabulary, divisor, least, high, limit, low, top, False, LOW_BITS, TILE, TILES
            )
            least = tl.maximum(least, _scaled_at(low, divisor, LOW_BITS))
            mass_kept = _mass_listed(row, listed, count, vocabulary, divisor, least, high, TILE, TILES)
        target = tl.load(uniform + number) * mass_kept
        before, found, last = 0.0, vocabulary, 0
        for first in range(0, count, TILES):
            at, x = _listed_tiles(row, listed, first, count, vocabulary, TILE, TILES)
            weights = _weights(x, divisor, least, high)
            sums = tl.sum(weights, axis=1)
            reached = (before + tl.cumsum(sums, axis=0) - sums)[:, None] + tl.cumsum(weights, axis=1)
            found = tl.minimum(found, tl.min(tl.where((reached > target) & (weights > 0.0), at, vocabulary)))
            last = tl.maximum(last, tl.max(tl.where(weights > 0.0, at, 0)))
            before += tl.sum(sums, axis=0)
        # Rounding may leave nothing above the target.
        tl.store(tokens + number, tl.where(found < vocabulary, found, last).to(tl.int64))
    else:
        peaks = tl.exp(tl.div_rn(_number_at(tile_order), divisor) - high)
        mass = tl.load(masses + number * num_tiles + tiles, mask=is_tile, other=0.0)
        mass = tl.where(is_tile, mass * peaks, 0.0)
        reached = tl.cumsum(mass, axis=0)
        target = tl.load(uniform + number) * tl.max(reached, axis=0)
        tile = tl.min(tl.where((reached > target) & (mass > 0.0), tiles, ALL_TILES), axis=0)
        tile = tl.where(tile < ALL_TILES, tile, tl.max(tl.where(mass > 0.0, tiles, 0), axis=0))
        before = tl.max(tl.where(tiles < tile, reached, 0.0), axis=0)
        at = tile * TILE + lanes
        x = tl.load(row + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        weights = tl.exp(tl.div_rn(x, divisor) - high)
        drawn = (before + tl.cumsum(weights, axis=0) > target) & (weights > 0.0)
        token = tl.min(tl.where(drawn, at, vocabulary), axis=0)
        last = tl.max(tl.where(weights > 0.0, at, 0), axis=0)
        tl.store(tokens + number, tl.where(token < vocabulary, token, last).to(tl.int64))


# Random numbers.


@triton.jit(do_not_specialize=["count"])
def _philox(seeds, positions, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + at, mask=at < count, other=0)
    position = tl.load(positions + at, mask=at < count, other=0)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    c2, c3 = tl.zeros([BLOCK], tl.uint32), tl.zeros([BLOCK], tl.uint32)
    a, b = tl.full([BLOCK], 0xD2511F53, tl.uint32), tl.full([BLOCK], 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0, high1 = tl.umulhi(a, c0), tl.umulhi(b, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, b * c2, high0 ^ c3 ^ k1, a * c0
        k0 += tl.full([BLOCK], 0x9E3779B9, tl.uint32)
        k1 += tl.full([BLOCK], 0xBB67AE85, tl.uint32)
    tl.store(out + at, (c0 >> 8).to(tl.int32).to(tl.float32) * 0.000000059604644775390625, mask=at < count)
