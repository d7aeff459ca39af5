"""Layers with a state in compiled kernels (``csrc/kernels/recurrence.h``).

Axes: T tokens, N requests, H heads, K key heads, D key size, V value size, C channels, W width, P pages, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hardpoint_cpu import native
from hardpoint_cpu.ops.activation import NUMBERS
from hardpoint_cpu.ops.arguments import misfit
from hardpoint_plugin_api import UnknownNameError

Tensor = torch.Tensor


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
    """See core's op. Raises ConfigError for arguments that do not fit, UnknownNameError for an activation."""
    tokens, channels = x.shape
    width = weight.shape[1]
    for name, y, shape in (
        ("weight", weight, (channels, width)),
        ("bias", weight[:, 0] if bias is None else bias, (channels,)),
        ("states", states, (states.shape[0], width - 1, channels)),
    ):
        if y.dtype != x.dtype or y.shape != shape:
            raise misfit("causal_conv", name, y, x.dtype, shape)
    _check("causal_conv", pages, seq_lens, query_start)
    out = torch.empty(tokens, channels, dtype=x.dtype)
    if out.numel():
        rows, weight, bias = native.rows(x), weight.contiguous(), None if bias is None else bias.contiguous()
        native.run(
            native.number_for("causal_conv", x.dtype),
            *(rows.data_ptr(), rows.stride(0), weight.data_ptr(), native.address(bias)),
            *(states.data_ptr(), states.stride(0), pages.data_ptr(), query_start.data_ptr(), seq_lens.data_ptr()),
            *(tokens, pages.shape[0], channels, width, _number(activation), out.data_ptr()),
        )
    return out


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
    """See core's op. Raises ConfigError for arguments that do not fit."""
    _check("linear_recurrence_step", pages, seq_lens, None)
    flags = delta_rule, normalize, channel_decay
    return _recur("linear_recurrence_step", (q, k, v), decay, beta, states, (pages, None, seq_lens), scale, flags)


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
    """See core's op. Raises ConfigError for arguments that do not fit."""
    _check("linear_recurrence_chunks", pages, seq_lens, query_start)
    flags, arrays = (delta_rule, normalize, channel_decay), (pages, query_start, seq_lens)
    return _recur("linear_recurrence_chunks", (q, k, v), decay, beta, states, arrays, scale, flags)


def recurrence_gates(a: Tensor, b: Tensor | None, rate: Tensor, bias: Tensor, *, low: float) -> tuple[Tensor, Tensor]:
    """See core's op. Raises ConfigError for arguments that do not fit."""
    tokens, heads = a.shape[:2]
    for name, x, dtype, shape in (
        ("rate", rate, torch.float32, (heads,)),
        ("bias", bias, torch.float32, a.shape[1:]),
        ("b", a.flatten(2)[..., 0] if b is None and a.dim() > 2 else a if b is None else b, a.dtype, (tokens, heads)),
    ):
        if x.dtype != dtype or x.shape != shape:
            raise misfit("recurrence_gates", name, x, dtype, shape)
    decay, beta = torch.empty(a.shape, dtype=torch.float32), torch.empty(tokens, heads, dtype=torch.float32)
    if decay.numel():
        rows, b = native.rows(a.flatten(1)), None if b is None else native.rows(b)
        rate, bias = rate.contiguous(), bias.contiguous()
        native.run(
            native.number_for("recurrence_gates", a.dtype),
            *(rows.data_ptr(), rows.stride(0), native.address(b), 0 if b is None else b.stride(0)),
            *(rate.data_ptr(), bias.data_ptr(), decay.data_ptr(), beta.data_ptr()),
            *(tokens, heads, decay.numel() // beta.numel(), low),
        )
    return decay, beta


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, activation: str, gate_first: bool) -> Tensor:
    """See core's op. Raises ConfigError for arguments that do not fit, UnknownNameError for an activation."""
    tokens, groups, size = x.shape
    for name, y, shape in (("gate", gate, x.shape), ("weight", weight, (weight.shape[0], size))):
        if y.dtype != x.dtype or y.shape != shape:
            raise misfit("gated_rms_norm", name, y, x.dtype, shape)
    if weight.shape[0] not in (1, groups):
        raise misfit("gated_rms_norm", "weight", weight, x.dtype, (groups, size))
    out = torch.empty(x.shape, dtype=x.dtype)
    if out.numel():
        x, gates, weight = x.contiguous(), native.rows(gate.flatten(1)), weight.contiguous()
        native.run(
            native.number_for("gated_rms_norm", x.dtype),
            *(x.data_ptr(), gates.data_ptr(), gates.stride(0), weight.data_ptr(), out.data_ptr()),
            *(tokens, groups, size, weight.shape[0] == 1, _number(activation), gate_first, eps),
        )
    return out


def _recur(
    op: str,
    qkv: tuple[Tensor, Tensor, Tensor],
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    arrays: tuple[Tensor, Tensor | None, Tensor],
    scale: float,
    flags: tuple[bool, bool, bool],
) -> Tensor:
    """Run the kernel of both ops; ``arrays`` are pages, query_start and seq_lens."""
    q, k, v = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in qkv)
    tokens, heads, value_size = v.shape
    key_heads, key_size = k.shape[1:]
    channels = (key_size,) if flags[2] else ()
    for name, x, dtype, shape in (
        ("q", q, v.dtype, (tokens, key_heads, key_size)),
        ("k", k, v.dtype, (tokens, key_heads, key_size)),
        ("decay", decay, torch.float32, (tokens, heads, *channels)),
        ("beta", beta, torch.float32, (tokens, heads)),
        ("states", states, torch.float32, (states.shape[0], heads, value_size, key_size)),
    ):
        if x.dtype != dtype or x.shape != shape:
            raise misfit(op, name, x, dtype, shape)
    if key_heads and heads % key_heads:
        raise misfit(op, "k", k, k.dtype, (tokens, f"a divisor of {heads}", key_size))
    out = torch.empty(v.shape, dtype=v.dtype)
    if out.numel():
        decay, beta, (pages, starts, lengths) = decay.contiguous(), beta.contiguous(), arrays
        native.run(
            native.number_for("linear_recurrence", v.dtype),
            *(q.data_ptr(), q.stride(0), q.stride(1), k.data_ptr(), k.stride(0), k.stride(1)),
            *(v.data_ptr(), v.stride(0), v.stride(1), decay.data_ptr(), beta.data_ptr(), out.data_ptr()),
            *(states.data_ptr(), states.stride(0), pages.data_ptr(), native.address(starts), lengths.data_ptr()),
            *(pages.shape[0], heads, key_heads, key_size, value_size, *flags, scale),
        )
    return out


def _check(op: str, pages: Tensor, seq_lens: Tensor, query_start: Tensor | None) -> None:
    """Raise ConfigError for arrays of requests that the kernels would misread."""
    requests = pages.shape[0]
    for name, x, dtype, count in (
        ("pages", pages, torch.int64, requests),
        ("seq_lens", seq_lens, torch.int32, requests),
        ("query_start", query_start, torch.int32, requests + 1),
    ):
        if x is not None and (x.dtype != dtype or x.shape != (count,) or not x.is_contiguous()):
            raise misfit(op, name, x, dtype, (count,))


def _number(activation: str) -> int:
    if activation not in NUMBERS:
        raise UnknownNameError("activation", activation, NUMBERS)
    return NUMBERS[activation]
