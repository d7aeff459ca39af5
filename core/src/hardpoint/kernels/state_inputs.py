"""The ops around a linear recurrence, in Triton: its short convolution, its gates and the norm of its result.

Axes: T tokens, N requests, H heads, D key size, C channels, W width of the convolution, G groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint.kernels.activation import activate
from hardpoint.kernels.launch import Launcher, aligned, are_short
from hardpoint.kernels.sparse_index import request_of
from hardpoint.ops.activation import ACTIVATIONS
from hardpoint_plugin_api import UnknownNameError

Tensor = torch.Tensor
_CHANNELS = 512
"""Channels of a token in a program."""


@triton.jit(
    do_not_specialize=["num_requests", "x_stride"],
    do_not_specialize_on_alignment=["weight_ptr", "bias_ptr", "pages_ptr", "starts_ptr", "lengths_ptr"],
)
def conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    states_ptr,
    pages_ptr,
    starts_ptr,
    lengths_ptr,
    out_ptr,
    num_requests,
    x_stride,
    page_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """BLOCK channels of one token. ONE: each request has one token, and its state is moved on as well."""
    if BEGIN is not None:
        BEGIN()
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    request = token if ONE else request_of(token, starts_ptr, num_requests)
    first = tl.load(starts_ptr + request)
    begins = tl.load(lengths_ptr + request) == tl.load(starts_ptr + request + 1) - first
    offset = token - first
    state = states_ptr + tl.load(pages_ptr + request) * page_stride + channel
    x = x_ptr + token.to(tl.int64) * x_stride + channel
    y = tl.zeros([BLOCK], tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    for back in tl.static_range(W - 1, -1, -1):
        weight = tl.load(weight_ptr + channel * W + (W - 1 - back), mask=inside, other=0.0).to(tl.float32)
        here = offset >= back
        new = tl.load(x - back * x_stride, mask=inside & here, other=0.0).to(tl.float32)
        old = tl.load(state + (W - 1 + offset - back) * C, mask=inside & (here == 0) & (begins == 0), other=0.0).to(
            tl.float32
        )
        y += weight * tl.where(here, new, old)
        if ONE and back < W - 1:  # its place is read before it is written: it was the next one's
            kept = tl.where(here, new, old)
            tl.store(state + (W - 2 - back) * C, kept.to(states_ptr.dtype.element_ty), mask=inside)
    out = out_ptr + token.to(tl.int64) * C + channel
    tl.store(out, activate(y, ACTIVATION).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["x_stride"], do_not_specialize_on_alignment=["pages_ptr", "starts_ptr", "lengths_ptr"])
def conv_states_kernel(
    x_ptr,
    states_ptr,
    pages_ptr,
    starts_ptr,
    lengths_ptr,
    x_stride,
    page_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """BLOCK channels of one request's state, after the step's tokens."""
    if BEGIN is not None:
        BEGIN()
    request = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - first
    begins = tl.load(lengths_ptr + request) == count
    inside = (channel < C) & (count > 0)
    state = states_ptr + tl.load(pages_ptr + request) * page_stride + channel
    x = x_ptr + first.to(tl.int64) * x_stride + channel
    for i in tl.static_range(W - 1):
        at = count - (W - 1) + i
        new = tl.load(x + at * x_stride, mask=inside & (at >= 0), other=0.0)
        old = tl.load(state + (i + count) * C, mask=inside & (at < 0) & (begins == 0), other=0.0)
        tl.store(state + i * C, tl.where(at >= 0, new, old), mask=inside)


@triton.jit(do_not_specialize=["a_stride", "b_stride", "low"], do_not_specialize_on_alignment=["rate_ptr", "bias_ptr"])
def gates_kernel(
    a_ptr,
    b_ptr,
    rate_ptr,
    bias_ptr,
    decay_ptr,
    beta_ptr,
    a_stride,
    b_stride,
    low,
    H: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """BLOCK_H heads of one token."""
    if BEGIN is not None:
        BEGIN()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    at = head[:, None] * CHANNELS + column[None, :]
    inside = (head < H)[:, None] & (column < CHANNELS)[None, :]
    x = tl.load(a_ptr + token * a_stride + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + at, mask=inside, other=0.0)
    small = tl.exp(-tl.abs(x))  # log(1 + e^-|x|) by its series where 1 + e^-|x| would lose what is added
    tail = tl.where(small < 1e-3, small * (1.0 - small * (0.5 - small * (1.0 / 3.0))), tl.log(1.0 + small))
    step = tl.maximum(tl.maximum(x, 0.0) + tail, low)
    rate = tl.exp(tl.load(rate_ptr + head, mask=head < H, other=0.0))
    tl.store(decay_ptr + token * (H * CHANNELS) + at, -rate[:, None] * step, mask=inside)
    if b_ptr is None:
        beta = tl.sum(tl.where((column == 0)[None, :], step, 0.0), 1)
    else:
        b = tl.load(b_ptr + token * b_stride + head, mask=head < H, other=0.0).to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-b))
    tl.store(beta_ptr + token * H + head, beta, mask=head < H)


@triton.jit(do_not_specialize=["gate_stride", "eps"], do_not_specialize_on_alignment=["weight_ptr"])
def gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    gate_stride,
    eps,
    G: tl.constexpr,
    SIZE: tl.constexpr,
    ONE_WEIGHT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """One group of one token."""
    if BEGIN is not None:
        BEGIN()
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    at = (token * G + group) * SIZE + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + group * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    factor = activate(gate, ACTIVATION)
    if GATE_FIRST:
        x = tl.where(inside, x * factor, 0.0)
    weight = tl.load(weight_ptr + (0 if ONE_WEIGHT else group * SIZE) + column, mask=inside, other=0.0).to(tl.float32)
    y = x / tl.sqrt(tl.sum(x * x, 0, keep_dims=True) / SIZE + eps) * weight
    if not GATE_FIRST:
        y = y * factor
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


_conv, _conv_states, _gates, _norm = (
    Launcher(kernel) for kernel in (conv_kernel, conv_states_kernel, gates_kernel, gated_norm_kernel)
)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    pages: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    activation: str,
) -> Tensor:
    """See core's op. Raises UnknownNameError for an activation."""
    _check(activation)
    tokens, channels = x.shape
    width, requests = weight.shape[1], pages.shape[0]
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    arrays = pages.contiguous(), query_start.contiguous(), seq_lens.contiguous()
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    blocks, one, page = triton.cdiv(channels, block), tokens == requests, states.stride(0)
    fits = aligned(x, states, out)
    kind = x.dtype, page, are_short(x.stride(0)), channels, width, bias is None, block, x.get_device()
    _conv(
        (*kind, activation, one) if fits else None,
        (tokens, blocks, 1),
        4,
        *(x, weight.contiguous(), bias, states, *arrays, out, requests, x.stride(0), page),
        *(channels, width, activation, one, block),
    )
    if not one:
        grid = requests, blocks, 1
        _conv_states(kind if fits else None, grid, 4, x, states, *arrays, x.stride(0), page, channels, width, block)
    return out


