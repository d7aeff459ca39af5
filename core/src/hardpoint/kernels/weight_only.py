"""4-bit weights with scales for groups of columns; activations as they are, a few rows or many.

Matrix units do the work for any number of rows. The weight stands on their left side, where operands come from
registers: codes go from memory to registers as they are stored, become numbers there two at a time, and never travel
again. The weight is laid out for that in *tiles* of 16 rows and 256 columns (128 for groups of 32), which lie side by
side in memory. Each word of a tile's row has eight codes: of its lower and its upper half, the codes at the same
*place* (0 to 3) are those of neighbouring columns, and what one place of all words of a row holds are neighbours, a
quarter of the tile. So a product's step takes one place of the words, and a group is a whole number of steps.

A pair becomes two numbers without a conversion: masked, each half is a number below the smallest normal one, in which
the code counts units of the last place, or sixteens of them. One multiply-add makes it ``(code - zero point) * step``,
exactly, and the step goes into the result. A group's product is scaled in float32. For float32, codes are converted.
Codes of e2m1 become numbers by their bits. Groups of 16 columns, shorter than a step, are scaled before the product,
which is exact for scales of e4m3.

Zero points of groups are stored as what that multiply-add adds, ``-zero point * step``, for each quarter of a tile.

Axes: M rows of x, N rows of the weight (out), K columns (in), B blocks of 16 rows, T tiles of a row, W words of one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from hardpoint.kernels.int4_tuning import Int4Configuration, Int4Table, int4_configuration, int4_table
from hardpoint.kernels.launch import begun, in_stages_that_fit
from hardpoint.kernels.weight_only_numbers import (
    code_numbers,
    exchanged_columns,
    exchanged_words,
    quarters,
    read_where,
    scale_of,
    scales_of,
    with_short_groups,
    zero_points_of,
)
from hardpoint.numerics import pack_nibbles
from hardpoint_plugin_api import (
    BuildContext,
    DeviceInfo,
    LinearCall,
    LinearKernel,
    LinearWorkload,
    Reason,
    Scale,
    dequantize,
)

_LARGEST_TILE = 256
_TILE_ROWS = tl.constexpr(16)
_STEP = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1.0}
"""The value of code one: a factor that matrix units' elements can bring the smallest numbers to."""
_TILES_TOGETHER = 8
_SUMS = 1024
"""Of pieces, that a program makes."""


