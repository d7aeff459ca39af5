"""Activation functions, alone and as gates, with the rounding of a gate's result behind it.

Numbers are rounded to their dtype between the activation and the multiplication, as the reference rounds them.

Axes: T rows, n columns of a result; a gated input has 2n, the gate first.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from hardpoint.kernels.launch import Launcher, aligned
from hardpoint.kernels.quantize import (
    empty_rounded,
    magnitudes,
    round_block,
    rounding,
    rounding_scale,
    store_rounded,
    whole_rows,
)
from hardpoint.kernels.reading import read_inside
from hardpoint.ops.act_and_mul import GATED, SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT
from hardpoint.ops.activation import ACTIVATIONS
from hardpoint_plugin_api import ConfigError, QuantSpec, UnknownNameError

_ALPHA, _LIMIT = tl.constexpr(SWIGLU_OAI_ALPHA), tl.constexpr(SWIGLU_OAI_LIMIT)
_BLOCK, _WARPS = 1024, 4
_MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)

_LONG = 2048
"""Columns from which on a row is rounded in pieces."""

_MOST_PIECES = 8


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """One of ACTIVATIONS of float32 x."""
    if ACTIVATION == "silu":  # powers of two take fewer instructions, which are what one program has no time for
        y = x / (1.0 + tl.exp2(x * _MINUS_LOG2_E))
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


@triton.jit
def _round_long_row(
    x_ptr,
    codes_ptr,
    scale_ptr,
    n,
    x_stride,
    ACTIVATION: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """This program's row, in PIECES of BLOCK columns; WHOLE: the last one ends where it does. One scale for all.

    All that it reads is on its way before the first number is needed, and no power of two beyond a row's length is
    worked through: a decode's one program has nothing beside it that would hide either.
    """
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at = x_ptr + row * x_stride + columns
    gates, ups, products = (), (), ()  # tuples: Triton has no lists of tensors
    for piece in tl.static_range(PIECES):
        up = read_inside(at + n + piece * BLOCK, piece * BLOCK + columns < n, WHOLE)
        ups = ups + (up,)  # type: ignore[assignment]  # noqa: RUF005  # as Triton reads it
    tl.debug_barrier()  # else compilers put these reads off until the gates' numbers are there
    for piece in tl.static_range(PIECES):
        gate = read_inside(at + piece * BLOCK, piece * BLOCK + columns < n, WHOLE)
        gates = gates + (gate,)  # type: ignore[assignment]  # noqa: RUF005
    peak = tl.zeros([BLOCK], tl.int32)
    for piece in tl.static_range(PIECES):
        y = gated(gates[piece], ups[piece], ACTIVATION)
        peak = tl.maximum(peak, magnitudes(y.to(tl.float32)))
        products = products + (y,)  # type: ignore[assignment]  # noqa: RUF005
    scale = rounding_scale(tl.max(peak, 0, keep_dims=True), LARGEST)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)
    for piece in tl.static_range(PIECES):
        codes = round_block(products[piece], scale, LARGEST, codes_ptr.dtype.element_ty)
        to = codes_ptr + row * n + piece * BLOCK + columns
        if WHOLE:
            tl.store(to, codes)
        else:
            tl.store(to, codes, mask=piece * BLOCK + columns < n)


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
    PIECES: tl.constexpr,
    WHOLE: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """ROWS rows, or one in PIECES.

    Behind a row's columns the gate and what it gates are zero, and so is every function of them.
    """
    if BEGIN is not None:
        BEGIN()
    if PIECES > 1:
        _round_long_row(x_ptr, codes_ptr, scale_ptr, n, x_stride, ACTIVATION, LARGEST, BLOCK, PIECES, WHOLE)
    else:
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
    if not codes.numel():
        return codes, scales
    stride = x.stride(0)
    key = (x.dtype, dtype, n, stride, activation, group, x.get_device()) if aligned(x, codes, scales) else None
    rows, block, pieces, warps = tile_of_rows(n, group)
    grid = (-(-count // rows), 1, 1)
    rest = (activation, most, group, rows, block, pieces, n % block == 0)
    _act_and_mul_quantized(key, grid, warps, x, codes, scales, count, n, stride, *rest)
    return codes, scales


@functools.cache
def tile_of_rows(n: int, group: int) -> tuple[int, int, int, int]:
    """(ROWS, BLOCK, PIECES, warps) for rows of n columns: whole, or long ones in pieces of four columns to a thread."""
    rows, block, warps = whole_rows(n, group, operands=2)
    piece = 2048 if n >= 8192 else 1024
    pieces = -(-n // piece)
    if group or n <= _LONG or pieces > _MOST_PIECES:
        return rows, block, 1, warps
    return 1, piece, pieces, piece // 128


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
