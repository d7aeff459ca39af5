"""Online softmax of queries over cached latents: the part that decode and prefill kernels share.

As in attention_tile.py, but a row of the cache is key and value. Its latent and its rotated key give the scores, and
its latent is summed. So a tile of latents is loaded once.

Axes: M rows, each a query of one head; N positions of a tile; L latent size and R rope size, filled up to powers of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint.kernels.attention_tile import pages_of_tile


@triton.jit
def load_rows(source, token_stride, head_stride, tokens, heads, real, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Queries [M, BLOCK] of ``tokens`` and ``heads``, zeros where a row is not ``real`` and behind ``SIZE``."""
    columns = tl.arange(0, BLOCK)
    # Where heads are the outer axis, as products by head give them, their stride grows with the step.
    at = tokens[:, None] * token_stride + heads[:, None].to(tl.int64) * head_stride + columns[None, :]
    return tl.load(source + at, mask=real[:, None] & (columns[None, :] < SIZE), other=0.0)


@triton.jit
def attend_latent(
    accumulated,
    total,
    highest,
    q_latent,
    q_rope,
    queries_at,
    begin,
    end,
    latents,
    rope_keys,
    latent_page_stride,
    rope_page_stride,
    scales,
    scale_page_stride,
    block_row,
    first_pages,
    score_factor,
    LATENT_SIZE: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    AMPLITUDE: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Take the positions from ``begin`` to ``end`` into ``accumulated`` [M, L], ``total`` and ``highest``, both [M].

    ``scales``: of latents of 8 bits, float32, else None; ``accumulated`` is then ``AMPLITUDE`` times as large.
    ``first_pages`` are those of the first tile. Values behind ``end`` are never used: they may be NaN. ``MASK``: "none"
    (all queries read all of these positions, which fill whole tiles), "end" (all read all), "causal" (each reads those
    up to its own, ``queries_at``).
    """
    latent_columns = tl.arange(0, BLOCK_L)
    rope_columns = tl.arange(0, BLOCK_R)
    in_tile = tl.arange(0, BLOCK_N)
    next_page = first_pages
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        keys_at = start + in_tile
        inside = keys_at < end
        page = next_page.to(tl.int64)
        next_page = pages_of_tile(block_row, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        offset = keys_at % BLOCK_SIZE
        latent_at = (page * latent_page_stride + offset * LATENT_SIZE)[:, None] + latent_columns[None, :]
        rope_at = (page * rope_page_stride + offset * ROPE_SIZE)[:, None] + rope_columns[None, :]
        if MASK == "none" and BLOCK_L == LATENT_SIZE:
            latent = tl.load(latents + latent_at)
        elif BLOCK_L == LATENT_SIZE:
            latent = tl.load(latents + latent_at, mask=inside[:, None], other=0.0)
        else:
            there = inside[:, None] & (latent_columns[None, :] < LATENT_SIZE)
            latent = tl.load(latents + latent_at, mask=there, other=0.0)
        if BLOCK_R == ROPE_SIZE:
            rope_key = tl.load(rope_keys + rope_at)
        else:
            rope_key = tl.load(rope_keys + rope_at, mask=rope_columns[None, :] < ROPE_SIZE, other=0.0)
        latent = latent.to(q_latent.dtype)
        scores = tl.dot(q_rope, tl.trans(rope_key.to(q_rope.dtype)), input_precision="ieee")
        if scales is None:
            scores = tl.dot(q_latent, tl.trans(latent), scores, input_precision="ieee")
        else:  # elements are numbers of the queries' dtype as they are, and sums are scaled
            scale_at = scales + page * scale_page_stride + offset
            if MASK == "none":
                scale = tl.load(scale_at)
            else:
                scale = tl.load(scale_at, mask=inside, other=0.0)
            scores += tl.dot(q_latent, tl.trans(latent), input_precision="ieee") * scale[None, :]
        if MASK == "end":
            scores = tl.where(inside[None, :], scores, float("-inf"))
        if MASK == "causal":
            read = inside[None, :] & (keys_at[None, :] <= queries_at[:, None])
            scores = tl.where(read, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * score_factor)
        # A row that reads no position yet has no highest score: any finite number gives it weights of zero.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores * score_factor - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        if scales is not None:  # times the elements' range, or 16-bit weights lose their small scales
            weights *= (scale * AMPLITUDE)[None, :]
        accumulated = tl.dot(weights.to(latent.dtype), latent, accumulated * decay[:, None], input_precision="ieee")
        highest = new_highest
    return accumulated, total, highest
