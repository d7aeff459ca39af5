"""The part that decode and prefill attention share: queries against a run of cached keys, by online softmax.

Online softmax is that of Milakov and Gimelshein (arXiv:1805.02867), over tiles as in FlashAttention (arXiv:2205.14135).
Scores are in powers of two: ``score_factor`` holds the logits' scale times log2(e).

Axes: M rows, each a query of one head; N keys of a tile; D head size, filled up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint.kernels.attention_groups import load_groups

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def num_read(seq_len, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """How many positions the last query of a sequence reads; 0 for an empty one."""
    if WINDOW is not None:
        found = tl.minimum(seq_len, WINDOW)
    elif CHUNK is not None:
        found = tl.where(seq_len > 0, (seq_len - 1) % CHUNK + 1, 0)
    else:
        found = seq_len
    return found


@triton.jit
def first_read(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The oldest position that a query reads, as ``Span.first`` has it."""
    return position + 1 - num_read(position + 1, WINDOW, CHUNK)


@triton.jit
def pages_of_tile(block_row, begin, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where a tile's keys are: the pages, int32 [N], of positions from ``begin`` on; behind ``end`` the null page."""
    positions = begin + tl.arange(0, BLOCK_N)
    return tl.load(block_row + positions // BLOCK_SIZE, mask=positions < end, other=0)


@triton.jit
def attend(
    accumulated,
    total,
    highest,
    q,
    queries_at,
    slopes,
    begin,
    end,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    page_stride,
    scale_page_stride,
    block_row,
    first_pages,
    score_factor,
    cap_factor,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    AMPLITUDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALES: tl.constexpr,
    ALIBI: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Take keys and values from ``begin`` to ``end`` into ``accumulated`` [M, D], ``total`` and ``highest``, both [M].

    Caches and scales point to one KV head; ``first_pages`` are those of the first tile. Values behind ``end`` are never
    used: they may be NaN. ``SCALES``: "token" (a float32 for each key and value), "group" (see attention_groups.py; the
    strides of tokens are in bytes), else none are read. ``MASK``: "none" (all queries read all of these keys, which
    fill whole tiles), "end" (all read all), "span" (each reads what it may).
    """
    columns = tl.arange(0, BLOCK_D)
    in_tile = tl.arange(0, BLOCK_N)
    # Pages of a tile are loaded one tile ahead: by then addresses are at hand, and loads of keys need not wait.
    next_page = first_pages
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        keys_at = start + in_tile
        inside = keys_at < end
        page = next_page.to(tl.int64)
        next_page = pages_of_tile(block_row, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        offset = keys_at % BLOCK_SIZE
        rows = page * page_stride + offset * TOKEN_STRIDE
        scale_rows = page * scale_page_stride + offset * SCALE_STRIDE
        elements = rows[:, None] + columns[None, :]
        if SCALES == "group":
            k = load_groups(k_cache, k_scales, rows, scale_rows, None, q.dtype, HEAD_SIZE, BLOCK_N, BLOCK_D)
        elif BLOCK_D == HEAD_SIZE:
            k = tl.load(k_cache + elements)
        else:
            k = tl.load(k_cache + elements, mask=columns[None, :] < HEAD_SIZE, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        factor = score_factor
        if SCALES == "token":
            scores *= tl.load(k_scales + scale_rows)[None, :]
        if CAPPED:  # c * tanh(x): tanh(x) is 1 - 2 / (exp(2x) + 1), whatever overflows
            scores = cap_factor - 2 * cap_factor / (tl.exp2(scores * factor) + 1)
            factor = 1.0
        if ALIBI:
            scores = scores * factor + slopes[:, None] * (keys_at[None, :] - queries_at[:, None])
            factor = 1.0
        if MASK == "end":
            scores = tl.where(inside[None, :], scores, float("-inf"))
        if MASK == "span":
            read = inside[None, :] & (keys_at[None, :] <= queries_at[:, None])
            if WINDOW is not None:
                read &= queries_at[:, None] - keys_at[None, :] < WINDOW
            if CHUNK is not None:
                read &= keys_at[None, :] // CHUNK == queries_at[:, None] // CHUNK
            scores = tl.where(read, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
        # A row that reads no key yet has no highest score: any finite number gives it weights of zero.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest) if MASK == "span" else new_highest
        weights = tl.exp2(scores * factor - base[:, None])  # one multiplication and addition: scaled after the maximum
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        if SCALES == "token":  # times the elements' range, or 16-bit weights lose their small scales
            if MASK == "none":
                v_scale = tl.load(v_scales + scale_rows)
            else:
                v_scale = tl.load(v_scales + scale_rows, mask=inside, other=0.0)
            weights *= (v_scale * AMPLITUDE)[None, :]
        if SCALES == "group":
            there = None if MASK == "none" else inside
            v = load_groups(v_cache, v_scales, rows, scale_rows, there, q.dtype, HEAD_SIZE, BLOCK_N, BLOCK_D)
        elif MASK == "none" and BLOCK_D == HEAD_SIZE:
            v = tl.load(v_cache + elements)
        elif BLOCK_D == HEAD_SIZE:
            v = tl.load(v_cache + elements, mask=inside[:, None], other=0.0)
        else:
            v = tl.load(v_cache + elements, mask=inside[:, None] & (columns[None, :] < HEAD_SIZE), other=0.0)
        accumulated = tl.dot(weights.to(q.dtype), v.to(q.dtype), accumulated * decay[:, None], input_precision="ieee")
        highest = new_highest
    return accumulated, total, highest
