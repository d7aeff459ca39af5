"""Rounding of activations to 8-bit elements, alone and as the last step of other kernels.

A row, or each GROUP of its columns, has a scale that maps its greatest magnitude to the greatest element. Rows are held
whole, as tiles [ROWS, BLOCK]: ROWS and the number of warps follow from a row's length alone, so that its bits do not
depend on what stands around it.

Axes: T rows, n columns.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from hardpoint.dtypes import dtype_of
from hardpoint.kernels.launch import Launcher, aligned
from hardpoint.numerics import largest
from hardpoint_plugin_api import QuantSpec


@triton.jit
def magnitudes(x):
    """Magnitudes of float32 x, as bits in int32: ordered alike, and NaN above infinity, so a maximum misses neither."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def magnitude(x):
    """The greatest of ``magnitudes`` in each block of float32 x [..., k]: int32 [..., 1]."""
    return tl.max(magnitudes(x), len(x.shape) - 1, keep_dims=True)


@triton.jit
def rounding_scale(bits, LARGEST: tl.constexpr):
    """The scales float32 of blocks with these magnitudes; NaN for one that is not finite throughout."""
    peak = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(peak, tl.full(peak.shape, LARGEST, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)
    return tl.where(peak < float("inf"), scale, float("nan"))


@triton.jit
def over(x, scale, inverse):
    """float32 x over its scales as division rounds it, which takes devices three times as many instructions.

    ``inverse`` is the nearest to that of the scale (P. Markstein, IBM Journal of Research and Development 34, 1990).
    A quotient that is off by its last bit may fall on the other side of the middle between two elements, and come out
    a whole step of theirs away.
    """
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, scale, x), inverse, quotient)


@triton.jit
def round_block(x, scale, LARGEST: tl.constexpr, ELEMENT: tl.constexpr):
    """Numbers over float32 scales, as the nearest elements, ties to even. A block whose scale is NaN may become any."""
    boost = tl.where(scale < 2.0**-64, 2.0**64, 1.0)  # the inverse of a tiny scale would not be finite
    boosted = scale * boost
    scaled = over(x.to(tl.float32) * boost, boosted, tl.div_rn(tl.full(boosted.shape, 1.0, tl.float32), boosted))
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if ELEMENT == tl.int8:  # noqa: SIM300
        shift = 12582912.0  # 1.5 * 2^23: adding it leaves whole numbers, rounded to the nearest, ties to even
        scaled = (scaled + shift) - shift
    return scaled.to(ELEMENT)


@triton.jit
def store_rounded(
    x,
    codes_ptr,
    scale_ptr,
    rows,
    num_rows,
    n,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write rows ``rows`` int64 [ROWS] of the elements [T, n] and of the scales: float32 x [ROWS, BLOCK] rounded.

    Values behind a row's n columns must be zeros. GROUP 0 is the whole row.
    """
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < n)
    if GROUP == 0:
        scale = rounding_scale(magnitude(x), LARGEST)
        tl.store(scale_ptr + rows[:, None], scale, mask=(rows < num_rows)[:, None])
        codes = round_block(x, scale, LARGEST, codes_ptr.dtype.element_ty)
    else:
        groups = tl.arange(0, BLOCK // GROUP)
        blocks = tl.reshape(x, (ROWS, BLOCK // GROUP, GROUP))
        scale = rounding_scale(magnitude(blocks), LARGEST)
        codes = tl.reshape(round_block(blocks, scale, LARGEST, codes_ptr.dtype.element_ty), (ROWS, BLOCK))
        count = tl.cdiv(n, GROUP)
        at = scale_ptr + rows[:, None] * count + groups
        here = (rows < num_rows)[:, None] & (groups < count)
        tl.store(at, tl.reshape(scale, (ROWS, BLOCK // GROUP)), mask=here)
    tl.store(codes_ptr + rows[:, None] * n + columns, codes, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def quantize_rows_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    num_rows,
    n,
    x_stride,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    if BEGIN is not None:
        BEGIN()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < n)
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    store_rounded(x, codes_ptr, scale_ptr, rows, num_rows, n, LARGEST, GROUP, ROWS, BLOCK)


_quantize_rows = Launcher(quantize_rows_kernel)


@functools.cache
def whole_rows(n: int, group: int = 0, operands: int = 1) -> tuple[int, int, int]:
    """(ROWS, BLOCK, warps) for tiles of whole rows of n columns, of which a kernel reads several ``operands``.

    Sixteen elements to a thread, eight in short rows or where there are several operands: of 2 bytes, that is two reads
    in flight, and enough programs beside one another to hide them. Several operands of sixteen elements would be read
    eight at a time, and results of one byte written sixteen at a time: they would pass through shared memory for it.
    """
    block = max(triton.next_power_of_2(n), group, 32)
    rows = max(1, 1024 // block)
    return rows, block, min(32, max(4, rows * block // (512 if operands == 1 else 256)))


@functools.cache
def rounding(spec: QuantSpec) -> tuple[torch.dtype, float, int]:
    """(elements' dtype, LARGEST, GROUP) of a spec for activations with scales of rows, or of groups of columns."""
    columns = spec.scales[0].block[1]
    return dtype_of(spec.element), largest(spec.element), 0 if columns == -1 else columns


def empty_rounded(x: torch.Tensor, n: int, dtype: torch.dtype, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for elements [T, n], and for their scales, on x's device, for as many rows as x has."""
    count = x.shape[0]
    codes = torch.empty((count, n), dtype=dtype, device=x.device)
    return codes, torch.empty((count, -(-n // group) if group else 1), dtype=torch.float32, device=x.device)


def quantize_rows(x: torch.Tensor, *, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """See core's op; groups of columns must be powers of two."""
    if x.stride(1) != 1:
        x = x.contiguous()
    count, n = x.shape
    dtype, most, group = rounding(spec)
    codes, scales = empty_rounded(x, n, dtype, group)
    if codes.numel():
        rows, block, warps = whole_rows(n, group)
        stride = x.stride(0)
        key = (x.dtype, dtype, n, stride, group, x.get_device()) if aligned(x, codes, scales) else None
        grid = (-(-count // rows), 1, 1)
        _quantize_rows(key, grid, warps, x, codes, scales, count, n, stride, most, group, rows, block)
    return codes, scales
