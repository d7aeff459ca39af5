"""Paged attention of requests with several queries: tiles of rows, each row a query of one of the heads of a KV head.

The rows of a request and a KV head are its queries, and for each its heads: so heads that share keys share their loads,
and no tile has rows to spare but a request's last. Which request a tile belongs to, its program finds in the query
starts; a grid has room for as many tiles as there can be, and those too many leave at once.

Axes: N requests, H query heads, K KV heads, G = H / K, D head size, M rows of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint.kernels.attention_places import find_tile
from hardpoint.kernels.attention_tile import LOG2_E, attend, first_read, pages_of_tile


@triton.jit(
    do_not_specialize=["num_requests", "first_request", "num_tiles", "block_table_stride"],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "query_start"],  # which may be parts of a batch's
)
def prefill_attention(
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
    query_start,
    first_request,
    num_requests,
    num_tiles,
    sinks,
    slopes,
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
    SCAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Grid: tiles x K. Requests are those from ``first_request`` on. ``SCALES`` is as in decode_attention."""
    if BEGIN is not None:
        BEGIN()
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    # Programs that run together read the same keys; of those, the last tiles take longest and so come first.
    kv_head = tl.program_id(0) // num_tiles
    place = num_tiles - 1 - tl.program_id(0) % num_tiles

    request, tile = find_tile(place, query_start, first_request, num_requests, GROUP, SCAN, BLOCK_M)
    if request < 0:
        return

    first_query = tl.load(query_start + request)
    num_queries = tl.load(query_start + request + 1) - first_query
    seq_len = tl.load(seq_lens + request)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < num_queries * GROUP
    heads = kv_head * GROUP + row % GROUP
    columns = tl.arange(0, BLOCK_D)
    whole = real[:, None] & (columns[None, :] < HEAD_SIZE)
    tokens = (first_query + row // GROUP).to(tl.int64)
    queries = tl.load(
        q + tokens[:, None] * q_token_stride + heads[:, None] * q_head_stride + columns[None, :], mask=whole, other=0.0
    )
    if WIDE:
        queries = queries.to(tl.float32)
    num_old = seq_len - num_queries
    queries_at = num_old + row // GROUP
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

    oldest = num_old + tile * BLOCK_M // GROUP
    newest = num_old + tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP, num_queries - 1)
    begin = first_read(oldest, WINDOW, CHUNK)
    end = newest + 1
    k_cache += kv_head * ROW
    v_cache += kv_head * ROW
    block_row = block_table + request.to(tl.int64) * block_table_stride
    accumulated = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if WINDOW is None and CHUNK is None:
        # Keys before the tile's oldest query are read by all of it, so whole tiles of them need no mask.
        middle = (oldest + 1) // BLOCK_N * BLOCK_N
        accumulated, total, highest = attend(
            accumulated,
            total,
            highest,
            queries,
            queries_at,
            row_slopes,
            0,
            middle,
            k_cache,
            v_cache,
            k_scales_of_head,
            v_scales_of_head,
            page_stride,
            scale_page_stride,
            block_row,
            pages_of_tile(block_row, 0, middle, BLOCK_SIZE, BLOCK_N),
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
            "none",
            BLOCK_N,
            BLOCK_D,
            STAGES,
        )
        begin = middle
    accumulated, total, highest = attend(
        accumulated,
        total,
        highest,
        queries,
        queries_at,
        row_slopes,
        begin,
        end,
        k_cache,
        v_cache,
        k_scales_of_head,
        v_scales_of_head,
        page_stride,
        scale_page_stride,
        block_row,
        pages_of_tile(block_row, begin, end, BLOCK_SIZE, BLOCK_N),
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
        "span",
        BLOCK_N,
        BLOCK_D,
        STAGES,
    )
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=real, other=0.0) * LOG2_E
        new_highest = tl.maximum(highest, sink)
        decay = tl.exp2(highest - new_highest)
        accumulated *= decay[:, None]
        total = total * decay + tl.exp2(sink - new_highest)
    value_factor = 1.0
    if SCALES != "token" and v_scales is not None:
        value_factor = tl.load(v_scales)
    if SCALES == "token":
        value_factor = 1.0 / AMPLITUDE
    result = accumulated * (value_factor / total)[:, None]
    tl.store(
        out + tokens[:, None] * out_token_stride + heads[:, None] * out_head_stride + columns[None, :],
        result.to(out.dtype.element_ty),
        mask=whole,
    )
