"""A few rows of activations times a weight of 8-bit or 16-bit elements, on matrix units: as fast as the weight is read.

One by one, elements cost several instructions each to become numbers and be added up: more than memory leaves time for.
Here 8-bit ones become float16 (in pairs, exactly) or x's dtype, or stay what they are, as int8 and 16-bit ones do, and
matrix units do the rest.

A program has 16 or more rows of the weight and all columns. Each of its warps takes every so many columns, a *span* of
64 bytes at a time, and their sums are added up once, at the end: sums have one order, and nothing is added across
programs.
Blocks of the weight wait in shared memory, several on their way at a time.

Axes: M rows of x, N rows of the weight (out), K columns (in). A *tile* is 8 rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from hardpoint.dtypes import dtype_of
from hardpoint.kernels.gemv import Scales
from hardpoint.kernels.launch import begun, in_stages_that_fit
from hardpoint.kernels.quantize import over
from hardpoint.kernels.reading import read_inside
from hardpoint.kernels.tables import NO_OPTIONS, Options, Table, table, table_of
from hardpoint.numerics import largest
from hardpoint_plugin_api import BuildContext, DeviceInfo, LinearCall, LinearKernel, LinearWorkload, Reason

LARGEST = {dtype_of(name): largest(name) for name in ("int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")}
"""The greatest magnitudes that symmetric scales map to."""

_MOST_PLAIN_ROWS = 2048
"""Of a plain weight that is worth it: from there on, libraries read at the same speed."""


@dataclass(frozen=True)
class SkinnyConfiguration:
    """How a product is cut: the tiles of x and of the weight that a program has, and how many blocks are on their way.

    A block is ``steps`` spans of columns to each of ``num_warps`` warps, and ``early`` blocks of the weight are read
    before the kernel waits for the one before it.
    """

    x_tiles: int
    weight_tiles: int
    num_warps: int
    num_stages: int
    steps: int = 1
    early: int = 0
    options: Options = NO_OPTIONS


SkinnyTable = Table[SkinnyConfiguration]

_FACTS: Mapping[str, type] = {"rows": int, "n": int, "x_itemsize": int, "itemsize": int}


def skinny_table(ctx: BuildContext) -> SkinnyTable:
    """The tuning table of the context's device. Raises ConfigError for a file that is not right."""
    return table_of(ctx, "skinny", SkinnyConfiguration, _FACTS)


@cache
def _portable_table() -> SkinnyTable:
    return table("skinny", SkinnyConfiguration, tuple(_FACTS.items()))


def skinny_configuration(
    num_rows: int, n: int, x_itemsize: int = 1, itemsize: int = 1, cuts: SkinnyTable | None = None
) -> SkinnyConfiguration:
    """The cut for ``num_rows`` rows of x, of ``x_itemsize`` bytes, and a weight of ``n`` rows, of ``itemsize`` bytes.

    ``cuts`` is a device's table, by default core's.
    """
    return (cuts or _portable_table()).find(rows=num_rows, n=n, x_itemsize=x_itemsize, itemsize=itemsize)


def skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    x_scales: Scales | None = None,
    weight_scales: Scales | None = None,
    *,
    round_x: bool = False,
    configuration: SkinnyConfiguration | None = None,
    cuts: SkinnyTable | None = None,
) -> torch.Tensor:
    """``x`` [M, K] times ``weight`` [N, K] (columns one by one), plus ``bias`` [N]: a new [M, N] of ``dtype``.

    The weight is of 8-bit elements, or of float16 or bfloat16 without scales. ``x`` is of the weight's elements, or
    float16 or bfloat16 where those have 8 bits. Groups of columns are multiples of 32. Products are added up in
    float32, those of whole numbers exactly. With ``round_x``, a plain ``x`` is rounded to the weight's 8-bit elements,
    by the scale given for all of it. The cut is ``configuration``, or else that of ``cuts``, by default core's table.
    """
    (num_rows, k), n = x.shape, weight.shape[0]
    out = torch.empty(num_rows, n, dtype=dtype, device=x.device)
    if not num_rows:
        return out
    x_group = x_scales.group if x_scales else 0
    weight_group = weight_scales.group if weight_scales else 0
    narrow = weight.element_size() == 1
    cut = configuration or skinny_configuration(num_rows, n, x.element_size(), weight.element_size(), cuts)
    grid = triton.cdiv(n, 8 * cut.weight_tiles), triton.cdiv(num_rows, 8 * cut.x_tiles)
    span = 32 if x_group % 64 or weight_group % 64 or not narrow else 64
    steps = 1 if x_group or weight_group else cut.steps

    def launch(num_stages: int) -> None:
        _skinny[grid](
            x,
            weight,
            x_scales and x_scales.values,
            weight_scales and weight_scales.values,
            bias,
            out,
            num_rows,
            n,
            k,
            x.stride(0),
            x.stride(1),
            weight.stride(0),
            x_scales.stride if x_scales else 0,
            weight_scales.stride if weight_scales else 0,
            ROUND_X=round_x,
            LARGEST=LARGEST.get(weight.dtype, 0.0),
            X_GROUP=x_group,
            WEIGHT_TILE_ROWS=(weight_scales and weight_scales.tile_rows) or 1,
            WEIGHT_GROUP=weight_group,
            SPAN=span,
            STEPS=steps,
            WHOLE=n % (8 * cut.weight_tiles) == 0 and k % (span * steps * cut.num_warps) == 0,
            WARPS=cut.num_warps,
            X_TILES=cut.x_tiles,
            WEIGHT_TILES=cut.weight_tiles,
            EARLY=min(cut.early, triton.cdiv(k, span * steps * cut.num_warps)),
            num_warps=cut.num_warps,
            num_stages=num_stages,
            **cut.options,
            **begun(x),
        )

    in_stages_that_fit((cut, span, steps, round_x, x.dtype, weight.dtype, x.device), cut.num_stages, launch)
    return out


