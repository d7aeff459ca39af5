"""Paged latent attention of requests with several queries: tiles of rows, each row a query of one head.

The rows of a request are its queries, and for each all heads, which read the same rows of the cache. The grid is that
of attention_prefill.py.

Axes: N requests, H query heads, L latent size, R rope size, M rows of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint.kernels.attention_places import find_tile
from hardpoint.kernels.attention_tile import pages_of_tile
from hardpoint.kernels.latent_tile import attend_latent, load_rows


@triton.jit(
    do_not_specialize=["num_requests", "first_request", "num_tiles", "block_table_stride"],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "query_start"],  # which may be parts of a batch's
)
def prefill_latent_attention(
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
    first_request,
    num_requests,
    num_tiles,
    score_factor,
    NUM_HEADS: tl.constexpr,
    LATENT_SIZE: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    AMPLITUDE: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Grid: tiles. Requests are those from ``first_request`` on."""
    if BEGIN is not None:
        BEGIN()
    # The last tiles take longest and so come first.
    place = num_tiles - 1 - tl.program_id(0)
    request, tile = find_tile(place, query_start, first_request, num_requests, NUM_HEADS, SCAN, BLOCK_M)
    if request < 0:
        return

    first_query = tl.load(query_start + request)
    num_queries = tl.load(query_start + request + 1) - first_query
    seq_len = tl.load(seq_lens + request)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < num_queries * NUM_HEADS
    heads = row % NUM_HEADS
    tokens = (first_query + row // NUM_HEADS).to(tl.int64)
    latent_queries = load_rows(
        q_latent, q_latent_token_stride, q_latent_head_stride, tokens, heads, real, LATENT_SIZE, BLOCK_L
    )
    rope_queries = load_rows(q_rope, q_rope_token_stride, q_rope_head_stride, tokens, heads, real, ROPE_SIZE, BLOCK_R)
    if WIDE:
        latent_queries = latent_queries.to(tl.float32)
        rope_queries = rope_queries.to(tl.float32)
    num_old = seq_len - num_queries
    queries_at = num_old + row // NUM_HEADS
    oldest = num_old + tile * BLOCK_M // NUM_HEADS
    newest = num_old + tl.minimum(((tile + 1) * BLOCK_M - 1) // NUM_HEADS, num_queries - 1)
    block_row = block_table + request.to(tl.int64) * block_table_stride
    # Positions before the tile's oldest query are read by all of it, so whole tiles of them need no mask.
    middle = (oldest + 1) // BLOCK_N * BLOCK_N
    accumulated, total, highest = attend_latent(
        tl.zeros([BLOCK_M, BLOCK_L], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        latent_queries,
        rope_queries,
        queries_at,
        0,
        middle,
        latents,
        rope_keys,
        latent_page_stride,
        rope_page_stride,
        scales,
        scale_page_stride,
        block_row,
        pages_of_tile(block_row, 0, middle, BLOCK_SIZE, BLOCK_N),
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
        queries_at,
        middle,
        newest + 1,
        latents,
        rope_keys,
        latent_page_stride,
        rope_page_stride,
        scales,
        scale_page_stride,
        block_row,
        pages_of_tile(block_row, middle, newest + 1, BLOCK_SIZE, BLOCK_N),
        score_factor,
        LATENT_SIZE,
        ROPE_SIZE,
        BLOCK_SIZE,
        AMPLITUDE,
        "causal",
        BLOCK_N,
        BLOCK_L,
        BLOCK_R,
        STAGES,
    )
    accumulated *= 1.0 / AMPLITUDE
    columns = tl.arange(0, BLOCK_L)
    tl.store(
        out + tokens[:, None] * out_token_stride + heads[:, None].to(tl.int64) * out_head_stride + columns[None, :],
        (accumulated / total[:, None]).to(out.dtype.element_ty),
        mask=real[:, None] & (columns[None, :] < LATENT_SIZE),
    )
