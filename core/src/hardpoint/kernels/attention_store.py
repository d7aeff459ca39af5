"""Writing keys and values to pages of the layouts "plain" and "plain_scaled".

Axes: T tokens, K KV heads, D head size.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slot_mapping"])
def store_keys_and_values(
    k,
    k_token_stride,
    k_head_stride,
    v,
    v_token_stride,
    v_head_stride,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    page_stride,
    scale_page_stride,
    slot_mapping,
    num_rows,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALES: tl.constexpr,
    LOWEST: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Grid: blocks of ``ROWS`` of the T x K rows, keys and values. ``SCALES``: "none", "static" or "token".

    ``LOWEST`` and ``LARGEST`` are the ends of the range of an 8-bit element.
    """
    if BEGIN is not None:
        BEGIN()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    token = row // NUM_KV_HEADS
    head = row % NUM_KV_HEADS
    slot = tl.load(slot_mapping + token, mask=there, other=0)
    page = (slot // BLOCK_SIZE).to(tl.int64)
    in_page = slot % BLOCK_SIZE * NUM_KV_HEADS + head
    columns = tl.arange(0, BLOCK_D)[None, :]
    mask = there[:, None] & (columns < HEAD_SIZE)
    source = k + token * k_token_stride + head * k_head_stride
    target, scales = k_cache, k_scales
    if tl.program_id(1) == 1:
        source = v + token * v_token_stride + head * v_head_stride
        target, scales = v_cache, v_scales
    x = tl.load(source[:, None] + columns, mask=mask, other=0.0)
    if SCALES != "none":
        x = x.to(tl.float32)
        if SCALES == "static":
            scale = tl.zeros([ROWS], tl.float32) + tl.load(scales)
        else:
            highest = tl.max(tl.abs(x), 1)  # which passes over NaN
            highest = tl.where(tl.sum((x != x).to(tl.int32), 1) > 0, float("nan"), highest)
            scale = tl.div_rn(highest, tl.full([ROWS], LARGEST, tl.float32))
            scale = tl.where(scale == 0, 1.0, scale)
            tl.store(scales + page * scale_page_stride + in_page, scale, mask=there)
        x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        x = tl.clamp(x, LOWEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        if target.dtype.element_ty == tl.int8:
            x = (x + 12582912.0) - 12582912.0  # 1.5 * 2**23: sums of it are whole numbers, rounded ties to even
    at = (page * page_stride + in_page * HEAD_SIZE)[:, None] + columns
    tl.store(target + at, x.to(target.dtype.element_ty), mask=mask)
