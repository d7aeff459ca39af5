"""Splits of long contexts for the kernel of latent_hopper.py: which one a program takes, and merging their results.

The grid is that of core's attention_decode.py. Gluon's tensors have layouts, so that core's functions are not callable
here; scalars follow the same rules.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def exp2(x):
    """2 to the power of each element; results below 2^-126 are zero, which saves three instructions of four."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _split_length(count, splits, POSITIONS: gl.constexpr):
    return gl.cdiv(gl.cdiv(count, splits), POSITIONS) * POSITIONS


@gluon.jit
def _num_splits(count, chunk, MOST_SPLITS: gl.constexpr, POSITIONS: gl.constexpr):
    splits = gl.minimum(count // chunk, MOST_SPLITS)
    length = _split_length(count, gl.maximum(splits, 1), POSITIONS)
    return gl.where(splits > 1, gl.cdiv(count, gl.maximum(length, 1)), 0)


@gluon.jit
def find_split(
    place,
    seq_lens,
    num_requests,
    SPLITS: gl.constexpr,
    MOST_SPLITS: gl.constexpr,
    MIN_CHUNK: gl.constexpr,
    SCAN: gl.constexpr,
    POSITIONS: gl.constexpr,
):
    """See ``find_split`` of core's attention_places.py; no request is -1 here, but an empty range says the same."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tokens = 0
    for start in range(0, num_requests, SCAN):
        numbers = start + gl.arange(0, SCAN, LINE)
        lengths = gl.load(seq_lens + numbers, mask=numbers < num_requests, other=0)
        tokens += gl.sum(lengths, 0)
    chunk = gl.maximum(MIN_CHUNK, gl.cdiv(tokens, SPLITS))

    is_split = place >= num_requests
    request = place
    first_place = place * 0
    if is_split:
        place -= num_requests
        request = place * 0 - 1
        taken = place * 0
        for start in range(0, num_requests, SCAN):
            numbers = start + gl.arange(0, SCAN, LINE)
            lengths = gl.load(seq_lens + numbers, mask=numbers < num_requests, other=0)
            counts = _num_splits(lengths, chunk, MOST_SPLITS, POSITIONS)
            ends = taken + gl.associative_scan(counts, 0, _add)
            here = (place < ends) & (place >= ends - counts)
            request = gl.maximum(request, gl.max(gl.where(here, numbers, -1), 0))
            first_place = gl.maximum(first_place, gl.max(gl.where(here, ends - counts, 0), 0))
            taken += gl.sum(counts, 0)

    count = gl.load(seq_lens + request, mask=request >= 0, other=0)
    splits = _num_splits(count, chunk, MOST_SPLITS, POSITIONS)
    begin = count * 0
    end = count
    if is_split:
        length = _split_length(count, gl.maximum(splits, 1), POSITIONS)
        begin = (place - first_place) * length
        end = gl.minimum(begin + length, count)
    elif splits > 0:
        end = begin
    return request, begin, end, splits, place, first_place


@gluon.jit
def merge_columns(
    out,
    out_head_stride,
    partial,
    sums,
    first_place,
    splits,
    head,
    first_column,
    HEADS: gl.constexpr,
    COLUMNS: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    LATENT_SIZE: gl.constexpr,
    MOST_SPLITS: gl.constexpr,
):
    """Merge one request's splits, from ``first_place`` on: COLUMNS of HEADS, from ``first_column`` and ``head`` on.

    Loads pass by the first cache: others wrote what is read.
    """
    SUMS: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    STEP: gl.constexpr = 64
    numbers = gl.arange(0, MOST_SPLITS, gl.SliceLayout(1, SUMS))
    across = head + gl.arange(0, HEADS, gl.SliceLayout(0, SUMS))
    rows = (first_place + numbers[:, None]) * NUM_HEADS + across[None, :]
    there = (numbers[:, None] < splits) & (across[None, :] < NUM_HEADS)
    each_highest = gl.load(sums + rows * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
    each_total = gl.load(sums + rows * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    highest = gl.max(each_highest, 0)
    total = gl.sum(each_total * exp2(each_highest - highest[None, :]), 0)
    highest = gl.convert_layout(highest, gl.SliceLayout(1, TILE))
    total = gl.convert_layout(total, gl.SliceLayout(1, TILE))
    heads = head + gl.arange(0, HEADS, gl.SliceLayout(1, TILE))
    for step in range(0, COLUMNS, STEP):
        columns = first_column + step + gl.arange(0, STEP, gl.SliceLayout(0, TILE))
        merged = gl.zeros([HEADS, STEP], gl.float32, TILE)
        for start in range(0, splits, 4):
            for i in gl.static_range(4):  # loads that do not wait for each other
                row = (first_place + start + i) * NUM_HEADS + heads
                here = (heads < NUM_HEADS) & (start + i < splits)
                one_highest = gl.load(sums + row * 2, mask=here, other=float("-inf"), cache_modifier=".cg")
                at = partial + row[:, None] * LATENT_SIZE + columns[None, :]
                whole = here[:, None] & (columns[None, :] < LATENT_SIZE)
                one = gl.load(at, mask=whole, other=0.0, cache_modifier=".cg")
                merged += one * exp2(one_highest - highest)[:, None]
        result = (merged / total[:, None]).to(out.dtype.element_ty)
        gl.store(out + heads[:, None].to(gl.int64) * out_head_stride + columns[None, :], result)
