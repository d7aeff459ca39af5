"""Keys and values in NVFP4, the layout "plain_group_scaled": how Triton reads a tile of them, and writes rows.

Elements are e2m1, two a byte, the first in the low bits; 16 neighbours share a scale of e4m3. Scales of a page stand
behind its codes. The product of an element and its group's scale has six significant bits, so that float16 and bfloat16
hold it exactly. No 8-bit float of the device is needed: bits are computed.

Axes: T tokens, K KV heads, D head size, N keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint.kernels.grouped_matmul import e2m1
from hardpoint.kernels.weight_only_numbers import byte_scale

GROUP = tl.constexpr(16)


@triton.jit
def load_groups(
    codes,
    scales,
    rows,
    scale_rows,
    there,
    dtype: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Numbers [N, D] in ``dtype`` of one KV head, whose codes are at ``codes + rows`` and scales at ``scales +
    scale_rows``; zeros where ``there`` [N] is not. ``there`` None: all are."""
    pairs = tl.arange(0, BLOCK_D // 2)[None, :]
    groups = tl.arange(0, BLOCK_D // GROUP)[None, :]
    if there is None and BLOCK_D == HEAD_SIZE:
        stored = tl.load(codes + rows[:, None] + pairs)
        factors = tl.load(scales + scale_rows[:, None] + groups)
    else:
        real_pairs = pairs < HEAD_SIZE // 2
        real_groups = groups < HEAD_SIZE // GROUP
        if there is not None:
            real_pairs = real_pairs & there[:, None]
            real_groups = real_groups & there[:, None]
        stored = tl.load(codes + rows[:, None] + pairs, mask=real_pairs, other=0)
        factors = tl.load(scales + scale_rows[:, None] + groups, mask=real_groups, other=0)
    elements = tl.join(e2m1(stored, dtype), e2m1(stored >> 4, dtype)).reshape(BLOCK_N, BLOCK_D // GROUP, GROUP)
    return (elements * tl.expand_dims(byte_scale(factors, False).to(dtype), 2)).reshape(BLOCK_N, BLOCK_D)


@triton.jit
def _rounded(x):
    """``x`` up to 2**22 to the nearest whole number, ties to even: sums of 1.5 * 2**23 are whole numbers."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _e4m3_code(x):
    """The code, int32, of float32 ``x`` >= 0 in e4m3, saturated at 448, ties to even; NaN becomes NaN."""
    limited = tl.minimum(x, 448.0)
    bits = limited.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = _rounded(limited * 512.0).to(tl.int32)
    code = tl.where(limited < 0.015625, subnormal, normal)  # 2**-6 is the least normal number
    return tl.where(x != x, 0x7F, code)


@triton.jit
def _e2m1_code(x):
    """The code, int32, of float32 ``x`` in e2m1, saturated at 6, ties to even codes; a NaN counts as 6.

    Codes are 0.5 apart up to 2, 1 up to 4, then 2: the least of three lines, each rounded to even codes.
    """
    most = tl.where(x != x, 6.0, tl.minimum(tl.abs(x), 6.0))
    code = tl.minimum(_rounded(most * 2), tl.minimum(_rounded(most) + 2, _rounded(most * 0.5) + 4))
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return code.to(tl.int32) | sign


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slot_mapping"])
def store_groups(
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
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Grid: blocks of ``ROWS`` of the T x K rows, keys and values.

    ``k_scales`` and ``v_scales`` [1] divide all keys and all values first, or are None. Rounds as
    ``write_group_rounded`` of the plugin API does, to the bit.
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
    source = k + token * k_token_stride + head * k_head_stride
    target = k_cache
    if tl.program_id(1) == 1:
        source = v + token * v_token_stride + head * v_head_stride
        target = v_cache
    x = tl.load(source[:, None] + columns, mask=there[:, None] & (columns < HEAD_SIZE), other=0.0).to(tl.float32)
    if k_scales is not None:
        outer = tl.load(k_scales)
        if tl.program_id(1) == 1:
            outer = tl.load(v_scales)
        x = tl.div_rn(x, tl.zeros([ROWS, BLOCK_D], tl.float32) + outer)
    x = x.reshape(ROWS, BLOCK_D // GROUP, GROUP)
    highest = tl.max(tl.abs(x), 2)  # which passes over NaN
    highest = tl.where(tl.sum((x != x).to(tl.int32), 2) > 0, float("nan"), highest)
    scale_codes = _e4m3_code(tl.div_rn(highest, tl.full([ROWS, BLOCK_D // GROUP], 6.0, tl.float32)))
    scale_codes = tl.where(scale_codes == 0, 0x38, scale_codes)  # 1
    scale = tl.expand_dims(byte_scale(scale_codes, False), 2)
    codes = _e2m1_code(tl.div_rn(x, tl.broadcast_to(scale, x.shape)))
    first, second = tl.split(codes.reshape(ROWS, BLOCK_D // 2, 2))
    pairs = tl.arange(0, BLOCK_D // 2)[None, :]
    groups = tl.arange(0, BLOCK_D // GROUP)[None, :]
    at = page * page_stride + in_page * (HEAD_SIZE // 2)
    tl.store(
        target + at[:, None] + pairs,
        (first | (second << 4)).to(tl.uint8),
        mask=there[:, None] & (pairs < HEAD_SIZE // 2),
    )
    at = page * page_stride + BLOCK_SIZE * NUM_KV_HEADS * (HEAD_SIZE // 2) + in_page * (HEAD_SIZE // GROUP)
    tl.store(
        target + at[:, None] + groups,
        scale_codes.to(tl.uint8),
        mask=there[:, None] & (groups < HEAD_SIZE // GROUP),
    )
