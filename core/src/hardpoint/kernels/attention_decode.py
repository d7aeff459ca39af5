"""Paged attention of requests with one query each, long contexts cut into splits.

One program takes one split of one request, for query heads that share a KV head. How a batch is cut, each program finds
in the sequence lengths, so the grid follows from the number of requests alone: contexts are cut so that all of
them together make about ``SPLITS`` splits for each block of heads, none shorter than ``MIN_CHUNK`` tokens, and requests
shorter than two of those stay whole. The first N places of the grid are for a whole request each, and the ``SPLITS``
places behind them for splits, whatever requests they belong to. Places that nothing falls to leave at once; where there
are many, they are the last ones, which hold nobody up.

Splits are merged by the program that comes last, which it sees from a counter that it sets back to zero: no second
kernel is launched.

Axes: N requests, H query heads, K KV heads, D head size, M query heads of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint.kernels.attention_places import find_split
from hardpoint.kernels.attention_tile import LOG2_E, attend, pages_of_tile


@triton.jit(
    do_not_specialize=["num_requests", "block_table_stride"],
    do_not_specialize_on_alignment=["block_table", "seq_lens"],  # which may be parts of a batch's
)
def decode_attention(
    q,
    q_token_stride,
    q_head_stride,
    out,
    out_token_stride,
    out_head_stride,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    page_stride,
    scale_page_stride,
    block_table,
    block_table_stride,
    seq_lens,
    num_requests,
    sinks,
    slopes,
    partial,
    counters,
    score_factor,
    cap_factor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALES: tl.constexpr,
    AMPLITUDE: tl.constexpr,
    WIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_MERGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Grid: (N + ``SPLITS``) x blocks of heads. ``SCALES``: "none", "static", "token", or "group", where ``k_scales``
    and ``v_scales`` are as for "static", or None.

    ``partial`` float32 [SPLITS, H, D] and then [SPLITS, H, 2]: each split's sum of values, its highest score and sum of
    weights. ``counters`` int32 [SPLITS, blocks of heads], zero before and after.

    Lengths and the block table, which the step began with, are read while the kernel before this one may still run.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCKS: tl.constexpr = (GROUP + BLOCK_MERGE - 1) // BLOCK_MERGE  # of heads that share a KV head
    head_block = tl.program_id(0) % (NUM_KV_HEADS * BLOCKS)
    place = tl.program_id(0) // (NUM_KV_HEADS * BLOCKS)

    request, begin, end, splits, place, first_place = find_split(
        place, seq_lens, num_requests, WINDOW, CHUNK, SPLITS, MOST_SPLITS, MIN_CHUNK, SCAN, BLOCK_N
    )
    if begin >= end:
        return
    seq_len = tl.load(seq_lens + request)
    block_row = block_table + request.to(tl.int64) * block_table_stride
    first_pages = pages_of_tile(block_row, begin, end, BLOCK_SIZE, BLOCK_N)

    if BEGIN is not None:
        BEGIN()
    kv_head = head_block // BLOCKS
    in_block = tl.arange(0, BLOCK_M)
    in_group = head_block % BLOCKS * BLOCK_MERGE + in_block
    real = (in_block < BLOCK_MERGE) & (in_group < GROUP)
    heads = kv_head * GROUP + in_group
    columns = tl.arange(0, BLOCK_D)
    whole = real[:, None] & (columns[None, :] < HEAD_SIZE)
    queries = tl.load(
        q + request.to(tl.int64) * q_token_stride + heads[:, None] * q_head_stride + columns[None, :],
        mask=whole,
        other=0.0,
    )
    if WIDE:
        queries = queries.to(tl.float32)
    row_slopes = tl.zeros([BLOCK_M], tl.float32)
    if slopes is not None:
        row_slopes = tl.load(slopes + heads, mask=real, other=0.0) * LOG2_E
    if SCALES != "token" and k_scales is not None:
        score_factor *= tl.load(k_scales)
    ROW: tl.constexpr = HEAD_SIZE // 2 if SCALES == "group" else HEAD_SIZE  # of a token and head
    SCALE_ROW: tl.constexpr = HEAD_SIZE // 16 if SCALES == "group" else 1
    k_scales_of_head = None
    v_scales_of_head = None
    if SCALES == "token":
        k_scales_of_head = k_scales + kv_head
        v_scales_of_head = v_scales + kv_head
    if SCALES == "group":  # behind a page's codes
        k_scales_of_head = k_cache + (BLOCK_SIZE * NUM_KV_HEADS * ROW + kv_head * SCALE_ROW)
        v_scales_of_head = v_cache + (BLOCK_SIZE * NUM_KV_HEADS * ROW + kv_head * SCALE_ROW)

    accumulated, total, highest = attend(
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        queries,
        tl.zeros([BLOCK_M], tl.int32) + (seq_len - 1),
        row_slopes,
        begin,
        end,
        k_cache + kv_head * ROW,
        v_cache + kv_head * ROW,
        k_scales_of_head,
        v_scales_of_head,
        page_stride,
        scale_page_stride,
        block_row,
        first_pages,
        score_factor,
        cap_factor,
        HEAD_SIZE,
        BLOCK_SIZE,
        NUM_KV_HEADS * ROW,
        NUM_KV_HEADS * SCALE_ROW,
        AMPLITUDE,
        WINDOW,
        CHUNK,
        CAPPED,
        SCALES,
        slopes is not None,
        "end",
        BLOCK_N,
        BLOCK_D,
        STAGES,
    )
    value_factor = 1.0
    if SCALES != "token" and v_scales is not None:
        value_factor = tl.load(v_scales)
    if SCALES == "token":
        value_factor = 1.0 / AMPLITUDE
    out += request.to(tl.int64) * out_token_stride
    if splits == 0:
        if sinks is not None:
            accumulated, total = _with_sink(accumulated, total, highest, sinks + heads, real)
        result = accumulated * (value_factor / total)[:, None]
        tl.store(
            out + heads[:, None].to(tl.int64) * out_head_stride + columns[None, :],
            result.to(out.dtype.element_ty),
            mask=whole,
        )
        return

    sums = partial + SPLITS * NUM_HEADS * HEAD_SIZE
    row = place * NUM_HEADS + heads
    tl.store(partial + row[:, None] * HEAD_SIZE + columns[None, :], accumulated * value_factor, mask=whole)
    tl.store(sums + row * 2, highest, mask=real)
    tl.store(sums + row * 2 + 1, total, mask=real)
    tl.debug_barrier()  # all threads' stores come before the one thread's atomic operation, which publishes them
    counter = counters + first_place * (NUM_KV_HEADS * BLOCKS) + head_block
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
        tl.store(counter, 0)
        merge(
            out,
            out_head_stride,
            partial,
            sums,
            sinks,
            first_place,
            splits,
            kv_head * GROUP,
            head_block % BLOCKS * BLOCK_MERGE,
            0,
            NUM_HEADS,
            GROUP,
            HEAD_SIZE,
            MOST_SPLITS,
            BLOCK_MERGE,
            BLOCK_D,
        )


@triton.jit
def merge(
    out,
    out_head_stride,
    partial,
    sums,
    sinks,
    first_place,
    splits,
    first_head,
    first_in_group,
    first_column,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    BLOCK_MERGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge one request's splits, from ``first_place`` on, in ``BLOCK_D`` columns from ``first_column`` on.

    Loads pass by the first cache: others wrote what is read.
    """
    in_group = first_in_group + tl.arange(0, BLOCK_MERGE)
    real = in_group < GROUP
    heads = first_head + in_group
    columns = first_column + tl.arange(0, BLOCK_D)
    whole = real[:, None] & (columns[None, :] < HEAD_SIZE)
    numbers = tl.arange(0, MOST_SPLITS)
    rows = (first_place + numbers[:, None]) * NUM_HEADS + heads[None, :]
    there = (numbers[:, None] < splits) & real[None, :]
    each_highest = tl.load(sums + rows * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
    each_total = tl.load(sums + rows * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    highest = tl.where(real, tl.max(each_highest, 0), 0.0)
    total = tl.sum(each_total * tl.exp2(each_highest - highest[None, :]), 0)
    merged = tl.zeros([BLOCK_MERGE, BLOCK_D], tl.float32)
    for start in range(0, splits, 4):
        for i in tl.static_range(4):  # loads that do not wait for each other
            row = (first_place + start + i) * NUM_HEADS + heads
            here = real & (start + i < splits)
            one_highest = tl.load(sums + row * 2, mask=here, other=float("-inf"), cache_modifier=".cg")
            at = partial + row[:, None] * HEAD_SIZE + columns[None, :]
            one = tl.load(at, mask=here[:, None] & whole, other=0.0, cache_modifier=".cg")
            merged += one * tl.exp2(one_highest - highest)[:, None]
    if sinks is not None:
        merged, total = _with_sink(merged, total, highest, sinks + heads, real)
    result = (merged / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + heads[:, None].to(tl.int64) * out_head_stride + columns[None, :], result, mask=whole)


@triton.jit
def _with_sink(accumulated, total, highest, sinks, real):
    """Let each head's sink join the denominator; rescaled where the sink is above every score."""
    sink = tl.load(sinks, mask=real, other=0.0) * LOG2_E
    new_highest = tl.maximum(highest, sink)
    decay = tl.exp2(highest - new_highest)
    return accumulated * decay[:, None], total * decay + tl.exp2(sink - new_highest)
