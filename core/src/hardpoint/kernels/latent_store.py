"""Writing latents and rotated keys to pages of the layout "plain", or latents of 8 bits and their scales.

Axes: T tokens, L latent size, R rope size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint.kernels.quantize import magnitude, round_block, rounding_scale


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slot_mapping"])
def store_latents(
    latent,
    latent_stride,
    rope_key,
    rope_stride,
    latents,
    rope_keys,
    latent_page_stride,
    rope_page_stride,
    scales,
    scale_page_stride,
    slot_mapping,
    num_tokens,
    LATENT_SIZE: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Grid: blocks of ``ROWS`` of the T tokens. ``LARGEST`` element of 8 bits; 0: latents are stored as they are."""
    if BEGIN is not None:
        BEGIN()
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = token < num_tokens
    slot = tl.load(slot_mapping + token, mask=there, other=0)
    page = (slot // BLOCK_SIZE).to(tl.int64)
    offset = slot % BLOCK_SIZE
    columns = tl.arange(0, BLOCK_L)[None, :]
    mask = there[:, None] & (columns < LATENT_SIZE)
    x = tl.load(latent + (token * latent_stride)[:, None] + columns, mask=mask, other=0.0)
    at = (page * latent_page_stride + offset * LATENT_SIZE)[:, None] + columns
    if LARGEST == 0:
        tl.store(latents + at, x.to(latents.dtype.element_ty), mask=mask)
    else:
        scale = rounding_scale(magnitude(x.to(tl.float32)), LARGEST)
        tl.store(latents + at, round_block(x, scale, LARGEST, latents.dtype.element_ty), mask=mask)
        tl.store(scales + (page * scale_page_stride + offset)[:, None], scale, mask=there[:, None])
    columns = tl.arange(0, BLOCK_R)[None, :]
    mask = there[:, None] & (columns < ROPE_SIZE)
    x = tl.load(rope_key + (token * rope_stride)[:, None] + columns, mask=mask)
    at = (page * rope_page_stride + offset * ROPE_SIZE)[:, None] + columns
    tl.store(rope_keys + at, x.to(rope_keys.dtype.element_ty), mask=mask)
