"""Linear recurrences in Triton: a tile of each head's state goes through a request's tokens, or through 16 at a time.

Nothing is planned on the host. A tile has BLOCK_V rows of a state and all of its columns: rows do not depend on one
another.

Axes: T tokens, N requests, H heads, K key heads, D key size, V value size, C tokens of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hardpoint.kernels.launch import Launcher, aligned, are_short
from hardpoint.ops.linear_recurrence import NORM_EPS

Tensor = torch.Tensor
_NORM_EPS = tl.constexpr(NORM_EPS)
_CHUNK = tl.constexpr(16)
_ROWS, _CHUNK_ROWS = 32, 16
"""Rows of a state in a program. With chunks and 32 rows, programs of 8 warps spill registers on sm_90."""


@triton.jit
def read_head(ptr, inside, factor, NORMALIZE: tl.constexpr, AXIS: tl.constexpr):
    """Keys or queries [..., BLOCK_D] at ``ptr`` in float32, divided by their length where they are to be, times
    ``factor``."""
    x = tl.load(ptr, mask=inside, other=0.0).to(tl.float32)
    if NORMALIZE:
        x = x * tl.rsqrt(tl.sum(x * x, AXIS, keep_dims=True) + _NORM_EPS)
    return x * factor


@triton.jit(
    do_not_specialize=["q_stride", "k_stride", "v_stride"],
    do_not_specialize_on_alignment=["decay_ptr", "beta_ptr", "pages_ptr", "starts_ptr", "lengths_ptr"],
)
def recurrence_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    states_ptr,
    pages_ptr,
    starts_ptr,
    lengths_ptr,
    out_ptr,
    q_stride,
    k_stride,
    v_stride,
    page_stride,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    DELTA_RULE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CHANNEL_DECAY: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """BLOCK_V rows of one head's state, of one request. Without ``starts`` each request has one token."""
    if BEGIN is not None:
        BEGIN()
    request = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    column = tl.arange(0, BLOCK_D)
    if starts_ptr is None:
        first = request.to(tl.int64)
        count = 1
    else:
        first = tl.load(starts_ptr + request).to(tl.int64)
        count = tl.load(starts_ptr + request + 1) - first.to(tl.int32)
    inside = (row < V)[:, None] & (column < D)[None, :]
    page = tl.load(pages_ptr + request)
    at = states_ptr + page * page_stride + (head * V + row[:, None]) * D + column[None, :]
    begins = tl.load(lengths_ptr + request) == count
    state = tl.load(at, mask=inside & (begins == 0) & (count > 0), other=0.0)
    key_head = head // (H // K)
    q_ptr += first * q_stride + key_head * D
    k_ptr += first * k_stride + key_head * D
    v_ptr += first * v_stride + head * V
    out_ptr += (first * H + head) * V
    decay_ptr += (first * H + head) * (D if CHANNEL_DECAY else 1)
    beta_ptr += first * H + head
    if IN_CHUNKS:
        token = tl.arange(0, _CHUNK)
        for begin in range(0, count, _CHUNK):
            here = begin + token < count
            place = (begin + token).to(tl.int64)
            wide = here[:, None] & (column < D)[None, :]
            k = read_head(k_ptr + place[:, None] * k_stride + column[None, :], wide, 1.0, NORMALIZE, 1)
            q = read_head(q_ptr + place[:, None] * q_stride + column[None, :], wide, scale, NORMALIZE, 1)
            values = here[:, None] & (row < V)[None, :]
            v = tl.load(v_ptr + place[:, None] * v_stride + row[None, :], mask=values, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptr + place * H, mask=here, other=0.0)
            decay = tl.load(decay_ptr + place * H, mask=here, other=0.0)
            sums = tl.cumsum(decay, 0)
            total = tl.min(sums, 0)  # of all tokens: decays are at most 0
            earlier = token[:, None] > token[None, :]
            # [i, j]: the sum of the decays after j up to i. A difference of two sums from the chunk's begin loses bits.
            since = tl.cumsum(tl.where(earlier, decay[:, None], 0.0), 0)
            ratio = tl.exp(since)
            from_state = tl.dot(k, tl.trans(state), input_precision=PRECISION) * tl.exp(sums)[:, None]
            u = beta[:, None] * v
            if DELTA_RULE:  # (1 + A) u = beta (v - S k), row by row
                between = tl.dot(k, tl.trans(k), input_precision=PRECISION) * tl.where(earlier, ratio, 0.0)
                between = between * beta[:, None]
                u -= beta[:, None] * from_state
                for i in range(1, _CHUNK):
                    one = tl.sum(tl.where(token[:, None] == i, between, 0.0), 0)  # of row i
                    u -= tl.where(token[:, None] == i, tl.sum(one[:, None] * u, 0)[None, :], 0.0)
            read = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            read = tl.where(earlier | (token[:, None] == token[None, :]), read * ratio, 0.0)
            o = tl.dot(q, tl.trans(state), input_precision=PRECISION) * tl.exp(sums)[:, None]
            o += tl.dot(read, u, input_precision=PRECISION)
            tl.store(out_ptr + place[:, None] * (H * V) + row[None, :], o.to(out_ptr.dtype.element_ty), mask=values)
            kept = k * tl.exp(tl.min(since, 0))[:, None]
            state = state * tl.exp(total) + tl.dot(tl.trans(u), kept, input_precision=PRECISION)
    else:
        for _ in range(count):
            k = read_head(k_ptr + column, column < D, 1.0, NORMALIZE, 0)
            q = read_head(q_ptr + column, column < D, scale, NORMALIZE, 0)
            u = tl.load(v_ptr + row, mask=row < V, other=0.0).to(tl.float32)
            if CHANNEL_DECAY:
                state = state * tl.exp(tl.load(decay_ptr + column, mask=column < D, other=0.0))[None, :]
            else:
                state = state * tl.exp(tl.load(decay_ptr))
            if DELTA_RULE:
                u -= tl.sum(state * k[None, :], 1)
            state += (u * tl.load(beta_ptr))[:, None] * k[None, :]
            o = tl.sum(state * q[None, :], 1)
            tl.store(out_ptr + row, o.to(out_ptr.dtype.element_ty), mask=row < V)
            q_ptr += q_stride
            k_ptr += k_stride
            v_ptr += v_stride
            out_ptr += H * V
            decay_ptr += H * (D if CHANNEL_DECAY else 1)
            beta_ptr += H
    tl.store(at, state, mask=inside & (count > 0))


