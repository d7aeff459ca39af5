"""Paged latent attention of queries one by one: over the positions of a list, as in sparse attention, or over all.

A program takes one query, for a block of heads: all heads of a query have one list. Lists are not split, so a step of
few queries leaves a large device with little to do.

Axes: T tokens, H query heads, L latent size, R rope size, K positions of a list, M query heads of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint.kernels.latent_tile import load_rows
from hardpoint.kernels.sparse_index import request_of


@triton.jit(
    do_not_specialize=["num_requests", "block_table_stride"],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "query_start"],  # which may be parts of a batch's
)
def attend_listed_latents(
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
    query_start,
    num_requests,
    indices,
    index_stride,
    score_factor,
    NUM_HEADS: tl.constexpr,
    LATENT_SIZE: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    AMPLITUDE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_MERGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Grid: T x blocks of ``BLOCK_MERGE`` heads. TOP_K None: there are no lists."""
    if BEGIN is not None:
        BEGIN()
    BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_MERGE - 1) // BLOCK_MERGE
    query = tl.program_id(0) // BLOCKS
    request = request_of(query, query_start, num_requests)
    position = tl.load(seq_lens + request) - tl.load(query_start + request + 1) + query
    count = position + 1
    if TOP_K is not None:
        count = tl.minimum(count, TOP_K)
    block_row = block_table + request.to(tl.int64) * block_table_stride
    in_block = tl.arange(0, BLOCK_M)
    heads = tl.program_id(0) % BLOCKS * BLOCK_MERGE + in_block
    real = (in_block < BLOCK_MERGE) & (heads < NUM_HEADS)
    token = in_block * 0 + query.to(tl.int64)
    latent_queries = load_rows(
        q_latent, q_latent_token_stride, q_latent_head_stride, token, heads, real, LATENT_SIZE, BLOCK_L
    )
    rope_queries = load_rows(q_rope, q_rope_token_stride, q_rope_head_stride, token, heads, real, ROPE_SIZE, BLOCK_R)
    if WIDE:
        latent_queries = latent_queries.to(tl.float32)
        rope_queries = rope_queries.to(tl.float32)
    latent_columns = tl.arange(0, BLOCK_L)
    rope_columns = tl.arange(0, BLOCK_R)
    in_tile = tl.arange(0, BLOCK_N)
    accumulated = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for start in tl.range(0, count, BLOCK_N, num_stages=STAGES):
        if TOP_K is None:
            keys_at = tl.where(start + in_tile < count, start + in_tile, -1)
        else:
            listed = indices + query.to(tl.int64) * index_stride + start + in_tile
            keys_at = tl.load(listed, mask=start + in_tile < count, other=-1)
        inside = keys_at >= 0
        page = tl.load(block_row + keys_at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = tl.where(inside, keys_at % BLOCK_SIZE, 0)
        latent_at = (page * latent_page_stride + offset * LATENT_SIZE)[:, None] + latent_columns[None, :]
        rope_at = (page * rope_page_stride + offset * ROPE_SIZE)[:, None] + rope_columns[None, :]
        there = inside[:, None] & (latent_columns[None, :] < LATENT_SIZE)
        latent = tl.load(latents + latent_at, mask=there, other=0.0).to(latent_queries.dtype)
        there = inside[:, None] & (rope_columns[None, :] < ROPE_SIZE)
        rope_key = tl.load(rope_keys + rope_at, mask=there, other=0.0).to(rope_queries.dtype)
        scores = tl.dot(rope_queries, tl.trans(rope_key), input_precision="ieee")
        if scales is None:
            scores = tl.dot(latent_queries, tl.trans(latent), scores, input_precision="ieee")
        else:
            scale = tl.load(scales + page * scale_page_stride + offset, mask=inside, other=0.0)
            scores += tl.dot(latent_queries, tl.trans(latent), input_precision="ieee") * scale[None, :]
        scores = tl.where(inside[None, :], scores * score_factor, float("-inf"))
        # The first position of a list is always there, so a row has a highest score from the first tile on.
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        decay = tl.exp2(highest - new_highest)
        total = total * decay + tl.sum(weights, 1)
        if scales is not None:
            weights *= (scale * AMPLITUDE)[None, :]
        accumulated = tl.dot(weights.to(latent.dtype), latent, accumulated * decay[:, None], input_precision="ieee")
        highest = new_highest
    out += token[:, None] * out_token_stride + heads[:, None].to(tl.int64) * out_head_stride
    tl.store(
        out + latent_columns[None, :],
        (accumulated * (1.0 / AMPLITUDE) / total[:, None]).to(out.dtype.element_ty),
        mask=real[:, None] & (latent_columns[None, :] < LATENT_SIZE),
    )
