"""Norms, with the residual's addition before them and the rounding of their result behind them: one pass over memory.

A row is held whole in registers, see quantize.py; the sum of its squares has an order that only its length decides.

Axes: T rows (of H heads each, where there are such), n columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint.kernels.launch import Launcher, aligned
from hardpoint.kernels.quantize import empty_rounded, rounding, store_rounded, whole_rows
from hardpoint_plugin_api import QuantSpec


@triton.jit
def normed(x, weight, n, eps, DTYPE: tl.constexpr):
    """The RMS norm of float32 rows x [ROWS, BLOCK], zeros behind column n, rounded to DTYPE before the weight applies.

    As in Llama; see core's op rms_norm.
    """
    mean = tl.sum(x * x, 1, keep_dims=True) / n
    return (x * tl.rsqrt(mean + eps)).to(DTYPE).to(tl.float32) * weight.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    scale_ptr,
    num_rows,
    n,
    heads,
    x_stride,
    x_head_stride,
    residual_stride,
    total_stride,
    eps,
    ADD: tl.constexpr,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """ROWS rows. Without ADD there is no residual and no total; with LARGEST 0 the result is not rounded to a spec.

    The weight is read while the kernel before this one may still run.
    """
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + columns, mask=columns < n, other=0.0)
    tl.debug_barrier()  # else compilers read it behind the sum, where it is needed first, and all wait for it again
    if BEGIN is not None:
        BEGIN()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (rows < num_rows)[:, None] & (columns < n)
    dtype = x_ptr.dtype.element_ty
    start = (rows // heads) * x_stride + (rows % heads) * x_head_stride
    x = tl.load(x_ptr + start[:, None] + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        at = rows[:, None] * residual_stride + columns
        total = (x + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total_ptr + rows[:, None] * total_stride + columns, total, mask=inside)
        x = total.to(tl.float32)
    y = normed(x, weight, n, eps, dtype).to(dtype)
    if LARGEST == 0:
        tl.store(out_ptr + rows[:, None] * n + columns, y, mask=inside)
    else:
        y = y.to(tl.float32)
        store_rounded(y, out_ptr, scale_ptr, rows, num_rows, n, LARGEST, GROUP, ROWS, BLOCK)


_rms_norm = Launcher(rms_norm_kernel)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """See core's op. x may be [T, n], or [T, H, n] of any strides but the last."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, None, None, eps, 0.0, 0)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See core's op; ``residual`` becomes the sum."""
    residual = _packed(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, out, residual, None, eps, 0.0, 0)
    return out, residual


def rms_norm_quantized(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, spec: QuantSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """See core's op; groups of columns must be powers of two."""
    dtype, most, group = rounding(spec)
    codes, scales = empty_rounded(x, x.shape[1], dtype, group)
    _launch(x, None, weight, codes, None, scales, eps, most, group)
    return codes, scales


def add_rms_norm_quantized(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, spec: QuantSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See core's op; ``residual`` becomes the sum, and groups of columns must be powers of two."""
    residual = _packed(residual)
    dtype, most, group = rounding(spec)
    codes, scales = empty_rounded(x, x.shape[1], dtype, group)
    _launch(x, residual, weight, codes, residual, scales, eps, most, group)
    return codes, scales, residual


def _packed(x: torch.Tensor) -> torch.Tensor:
    """x itself where the elements of a row lie one by one."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    scales: torch.Tensor | None,
    eps: float,
    most: float,
    group: int,
) -> None:
    count, n = x.numel(), x.shape[-1]
    if not count:
        return
    if x.ndim == 2 and x.stride(1) == 1:
        heads, stride, head_stride = 1, x.stride(0), 0
    elif x.ndim == 3 and x.stride(2) == 1:
        heads, stride, head_stride = x.shape[1], x.stride(0), x.stride(1)
    else:
        x = x.contiguous()
        heads, stride, head_stride = 1, n, 0
    added = 0 if residual is None else residual.stride(0)
    rows, block, warps = whole_rows(n, group, operands=2)
    num_rows = count // n
    dtypes = (x.dtype, weight.dtype, out.dtype, None if residual is None else residual.dtype)
    key = (dtypes, n, heads, stride, head_stride, added, group, x.get_device())
    _rms_norm(
        key if aligned(x, residual, weight, out, scales) else None,
        (-(-num_rows // rows), 1, 1),
        warps,
        x,
        residual,
        weight,
        out,
        total,
        scales,
        num_rows,
        n,
        heads,
        stride,
        head_stride,
        added,
        added,
        float(eps),
        residual is not None,
        most,
        group,
        rows,
        block,
    )
