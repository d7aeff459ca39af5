"""The low-rank update of LoRA adapters, each token by its own: two products, by adapter within tiles of tokens.

A program has a tile of tokens and goes through the slots that any of them has. Neighbours mostly share one, as tokens
of a prompt do, so that is one product or a few. Nothing is sorted, and the host need not know which token has which.

Axes: T tokens, S slots, R rank of a slot, K elements of the input, N of the output, P parts of K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint.kernels.launch import begun

_TOKENS, _OUTPUTS, _INPUT_BYTES = 16, 64, 256
"""A tile: the fewest rows that matrix units take, rows of B, and as much of each row of A as is read at a time."""
_MOST_RANKS = 64
"""Of a slot at a time."""
_PART, _MOST_PARTS = 512, 16
"""Inputs of one program of the first product, and the most such programs of a tile: a token alone would have one."""
_WARPS = 4


def add_lora(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adapters: torch.Tensor) -> None:
    """See core's op. The middle is rounded to x's dtype; sums have an order that K and R alone decide."""
    (tokens, inputs), outputs, (slots, rank, _) = x.shape, y.shape[1], a.shape
    if not (tokens and outputs):
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    a, b, adapters = a.contiguous(), b.contiguous(), adapters.contiguous()
    num_parts = min(_MOST_PARTS, triton.cdiv(inputs, _PART))
    columns = _INPUT_BYTES // x.element_size()
    part = triton.cdiv(triton.cdiv(inputs, num_parts), columns) * columns
    ranks = min(_MOST_RANKS, max(16, triton.next_power_of_2(rank)))
    middle = torch.empty(num_parts, tokens, rank, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(tokens, _TOKENS)
    shrink_kernel[tiles, num_parts, triton.cdiv(rank, ranks)](
        x,
        a,
        adapters,
        middle,
        tokens,
        inputs,
        rank,
        slots,
        x.stride(0),
        PART=part,
        TOKENS=_TOKENS,
        INPUTS=columns,
        RANKS=ranks,
        num_warps=_WARPS,
        **begun(x),
    )
    expand_kernel[tiles, triton.cdiv(outputs, _OUTPUTS)](
        y,
        middle,
        b,
        adapters,
        tokens,
        outputs,
        rank,
        slots,
        num_parts,
        y.stride(0),
        y.stride(1),
        TOKENS=_TOKENS,
        OUTPUTS=_OUTPUTS,
        RANKS=ranks,
        num_warps=_WARPS,
        **begun(x),
    )


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["adapters_ptr"])
def shrink_kernel(
    x_ptr,
    a_ptr,
    adapters_ptr,
    middle_ptr,
    T,
    K,
    R,
    S,
    x_stride,
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """``middle[part]`` = x A^T over the part's inputs, float32 [T, R]; zeros for tokens without an adapter."""
    if BEGIN is not None:
        BEGIN()
    t, part = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    r = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    adapters = tl.load(adapters_ptr + t, mask=t < T, other=-1)
    total = tl.zeros([TOKENS, RANKS], tl.float32)
    for slot in range(S):
        mine = adapters == slot
        if tl.max(mine.to(tl.int32), 0) > 0:
            found = tl.zeros([TOKENS, RANKS], tl.float32)
            rows = (slot * R + r).to(tl.int64)
            for start in range(0, PART, INPUTS):
                k = part * PART + start + tl.arange(0, INPUTS)
                x_at = t.to(tl.int64)[:, None] * x_stride + k[None, :]
                x = tl.load(x_ptr + x_at, mask=mine[:, None] & (k < K)[None, :], other=0.0)
                a = tl.load(a_ptr + rows[None, :] * K + k[:, None], mask=(r < R)[None, :] & (k < K)[:, None], other=0.0)
                found = tl.dot(x, a, found, input_precision="ieee")
            total = tl.where(mine[:, None], found, total)
    at = (part.to(tl.int64) * T + t)[:, None] * R + r[None, :]
    tl.store(middle_ptr + at, total, mask=(t < T)[:, None] & (r < R)[None, :])


@triton.jit(do_not_specialize=["T", "P"], do_not_specialize_on_alignment=["adapters_ptr"])
def expand_kernel(
    y_ptr,
    middle_ptr,
    b_ptr,
    adapters_ptr,
    T,
    N,
    R,
    S,
    P,
    y_stride,
    y_column_stride,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """y += middle B^T, where a token has an adapter; the parts of the middle are added up first."""
    if BEGIN is not None:
        BEGIN()
    t, n = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    adapters = tl.load(adapters_ptr + t, mask=t < T, other=-1)
    total, size = tl.zeros([TOKENS, OUTPUTS], tl.float32), tl.cast(T, tl.int64) * R
    for slot in range(S):
        mine = adapters == slot
        if tl.max(mine.to(tl.int32), 0) > 0:
            found = tl.zeros([TOKENS, OUTPUTS], tl.float32)
            rows = n.to(tl.int64) * S + slot
            for start in range(0, R, RANKS):
                r = start + tl.arange(0, RANKS)
                middle = tl.zeros([TOKENS, RANKS], tl.float32)
                ptrs = middle_ptr + t.to(tl.int64)[:, None] * R + r[None, :]
                for _ in range(P):
                    middle += tl.load(ptrs, mask=mine[:, None] & (r < R)[None, :], other=0.0)
                    ptrs += size
                b = tl.load(b_ptr + rows[None, :] * R + r[:, None], mask=(n < N)[None, :] & (r < R)[:, None], other=0.0)
                found = tl.dot(middle.to(b.dtype), b, found, input_precision="ieee")
            total = tl.where(mine[:, None], found, total)
    at = t.to(tl.int64)[:, None] * y_stride + n.to(tl.int64)[None, :] * y_column_stride
    inside = (adapters >= 0)[:, None] & (n < N)[None, :]
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (y + total).to(y_ptr.dtype.element_ty), mask=inside)