class TritonSkinny(LinearKernel):
    """Plain weights of few rows as they stand in the checkpoint, for some rows of activations."""

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        self._cuts = skinny_table(ctx)

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse what libraries read as fast."""
        rows = workload.out_features or 0
        most = f"up to {_MOST_PLAIN_ROWS}"
        wide = Reason("out-features", "larger weights are read as fast by others", wanted=str(rows), supported=most)
        return [wide] if rows > _MOST_PLAIN_ROWS else []

    def apply(self, call: LinearCall) -> torch.Tensor:
        x, weight = call.x, call.weights["weight"]
        y = skinny(x.reshape(-1, x.shape[-1]), weight, call.bias, x.dtype, cuts=self._cuts)
        return y.view(*x.shape[:-1], weight.shape[0])


@triton.jit
def rounded_to(x, scale, LARGEST: tl.constexpr, ELEMENT: tl.constexpr):
    """float32 x over scales that were chosen without looking at it, as the nearest elements."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    exact = over(x, scale, inverse)
    x = tl.where(exact == exact, exact, x * inverse)  # an infinity has no remainder
    if ELEMENT == tl.int8:  # noqa: SIM300  # a parameter
        shift = 12582912.0  # 1.5 * 2 ** 23: adding it leaves whole numbers, rounded to the nearest, ties to even
        x = (x + shift) - shift
        x = tl.clamp(x, -LARGEST - 1.0, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    else:
        x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return x.to(ELEMENT)


@triton.jit
def _lines(TILES: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr):
    """A block as it is read: a span of a row to a line. The lines' rows [L, 1], and their columns [L, SPAN].

    Eight rows stand one after the other, then spans, then tiles: so 16 bytes to a thread make a span of eight rows what
    a warp reads at a time, whatever it is of.
    """
    line = tl.arange(0, TILES * SPANS * 8)
    rows = line // (SPANS * 8) * 8 + line % 8
    columns = (line // 8 % SPANS * SPAN)[:, None] + tl.arange(0, SPAN)[None, :]
    return rows[:, None], columns


@triton.jit
def _operand(
    block, TILES: tl.constexpr, STEPS: tl.constexpr, WARPS: tl.constexpr, SPAN: tl.constexpr, TURN: tl.constexpr
):
    """A block as matrix units take it: [WARPS, TILES * 8 rows, STEPS * SPAN columns].

    They want of four threads, side by side along a row, TURN columns each in turn: 4 bytes of the weight. A thread has
    read the fourth part of a span, so columns are counted in the order in which that is true: both operands' alike,
    which changes no product, and moves nothing.
    """
    block = block.reshape(TILES, STEPS, WARPS, 8, 4, SPAN // (8 * TURN), 2, TURN)
    return tl.permute(block, (2, 0, 3, 1, 5, 6, 4, 7)).reshape(WARPS, TILES * 8, STEPS * SPAN)


@triton.jit
def _scales_of_spans(ptrs, there, start, K, GROUP: tl.constexpr, WARPS: tl.constexpr, SPAN: tl.constexpr):
    """float32 [WARPS, rows] of the rows whose first scales are at ``ptrs``, for the spans from column ``start`` on."""
    span = start + tl.arange(0, WARPS) * SPAN
    mask = (span < K)[:, None] & there[None, :]
    return tl.load(ptrs[None, :] + (span // GROUP)[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _added(
    total,
    weight,
    x,
    start,
    x_there,
    weight_there,
    K,
    x_scale,
    x_scale_ptrs,
    weight_scale_ptrs,
    ROUND_X: tl.constexpr,
    LARGEST: tl.constexpr,
    X_GROUP: tl.constexpr,
    WEIGHT_GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    STEPS: tl.constexpr,
    WARPS: tl.constexpr,
    X_TILES: tl.constexpr,
    WEIGHT_TILES: tl.constexpr,
):
    """``total`` [WARPS, rows of the weight, rows of x], and what the blocks from column ``start`` on add to it."""
    element: tl.constexpr = weight.dtype
    turn: tl.constexpr = 32 // element.primitive_bitwidth
    plain: tl.constexpr = x.dtype.primitive_bitwidth == 16 and not ROUND_X
    number: tl.constexpr = x.dtype if plain else tl.int8 if element == tl.int8 else tl.float16
    sum_type: tl.constexpr = tl.int32 if number == tl.int8 else tl.float32
    weight = _operand(weight, WEIGHT_TILES, STEPS, WARPS, SPAN, turn)
    if number == tl.bfloat16 and element != number:
        weight = weight.to(tl.float32)  # devices convert to it faster than to bfloat16
    weight = weight.to(number)
    x = _operand(x, X_TILES, STEPS, WARPS, SPAN, turn)
    if ROUND_X:
        x = rounded_to(x.to(tl.float32), x_scale[None, :, None], LARGEST, element)
    x = tl.permute(x.to(number), (0, 2, 1))
    if X_GROUP != 0 or WEIGHT_GROUP != 0:
        product = tl.dot(weight, x, out_dtype=sum_type).to(tl.float32)
        if WEIGHT_GROUP != 0:
            scales = _scales_of_spans(weight_scale_ptrs, weight_there, start, K, WEIGHT_GROUP, WARPS, SPAN)
            product = product * scales[:, :, None]
        if X_GROUP != 0:
            scales = _scales_of_spans(x_scale_ptrs, x_there, start, K, X_GROUP, WARPS, SPAN)
            product = product * scales[:, None, :]
        total += product
    else:
        total = tl.dot(weight, x, total, out_dtype=sum_type)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _skinny(
    x_ptr,
    weight_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    N,
    K,
    x_stride_m,
    x_stride_k,
    weight_stride_n,
    x_scale_stride_m,
    weight_scale_stride_n,
    ROUND_X: tl.constexpr,
    LARGEST: tl.constexpr,
    X_GROUP: tl.constexpr,
    WEIGHT_TILE_ROWS: tl.constexpr,
    WEIGHT_GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE: tl.constexpr,
    WARPS: tl.constexpr,
    X_TILES: tl.constexpr,
    WEIGHT_TILES: tl.constexpr,
    EARLY: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """X_TILES tiles of x times WEIGHT_TILES tiles of the weight. WHOLE: these and blocks of columns end where it does.

    Groups are the columns that share a scale, 0 where all of a row do: there, a block is one span to each warp, which
    lies in one group. A null pointer is no scales at all. Scales of the weight's rows and the first EARLY blocks of
    columns are read while the kernel before this one may still run, and those multiplied last.
    """
    block: tl.constexpr = STEPS * WARPS * SPAN
    first_m, first_n = tl.program_id(1) * (8 * X_TILES), tl.program_id(0) * (8 * WEIGHT_TILES)
    m, n = first_m + tl.arange(0, 8 * X_TILES), first_n + tl.arange(0, 8 * WEIGHT_TILES)
    element: tl.constexpr = weight_ptr.dtype.element_ty
    weight_rows, weight_columns = _lines(WEIGHT_TILES, STEPS * WARPS, SPAN)
    weight_ptrs = weight_ptr + (first_n + weight_rows).to(tl.int64) * weight_stride_n + weight_columns
    weight_scale_ptrs = weight_scale_ptr
    if weight_scale_ptr is not None:
        weight_scale_ptrs = weight_scale_ptr + (n // WEIGHT_TILE_ROWS).to(tl.int64) * weight_scale_stride_n
    weight_scale = tl.full([8 * WEIGHT_TILES], 1.0, tl.float32)
    if weight_scale_ptr is not None and WEIGHT_GROUP == 0:
        weight_scale = tl.load(weight_scale_ptrs, mask=n < N, other=1.0).to(tl.float32)
    early = ()  # tuples: Triton has no lists of tensors
    for number in tl.static_range(EARLY):
        inside = (first_n + weight_rows < N) & (number * block + weight_columns < K)
        some = read_inside(weight_ptrs + number * block, inside, WHOLE)
        early = early + (some,)  # type: ignore[assignment]  # noqa: RUF005  # as Triton reads it
    if BEGIN is not None:
        BEGIN()
    sum_type: tl.constexpr = (
        tl.int32 if element == tl.int8 and (ROUND_X or x_ptr.dtype.element_ty == element) else tl.float32
    )
    grouped: tl.constexpr = X_GROUP != 0 or WEIGHT_GROUP != 0
    x_scale_ptrs = x_scale_ptr
    if x_scale_ptr is not None:
        x_scale_ptrs = x_scale_ptr + m.to(tl.int64) * x_scale_stride_m
    x_scale = tl.full([8 * X_TILES], 1.0, tl.float32)  # what all columns share is read before they are
    if x_scale_ptr is not None and X_GROUP == 0:
        x_scale = tl.load(x_scale_ptrs, mask=m < num_rows, other=1.0)

    x_rows, x_columns = _lines(X_TILES, STEPS * WARPS, SPAN)
    x_ptrs = x_ptr + (first_m + x_rows).to(tl.int64) * x_stride_m
    there = first_m + x_rows < num_rows
    early_x = ()
    for number in tl.static_range(EARLY):
        x_k = number * block + x_columns
        some = tl.load(x_ptrs + x_k.to(tl.int64) * x_stride_k, mask=there if WHOLE else there & (x_k < K), other=0.0)
        early_x = early_x + (some,)  # type: ignore[assignment]  # noqa: RUF005  # as Triton reads it
    total = tl.zeros([WARPS, 8 * WEIGHT_TILES, 8 * X_TILES], tl.float32 if grouped else sum_type)
    for start in tl.range(EARLY * block, K, block):
        x_k = start + x_columns
        inside = (first_n + weight_rows < N) & (start + weight_columns < K)
        weight = read_inside(weight_ptrs + start, inside, WHOLE)
        x = tl.load(x_ptrs + x_k.to(tl.int64) * x_stride_k, mask=there if WHOLE else there & (x_k < K), other=0.0)
        total = _added(
            total,
            weight,
            x,
            start,
            m < num_rows,
            n < N,
            K,
            x_scale,
            x_scale_ptrs,
            weight_scale_ptrs,
            ROUND_X,
            LARGEST,
            X_GROUP,
            WEIGHT_GROUP,
            SPAN,
            STEPS,
            WARPS,
            X_TILES,
            WEIGHT_TILES,
        )
    for number in tl.static_range(EARLY):
        total = _added(
            total,
            early[number],
            early_x[number],
            number * block,
            m < num_rows,
            n < N,
            K,
            x_scale,
            x_scale_ptrs,
            weight_scale_ptrs,
            ROUND_X,
            LARGEST,
            X_GROUP,
            WEIGHT_GROUP,
            SPAN,
            STEPS,
            WARPS,
            X_TILES,
            WEIGHT_TILES,
        )
    y = tl.sum(total, 0).to(tl.float32) * weight_scale[:, None] * x_scale[None, :]
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    there = (n < N)[:, None] & (m < num_rows)[None, :]
    tl.store(out_ptr + m.to(tl.int64)[None, :] * N + n[:, None], y.to(out_ptr.dtype.element_ty), mask=there)
