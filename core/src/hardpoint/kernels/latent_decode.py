"""Paged latent attention of requests with one query each, long contexts cut into splits.

The grid and the splits are those of attention_decode.py: one program takes one split of one request, for a block of
heads, which all read the same rows of the cache. Splits are merged by the program that comes last.

Axes: N requests, H query heads, L latent size, R rope size, M query heads of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint.kernels.attention_decode import merge
from hardpoint.kernels.attention_places import find_split
from hardpoint.kernels.attention_tile import pages_of_tile
from hardpoint.kernels.latent_tile import attend_latent, load_rows


@triton.jit(
    do_not_specialize=["num_requests", "block_table_stride"],
    do_not_specialize_on_alignment=["block_table", "seq_lens"],  # which may be parts of a batch's
)
def decode_latent_attention(
    q_latent,
    q_latent_token_stride,
    q_latent_head_stride,
    q_rope,
    q_rope_token_stride,
    q_rope_head_stride,
    out,
    out_token_stride,
    out_head_stride,
    latents,
    rope_keys,
    latent_page_stride,
    rope_page_stride,
    scales,
    scale_page_stride,
    block_table,
    block_table_stride,
    seq_lens,
    num_requests,
    partial,
    counters,
    score_factor,
    NUM_HEADS: tl.constexpr,
    LATENT_SIZE: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    AMPLITUDE: tl.constexpr,
    SPLITS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_MERGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Grid: (N + ``SPLITS``) x blocks of heads.

    ``partial`` float32 [SPLITS, H, L] and then [SPLITS, H, 2]: each split's sum of latents, its highest score and sum
    of weights. ``counters`` int32 [SPLITS, blocks of heads], zero before and after.

    Lengths and the block table, which the step began with, are read while the kernel before this one may still run.
    """
    MERGED: tl.constexpr = min(BLOCK_L, 128)
    BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_MERGE - 1) // BLOCK_MERGE
    head_block = tl.program_id(0) % BLOCKS
    request, begin, end, splits, place, first_place = find_split(
        tl.program_id(0) // BLOCKS,
        seq_lens,
        num_requests,
        None,
        None,
        SPLITS,
        MOST_SPLITS,
        MIN_CHUNK,
        SCAN,
        BLOCK_N,
    )
    if begin >= end:
        return
    block_row = block_table + request.to(tl.int64) * block_table_stride
    first_pages = pages_of_tile(block_row, begin, end, BLOCK_SIZE, BLOCK_N)

    if BEGIN is not None:
        BEGIN()
    in_block = tl.arange(0, BLOCK_M)
    heads = head_block * BLOCK_MERGE + in_block
    real = (in_block < BLOCK_MERGE) & (heads < NUM_HEADS)
    token = in_block * 0 + request.to(tl.int64)
    latent_queries = load_rows(
        q_latent, q_latent_token_stride, q_latent_head_stride, token, heads, real, LATENT_SIZE, BLOCK_L
    )
    rope_queries = load_rows(q_rope, q_rope_token_stride, q_rope_head_stride, token, heads, real, ROPE_SIZE, BLOCK_R)
    if WIDE:
        latent_queries = latent_queries.to(tl.float32)
        rope_queries = rope_queries.to(tl.float32)
    # Tiles that end before the split does need no mask.
    middle = begin + (end - begin) // BLOCK_N * BLOCK_N
    accumulated, total, highest = attend_latent(
        tl.zeros([BLOCK_M, BLOCK_L], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        latent_queries,
        rope_queries,
        in_block,
        begin,
        middle,
        latents,
        rope_keys,
        latent_page_stride,
        rope_page_stride,
        scales,
        scale_page_stride,
        block_row,
        first_pages,
        score_factor,
        LATENT_SIZE,
        ROPE_SIZE,
        BLOCK_SIZE,
        AMPLITUDE,
        "none",
        BLOCK_N,
        BLOCK_L,
        BLOCK_R,
        STAGES,
    )
    accumulated, total, highest = attend_latent(
        accumulated,
        total,
        highest,
        latent_queries,
        rope_queries,
        in_block,
        middle,
        end,
        latents,
        rope_keys,
        latent_page_stride,
        rope_page_stride,
        scales,
        scale_page_stride,
        block_row,
        pages_of_tile(block_row, middle, end, BLOCK_SIZE, BLOCK_N),
        score_factor,
        LATENT_SIZE,
        ROPE_SIZE,
        BLOCK_SIZE,
        AMPLITUDE,
        "end",
        BLOCK_N,
        BLOCK_L,
        BLOCK_R,
        1,
    )
    accumulated *= 1.0 / AMPLITUDE
    columns = tl.arange(0, BLOCK_L)
    whole = real[:, None] & (columns[None, :] < LATENT_SIZE)
    out += request.to(tl.int64) * out_token_stride
    if splits == 0:
        result = (accumulated / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + heads[:, None].to(tl.int64) * out_head_stride + columns[None, :], result, mask=whole)
        return

    sums = partial + SPLITS * NUM_HEADS * LATENT_SIZE
    row = place * NUM_HEADS + heads
    tl.store(partial + row[:, None] * LATENT_SIZE + columns[None, :], accumulated, mask=whole)
    tl.store(sums + row * 2, highest, mask=real)
    tl.store(sums + row * 2 + 1, total, mask=real)
    tl.debug_barrier()  # all threads' stores come before the one thread's atomic operation, which publishes them
    counter = counters + first_place * BLOCKS + head_block
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
        tl.store(counter, 0)
        for first_column in range(0, LATENT_SIZE, MERGED):  # several splits are in registers at once
            merge(
                out,
                out_head_stride,
                partial,
                sums,
                None,
                first_place,
                splits,
                0,
                head_block * BLOCK_MERGE,
                first_column,
                NUM_HEADS,
                NUM_HEADS,
                LATENT_SIZE,
                MOST_SPLITS,
                BLOCK_MERGE,
                MERGED,
            )