class TritonInt4Linear(LinearKernel):
    """4-bit integers, or e2m1 with scales of a byte, for any number of rows of activations."""

    layout = "triton_int4_tiles"

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse groups that are no whole number of places in a tile, or of tiles, or end within the last group."""
        assert workload.spec is not None
        group, columns = workload.spec[0].scales[0].block[1], workload.in_features or 0
        short = (16,) if workload.spec[0].element == "float4_e2m1" else ()
        groups = (*short, 32, 64, 128)
        fits = group == -1 or (columns % group == 0 and (group in groups or group % _LARGEST_TILE == 0))
        supported = f"32, 64, 128 or multiples of {_LARGEST_TILE}, that divide the columns"
        wanted = f"{group} of {columns}"
        return [] if fits else [Reason("group", "groups of columns", wanted=wanted, supported=supported)]

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.spec is not None
        assert workload.in_features is not None
        self.spec, self.columns = workload.spec[0], workload.in_features
        group = self.spec.scales[0].block[1]
        self.group = 0 if group == -1 else group
        self.tile = _tile(self.group)
        self._groups = self.columns // self.group if self.group else 1
        self.flip = 8 if self.spec.element == "int4" else 0
        self._is_e2m1 = self.spec.element == "float4_e2m1"
        self._cuts = int4_table(ctx)

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``weight``: int32 [B, T, 16, W]; ``weight_scale`` [T, N, scales]; ``weight_zero_point`` [T, N, 4], as x is.

        Of scales and zero points tiles come first, so that rows that are worked on together have theirs side by side,
        each row those of a tile's groups (up to four); for scales, groups that are longer than a tile stand in place
        of tiles. Zero points are those of a tile's quarters, times the step that codes from 0 to 15 have, and negative.
        """
        stored = weights["weight"]
        codes = torch.stack((stored & 0xF, stored >> 4), dim=-1).flatten(-2)[:, : self.columns] ^ self.flip
        whole = pad(codes, (0, -self.columns % self.tile, 0, -len(codes) % _TILE_ROWS.value))
        places = whole.unflatten(1, (-1, 2, 2, self.tile // 8, 2))
        octets = places[:, :, :, 0] | (places[:, :, :, 1] << 4)
        words = octets.permute(0, 1, 3, 4, 2).flatten(2).contiguous().view(torch.int32)
        packed = {
            "weight": words.unflatten(0, (-1, _TILE_ROWS.value)).transpose(1, 2).contiguous(),
            "weight_scale": self._scales_by_tiles(self._scales(weights["weight_scale"])),
        }
        if len(self.spec.scales) == 2:
            packed["weight_scale_2"] = weights["weight_scale_2"].float().expand(len(stored), 1)[:, 0].contiguous()
        if self.spec.zero_point:
            zero_points = weights["weight_zero_point"].short() + self.flip
            packed["weight_zero_point"] = self._zero_points_by_quarters(zero_points)
        return packed

    def _scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales as the kernel reads them: elements of one byte as bytes."""
        return scales.view(torch.uint8) if scales.itemsize == 1 else scales

    def _scales_by_tiles(self, scales: torch.Tensor) -> torch.Tensor:
        """[N, G] -> [T, N, scales of a tile]."""
        parts = _parts(self.group, self.tile)
        records: torch.Tensor = pad(scales, (0, -scales.shape[1] % parts)).unflatten(1, (-1, parts))
        return records.transpose(0, 1).contiguous()

    def _zero_points_by_quarters(self, zero_points: torch.Tensor) -> torch.Tensor:
        """[N, G] -> the numbers added for the zero points, [T, N, 4]."""
        tiles = -(-self.columns // self.tile)
        quarters = zero_points.repeat_interleave(4 * self.group // self.tile or 4 * tiles, 1)
        whole = pad(quarters, (0, 4 * tiles - quarters.shape[1])).unflatten(1, (tiles, 4)).transpose(0, 1)
        added: torch.Tensor = whole.to(self.ctx.dtype) * -_STEP[self.ctx.dtype]
        return added.contiguous()

    def apply(self, call: LinearCall) -> torch.Tensor:
        x = call.x
        rows = x.reshape(-1, x.shape[-1])
        y = int4_matmul(rows, call.weights, call.bias, self.group, self.flip, e2m1=self._is_e2m1, cuts=self._cuts)
        return y.view(*x.shape[:-1], y.shape[1])

    def unpack(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        words = weights["weight"].transpose(1, 2).flatten(0, 1)
        return self._numbers(weights | {"weight": words[: weights["weight_scale"].shape[1]]})

    def rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        blocks, within = ids // _TILE_ROWS.value, ids % _TILE_ROWS.value
        found = {name: value[:, ids] for name, value in weights.items() if value.ndim == 3}
        found |= {name: value[ids] for name, value in weights.items() if value.ndim == 1}
        return self._numbers(found | {"weight": weights["weight"][blocks, :, within]})

    def _numbers(self, packed: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of some rows, whose words are [rows, T, W]."""
        octets = packed["weight"].contiguous().view(torch.uint8).unflatten(2, (-1, 2, 2)).permute(0, 1, 4, 2, 3)
        codes = torch.stack((octets & 0xF, octets >> 4), dim=3).flatten(1)[:, : self.columns]
        slots = {
            "weight": pack_nibbles(pad(codes, (0, self.columns % 2)) ^ self.flip),
            "weight_scale": packed["weight_scale"].transpose(0, 1).flatten(1)[:, : self._groups],
        }
        spec = self.spec
        if self._is_e2m1:
            slots["weight_scale"] = slots["weight_scale"].contiguous().view(getattr(torch, spec.scales[0].format))
        if "weight_scale_2" in packed:
            slots["weight_scale_2"] = packed["weight_scale_2"][:, None]
            spec = replace(spec, scales=(spec.scales[0], Scale("float32", (1, -1))))
        if self.spec.zero_point:
            quarters = packed["weight_zero_point"].transpose(0, 1).flatten(1) / -_STEP[self.ctx.dtype]
            first_of_group = quarters[:, :: 4 * self.group // self.tile or quarters.shape[1]]
            slots["weight_zero_point"] = first_of_group[:, : self._groups].short() - self.flip
        return dequantize(slots, spec, self.ctx.dtype)[:, : self.columns]


class DequantizedInt4Linear(TritonInt4Linear):
    """Makes numbers of the whole weight before each product, which is torch's: for very many rows of activations.

    The numbers take as much memory for that time as a plain weight.
    """

    def apply(self, call: LinearCall) -> torch.Tensor:
        weight = int4_dequantize(call.weights, self.columns, call.x.dtype, self.group, self.flip)
        return torch.nn.functional.linear(call.x, weight, call.bias)


def int4_matmul(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    bias: torch.Tensor | None,
    group: int,
    zero_point: int,
    configuration: Int4Configuration | None = None,
    *,
    e2m1: bool = False,
    cuts: Int4Table | None = None,
) -> torch.Tensor:
    """``x`` [M, K] times packed ``weights``, plus ``bias`` [N]: a new [M, N].

    ``group`` 0 is a scale for each row; ``zero_point``, 0 or 8, is for all, where the weights have none of their own.
    With ``e2m1`` codes are that element's, with scales of a byte. A device whose multiprocessors have less shared
    memory than a cut takes has fewer blocks of columns on their way.
    ``cuts`` is a device's table, by default core's.
    """
    num_rows, n = x.shape[0], weights["weight_scale"].shape[1]
    if not num_rows:
        return x.new_empty(num_rows, n)
    cut = configuration or int4_configuration(num_rows, n, x.element_size(), cuts)

    def product(num_stages: int) -> torch.Tensor:
        fitting = cut if num_stages == cut.num_stages else replace(cut, num_stages=num_stages)
        return _product(x, weights, bias, group, zero_point, e2m1, fitting)

    kind = cut, group, x.dtype, "weight_zero_point" in weights, e2m1, x.device
    return in_stages_that_fit(kind, cut.num_stages, product)


def _product(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    bias: torch.Tensor | None,
    group: int,
    zero_point: int,
    e2m1: bool,
    cut: Int4Configuration,
) -> torch.Tensor:
    """``int4_matmul`` of at least one row, in one cut. Raises OutOfResources, with nothing launched."""
    (num_rows, k), n = x.shape, weights["weight_scale"].shape[1]
    out = x.new_empty(num_rows, n)
    tile = _tile(group)
    split = cut.num_warps if cut.split else 1
    found = out if cut.pieces == 1 else torch.empty(cut.pieces, num_rows, n, dtype=torch.float32, device=x.device)
    tiles_n, tiles_m = triton.cdiv(n, cut.block_n), triton.cdiv(num_rows, cut.block_m)
    together = 1 if cut.split or tiles_m == 1 else _TILES_TOGETHER
    _int4_matmul[(tiles_n, cut.pieces, tiles_m) if together == 1 else (tiles_n * tiles_m, cut.pieces)](
        x,
        weights["weight"],
        weights["weight_scale"],
        weights.get("weight_zero_point"),
        weights.get("weight_scale_2"),
        bias if cut.pieces == 1 else None,
        found,
        num_rows,
        n,
        k,
        weights["weight"].shape[1],
        x.stride(0),
        x.stride(1),
        GROUP=group,
        ZERO_POINT=zero_point,
        STEP=1.0 if e2m1 else _STEP[x.dtype],
        E2M1=e2m1,
        TILE=tile,
        WHOLE=k % (tile * split * cut.pieces) == 0,
        EVEN=n % cut.block_n == 0,
        SPLIT=split,
        PIECES=cut.pieces,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        TILES_TOGETHER=together,
        STAGES=cut.num_stages,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **begun(x),
    )
    if cut.pieces > 1:
        grid = (triton.cdiv(num_rows * n, _SUMS),)
        _sum_pieces[grid](found, bias, out, num_rows, n, cut.pieces, _SUMS, num_warps=4, **begun(x))
    return out


def int4_dequantize(
    weights: dict[str, torch.Tensor], k: int, dtype: torch.dtype, group: int, zero_point: int
) -> torch.Tensor:
    """Packed ``weights`` as a new [N, K] of ``dtype``; see ``int4_matmul``."""
    words = weights["weight"]
    n, tile = weights["weight_scale"].shape[1], _tile(group)
    out = torch.empty(n, k, dtype=dtype, device=words.device)
    _int4_dequantize[words.shape[:2]](
        words,
        weights["weight_scale"],
        weights.get("weight_zero_point"),
        out,
        n,
        k,
        words.shape[1],
        GROUP=group,
        ZERO_POINT=zero_point,
        STEP=_STEP[dtype],
        TILE=tile,
        num_warps=4,
        **begun(out),
    )
    return out


def _tile(group: int) -> int:
    """The columns of a tile, a quarter of which has one scale."""
    return 128 if group in (16, 32) else _LARGEST_TILE


def _parts(group: int, tile: int) -> int:
    """The groups that a tile has, whole ones, or 1."""
    return tile // group if 0 < group <= tile else 1


@triton.jit(do_not_specialize=["num_rows"])
def _int4_matmul(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_point_ptr,
    outer_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    N,
    K,
    T,
    x_stride_m,
    x_stride_k,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    STEP: tl.constexpr,
    E2M1: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """A tile of the product, transposed. TILES_TOGETHER rows of tiles are worked on at a time: they share the weight.

    SPLIT is the number of warps, where each has a tile of columns of its own, or 1. A program's second number says
    which of PIECES of the columns it has, its third, where TILES_TOGETHER is 1, which row of tiles. WHOLE says that
    each of these has a whole number of what it takes at a time, EVEN that N is a whole number of BLOCK_N. In place of
    rows beyond the last, the last one is read again. ``outer_ptr``, where it is not None, has a factor for each row of
    the weight. STAGES is the configuration's; the loop itself is told of it, as
    Triton otherwise reads nothing ahead but what products take: no scales and no zero points.
    """
    if BEGIN is not None:
        BEGIN()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    words_of_tile: tl.constexpr = TILE // 8
    step_columns: tl.constexpr = TILE // 4
    SHORT: tl.constexpr = GROUP == 16
    parts: tl.constexpr = 1 if GROUP == 0 or GROUP > TILE or SHORT else TILE // GROUP
    if TILES_TOGETHER > 1:
        tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
        stripe = tl.program_id(0) // (TILES_TOGETHER * tiles_n)
        height = tl.minimum(tiles_m - stripe * TILES_TOGETHER, TILES_TOGETHER)
        within = tl.program_id(0) % (TILES_TOGETHER * tiles_n)
        tile_n, tile_m = within // height, stripe * TILES_TOGETHER + within % height
    else:
        tile_n, tile_m = tl.program_id(0), tl.program_id(2)
    out_n = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    out_m = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M))[None, :]
    n = out_n if EVEN else tl.minimum(out_n, N - 1)
    m = out_m if BLOCK_M == 1 else tl.minimum(out_m, num_rows - 1)
    word, column = tl.arange(0, words_of_tile)[None, :], tl.arange(0, step_columns if SPLIT == 1 else TILE)[:, None]
    row = tl.arange(0, BLOCK_N)[:, None]
    shape: tl.constexpr = (BLOCK_N, step_columns) if SPLIT == 1 else (SPLIT, BLOCK_N, step_columns)
    if SPLIT == 1:
        own = tl.zeros([1, 1], tl.int32)
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        n, m, own = n[None, :, :], m[None, :, :], tl.arange(0, SPLIT)[:, None, None]
        word, column, row = word[None, :, :], column[None, :, :], row[None, :, :]
        sums = tl.zeros([SPLIT, BLOCK_N, BLOCK_M], tl.float32)
    start, end = 0, T
    if PIECES > 1:
        piece = tl.cdiv(T, SPLIT * PIECES) * SPLIT
        start = tl.program_id(1) * piece
        end = tl.minimum(start + piece, T)
    block = tile_n * (BLOCK_N // _TILE_ROWS) + row // _TILE_ROWS
    if not EVEN:
        block = tl.minimum(block, tl.cdiv(N, _TILE_ROWS) - 1)
    tile_words = (block.to(tl.int64) * T + (start + own)) * (_TILE_ROWS * words_of_tile)
    words_ptrs = words_ptr + tile_words + (row % _TILE_ROWS * words_of_tile + word)
    x_ptrs = x_ptr + m.to(tl.int64) * x_stride_m + ((start + own) * TILE + column).to(tl.int64) * x_stride_k
    if GROUP == 0:
        scales = scales_of(scale_ptr, start + own, n, N, None, GROUP, TILE)
    if zero_point_ptr is None:
        added = tl.full(shape, -ZERO_POINT * STEP, dtype)
    for first in tl.range(start, end, SPLIT, num_stages=STAGES):
        tile = first + own
        ahead = None if WHOLE else tile < T
        if GROUP != 0:
            scales = scales_of(scale_ptr, tile, n, N, ahead, GROUP, TILE)
        if zero_point_ptr is not None:
            zero_points = zero_points_of(zero_point_ptr, tile, n, N, ahead)
        words = read_where(words_ptrs, ahead).to(tl.uint32, bitcast=True)
        if SPLIT > 1:
            words = exchanged_words(words)
            xs = tl.load(x_ptrs) if WHOLE else tl.load(x_ptrs, mask=tile * TILE + column < K, other=0.0)
            xs = quarters(xs.reshape(SPLIT, 4, step_columns, BLOCK_M).permute(0, 2, 3, 1))
        for part in tl.static_range(parts):
            product = tl.zeros_like(sums)
            for place in tl.static_range(part * (4 // parts), (part + 1) * (4 // parts)):
                if SPLIT > 1:
                    x = exchanged_columns(xs[place])
                elif WHOLE:
                    x = tl.load(x_ptrs + place * step_columns * x_stride_k)
                else:
                    there = tile * TILE + place * step_columns + column < K
                    x = tl.load(x_ptrs + place * step_columns * x_stride_k, mask=there, other=0.0)
                if zero_point_ptr is not None:
                    added = tl.broadcast_to(zero_points[place], shape)
                weight = code_numbers(words, place, added, STEP, E2M1, shape, dtype)
                if SHORT:
                    weight = with_short_groups(weight, scales, place, SPLIT)
                product = tl.dot(weight, x, product, input_precision="ieee")
            if SHORT:
                sums += product
            else:
                sums += product * scale_of(scales, part, parts, scale_ptr.dtype.element_ty)
        x_ptrs += SPLIT * TILE * x_stride_k
        words_ptrs += SPLIT * _TILE_ROWS * words_of_tile
    y = (sums if SPLIT == 1 else tl.sum(sums, 0)) * (1 / STEP)
    if outer_ptr is not None:
        y = y * tl.load(outer_ptr + out_n, mask=out_n < N, other=0.0)
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + out_n, mask=out_n < N, other=0.0).to(tl.float32)
    there = (out_n < N) & (out_m < num_rows)
    out_row = tl.program_id(1).to(tl.int64) * num_rows + out_m
    tl.store(out_ptr + out_row * N + out_n, y.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _int4_dequantize(
    words_ptr,
    scale_ptr,
    zero_point_ptr,
    out_ptr,
    N,
    K,
    T,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """A tile's columns of 16 rows."""
    if BEGIN is not None:
        BEGIN()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    words_of_tile: tl.constexpr = TILE // 8
    step_columns: tl.constexpr = TILE // 4
    parts: tl.constexpr = 1 if GROUP == 0 or GROUP > TILE else TILE // GROUP
    shape: tl.constexpr = (_TILE_ROWS, step_columns)
    row, tile = tl.arange(0, _TILE_ROWS)[:, None], tl.program_id(1)
    n = tl.program_id(0) * _TILE_ROWS + row
    first = (tl.program_id(0).to(tl.int64) * T + tile) * (_TILE_ROWS * words_of_tile)
    word = row * words_of_tile + tl.arange(0, words_of_tile)[None, :]
    words = tl.load(words_ptr + first + word).to(tl.uint32, bitcast=True)
    scales = scales_of(scale_ptr, tile, n, N, n < N, GROUP, TILE)
    added = tl.full(shape, -ZERO_POINT * STEP, dtype)
    if zero_point_ptr is not None:
        zero_points = zero_points_of(zero_point_ptr, tile, n, N, n < N)
    for part in tl.static_range(parts):
        for place in tl.static_range(part * (4 // parts), (part + 1) * (4 // parts)):
            if zero_point_ptr is not None:
                added = tl.broadcast_to(zero_points[place], shape)
            weight = code_numbers(words, place, added, STEP, False, shape, dtype).to(tl.float32)
            weight = weight * (scale_of(scales, part, parts, scale_ptr.dtype.element_ty) * (1 / STEP))
            k = tile * TILE + place * step_columns + tl.arange(0, step_columns)[None, :]
            tl.store(out_ptr + n.to(tl.int64) * K + k, weight.to(dtype), mask=(n < N) & (k < K))


@triton.jit(do_not_specialize=["num_rows"])
def _sum_pieces(
    found_ptr, bias_ptr, out_ptr, num_rows, N, PIECES: tl.constexpr, BLOCK: tl.constexpr, BEGIN: tl.constexpr
):
    """``found`` [PIECES, M, N], added up in order, plus the bias."""
    if BEGIN is not None:
        BEGIN()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = num_rows.to(tl.int64) * N
    y = tl.load(found_ptr + place, mask=place < size, other=0.0)
    for piece in tl.static_range(1, PIECES):
        y += tl.load(found_ptr + piece * size + place, mask=place < size, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + place % N, mask=place < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=place < size)
