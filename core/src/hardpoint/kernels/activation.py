"""Activation functions, alone and as gates, with the rounding of a gate's result behind it.

Numbers are rounded to their dtype between the activation and the multiplication, as the reference rounds them.

Axes: T rows, n columns of a result; a gated input has 2n, the gate first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint.kernels.launch import Launcher, aligned
from hardpoint.kernels.quantize import empty_rounded, rounding, store_rounded, whole_rows
from hardpoint.ops.act_and_mul import GATED, SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT
from hardpoint.ops.activation import ACTIVATIONS
from hardpoint_plugin_api import ConfigError, QuantSpec, UnknownNameError

_ALPHA, _LIMIT = tl.constexpr(SWIGLU_OAI_ALPHA), tl.constexpr(SWIGLU_OAI_LIMIT)
_BLOCK, _WARPS = 1024, 4


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """One of ACTIVATIONS of float32 x."""
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 is the sigmoid of 2u
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "relu2":
        y = tl.where(x <= 0.0, 0.0, x * x)
    else:
        tl.static_assert(ACTIVATION == "sigmoid", "unknown activation")
        y = 1.0 / (1.0 + tl.exp(-x))
    return y


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """One of GATED of a gate and what it gates, both in one dtype and the result too."""
    wide = gate.to(tl.float32)
    if ACTIVATION == "swiglu_oai":
        wide = tl.where(wide > _LIMIT, _LIMIT, wide)
        limited = tl.clamp(up.to(tl.float32), -_LIMIT, _LIMIT, propagate_nan=tl.PropagateNan.ALL)
        y = wide / (1.0 + tl.exp(-wide * _ALPHA)) * (limited + 1.0)
    else:
        y = activate(wide, ACTIVATION).to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    return y.to(gate.dtype)


@triton.jit
def activation_kernel(
    x_ptr, out_ptr, n, x_stride, ACTIVATION: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr, BEGIN: tl.constexpr
):
    """A block of columns of one row."""
    if BEGIN is not None:
        BEGIN()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < n, other=0.0)
    if GATE:
        y = gated(x, tl.load(x_ptr + row * x_stride + n + columns, mask=columns < n, other=0.0), ACTIVATION)
    else:
        y = activate(x.to(tl.float32), ACTIVATION)
    tl.store(out_ptr + row * n + columns, y, mask=columns < n)


@triton.jit(do_not_specialize=["num_rows"])
def act_and_mul_quantized_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    num_rows,
    n,
    x_stride,
    ACTIVATION: tl.constexpr,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """ROWS rows. Behind a row's columns the gate and what it gates are zero, and so is every function of them."""
    if BEGIN is not None:
        BEGIN()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < n)
    at = x_ptr + rows[:, None] * x_stride + columns
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + n, mask=inside, other=0.0)
    y = gated(gate, up, ACTIVATION).to(tl.float32)
    store_rounded(y, codes_ptr, scale_ptr, rows, num_rows, n, LARGEST, GROUP, ROWS, BLOCK)


_activation, _act_and_mul_quantized = Launcher(activation_kernel), Launcher(act_and_mul_quantized_kernel)


def act_and_mul(x: torch.Tensor, *, activation: str) -> torch.Tensor:
    """See core's op. Raises UnknownNameError for an activation, ConfigError for rows of odd width."""
    n = _gate_columns("act_and_mul", x, activation)
    return _launch(x, torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device), activation, True)


def activation(x: torch.Tensor, *, activation: str) -> torch.Tensor:
    """See core's op. Raises UnknownNameError."""
    if activation not in ACTIVATIONS:
        raise UnknownNameError("activation", activation, ACTIVATIONS)
    return _launch(x, torch.empty(x.shape, dtype=x.dtype, device=x.device), activation, False)


def act_and_mul_quantized(x: torch.Tensor, *, activation: str, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """See core's op; groups of columns must be powers of two. Raises as ``act_and_mul``."""
    n = _gate_columns("act_and_mul_quantized", x, activation)
    if x.stride(1) != 1:
        x = x.contiguous()
    dtype, most, group = rounding(spec)
    codes, scales = empty_rounded(x, n, dtype, group)
    count = x.shape[0]
    if codes.numel():
        rows, block, warps = whole_rows(n, group)
        stride = x.stride(0)
        key = (x.dtype, dtype, n, stride, activation, group, x.get_device()) if aligned(x, codes, scales) else None
        grid = (-(-count // rows), 1, 1)
        _act_and_mul_quantized(
            key, grid, warps, x, codes, scales, count, n, stride, activation, most, group, rows, block
        )
    return codes, scales


def _gate_columns(op: str, x: torch.Tensor, activation: str) -> int:
    if activation not in GATED:
        raise UnknownNameError("activation", activation, GATED)
    if x.shape[-1] % 2:
        raise ConfigError(f"{op}: rows must be a gate and as many elements again, got {x.shape[-1]} elements")
    return int(x.shape[-1] // 2)


def _launch(x: torch.Tensor, out: torch.Tensor, activation: str, gate: bool) -> torch.Tensor:
    count, n = out.numel(), out.shape[-1]
    if count:
        if x.ndim != 2 or x.stride(1) != 1:
            x = x.reshape(-1, x.shape[-1]).contiguous()
        stride, block = x.stride(0), min(_BLOCK, triton.next_power_of_2(n))
        key = (x.dtype, n, stride, activation, gate, x.get_device()) if aligned(x, out) else None
        grid = (count // n, -(-n // block), 1)
        _activation(key, grid, _WARPS, x, out, n, stride, activation, gate, block)
    return out