def recurrence_gates(a: Tensor, b: Tensor | None, rate: Tensor, bias: Tensor, *, low: float) -> tuple[Tensor, Tensor]:
    """See core's op."""
    tokens, heads = a.shape[:2]
    channels = a.shape[2] if a.dim() == 3 else 1
    decay = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    beta = torch.empty(tokens, heads, dtype=torch.float32, device=a.device)
    if not decay.numel():
        return decay, beta
    a = a.flatten(1)
    a = a if a.stride(1) == 1 else a.contiguous()
    if b is not None and b.stride(1) != 1:
        b = b.contiguous()
    columns = triton.next_power_of_2(channels)
    block = min(triton.next_power_of_2(heads), max(1, 1024 // columns))
    strides = a.stride(0), 0 if b is None else b.stride(0)
    kind = a.dtype, b is None, *map(are_short, strides), heads, channels, block, a.get_device()
    _gates(
        kind if aligned(a, b, decay, beta) else None,
        (tokens, triton.cdiv(heads, block), 1),
        4,
        *(a, b, rate.contiguous(), bias.contiguous(), decay, beta, *strides, low),
        *(heads, channels, block, columns),
    )
    return decay, beta


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, activation: str, gate_first: bool) -> Tensor:
    """See core's op. Raises UnknownNameError for an activation."""
    _check(activation)
    tokens, groups, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x, gate = x.contiguous(), gate.flatten(1)
    gate = gate if gate.stride(1) == 1 else gate.contiguous()
    one = weight.shape[0] == 1
    kind = x.dtype, are_short(gate.stride(0)), groups, size, one, activation, gate_first, x.get_device()
    block = triton.next_power_of_2(size)
    _norm(
        kind if aligned(x, gate, out) else None,
        (tokens, groups, 1),
        min(8, max(1, block // 256)),
        *(x, gate, weight.contiguous(), out, gate.stride(0), eps),
        *(groups, size, one, activation, gate_first, block),
    )
    return out


def _check(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise UnknownNameError("activation", activation, ACTIVATIONS)