_recurrence = Launcher(recurrence_kernel)


@functools.cache
def products_of_floats(device_type: str) -> str:
    """How float32 matrices are multiplied on this device without losing bits: by sums of bfloat16, which matrix units
    multiply, where the compiler knows them."""
    if device_type == "cpu":  # Triton's interpreter
        return "ieee"
    target = triton.runtime.driver.active.get_current_target()
    options = triton.compiler.make_backend(target).parse_options({})
    return "bf16x6" if "bf16x6" in options.allowed_dot_input_precisions else "ieee"


def linear_recurrence_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    pages: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    delta_rule: bool,
    normalize: bool,
    channel_decay: bool,
) -> Tensor:
    """See core's op."""
    return _launch((q, k, v, decay, beta, states, pages, None, seq_lens), scale, delta_rule, normalize, channel_decay)


def linear_recurrence_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    pages: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    starts: Sequence[int],
    scale: float,
    delta_rule: bool,
    normalize: bool,
    channel_decay: bool,
) -> Tensor:
    """See core's op. With a decay for each channel, tokens are taken one by one."""
    arrays = q, k, v, decay, beta, states, pages, query_start.contiguous(), seq_lens
    return _launch(arrays, scale, delta_rule, normalize, channel_decay)


def _launch(
    arrays: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor],
    scale: float,
    delta_rule: bool,
    normalize: bool,
    channel_decay: bool,
) -> Tensor:
    """Run the kernel on the arguments of the ops; ``arrays`` are its tensors in order, without the result."""
    *qkv, decay, beta, states, pages, starts, lengths = arrays
    q, k, v = (x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in qkv)
    heads, value_size = v.shape[1:]
    key_heads, key_size = k.shape[1:]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not out.numel():
        return out
    in_chunks = starts is not None and not channel_decay
    rows, columns, warps = min(_ROWS, triton.next_power_of_2(value_size)), triton.next_power_of_2(key_size), 4
    if in_chunks:
        rows, columns, warps = _CHUNK_ROWS, max(16, columns), 8
    strides = q.stride(0), k.stride(0), v.stride(0), states.stride(0)
    shape, rule = (heads, key_heads, key_size, value_size), (delta_rule, normalize, channel_decay)
    constants = *shape, *rule, in_chunks, products_of_floats(v.device.type), columns, rows
    placed = aligned(q, k, v, states, out)
    kind = v.dtype, strides[3], *map(are_short, strides), starts is None
    key = (*kind, *constants, v.get_device()) if placed else None
    per_token, per_request = (decay.contiguous(), beta.contiguous()), (pages.contiguous(), starts, lengths.contiguous())
    grid = pages.shape[0], heads, triton.cdiv(value_size, rows)
    _recurrence(key, grid, warps, q, k, v, *per_token, states, *per_request, out, *strides, scale, *constants)
    return out
