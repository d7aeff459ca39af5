"""4-bit weights with scales for groups of columns; activations as they are, a few rows or many.

Matrix units do the work for any number of rows. The weight stands on their left side, where operands come from
registers: codes go from memory to registers as they are stored, become numbers there two at a time, and never travel
again. A row of the weight is laid out for that in *tiles* of 256 columns (128 for groups of 32), each word of which has
eight codes: of its lower and its upper half, the codes at the same *place* (0 to 3) are those of neighbouring columns,
and what one place of all words of a tile holds are neighbours, a quarter of the tile. So a product's step takes one
place of the words, and a group is a whole number of steps.

A pair becomes two numbers without a conversion: masked, each half is a number below the smallest normal one, in which
the code counts units of the last place. One multiply-add makes it ``(code - zero point) * step``, exactly, and the step
goes into the scale. A group's product is scaled in float32. For float32, codes are converted.

Axes: M rows of x, N rows of the weight (out), K columns (in), W words of a row, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from hardpoint.kernels.launch import begun
from hardpoint.quantization.numerics import pack_nibbles
from hardpoint_plugin_api import BuildContext, DeviceInfo, LinearKernel, LinearWorkload, Reason, dequantize

_LARGEST_TILE = 256
_STEP = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1.0}
"""What a code of one becomes: a factor that matrix units' elements can bring the smallest numbers to."""
_PROGRAMS = 200
"""Of four warps, for more than 8 rows of x: fewer leave multiprocessors of a large device idle."""
_MOST_PIECES = 4
_SUMS = 1024
"""Of pieces, that a program makes."""


class TritonInt4Linear(LinearKernel):
    """4-bit weights for any number of rows of activations."""

    layout = "triton_int4_tiles"

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse groups that are no whole number of places in a tile, or of tiles, or end within the last group."""
        assert workload.spec is not None
        group, columns = workload.spec[0].scales[0].block[1], workload.in_features or 0
        fits = group == -1 or (columns % group == 0 and (group in (32, 64, 128) or group % _LARGEST_TILE == 0))
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
        self.flip = 8 if self.spec.element == "int4" else 0

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``weight``: int32 [N, W]; ``weight_scale`` [G, N]; ``weight_zero_point``, if any: int32 [tiles of a row, N].

        Groups come first, so that rows of the weight that are worked on together have theirs side by side. A word has
        the zero points of a tile's groups (up to four), the first in the lowest byte, for codes from 0 to 15.
        """
        stored = weights["weight"]
        codes = torch.stack((stored & 0xF, stored >> 4), dim=-1).flatten(-2)[:, : self.columns] ^ self.flip
        places = pad(codes, (0, -self.columns % self.tile)).unflatten(1, (-1, 2, 2, self.tile // 8, 2))
        octets = places[:, :, :, 0] | (places[:, :, :, 1] << 4)
        packed = {
            "weight": octets.permute(0, 1, 3, 4, 2).flatten(1).view(torch.int32),
            "weight_scale": weights["weight_scale"].t().contiguous(),
        }
        if self.spec.zero_point:
            zero_points = (weights["weight_zero_point"].short() + self.flip).to(torch.uint8)
            packed["weight_zero_point"] = self._by_tiles(zero_points).t().contiguous()
        return packed

    def _by_tiles(self, zero_points: torch.Tensor) -> torch.Tensor:
        """Of uint8 [N, G], int32 [N, tiles of a row]."""
        tiles = -(-self.columns // self.tile)
        if not 0 < self.group <= self.tile:
            octets = zero_points.repeat_interleave(self.group // self.tile or tiles, 1).unsqueeze(-1)
        else:
            parts = self.tile // self.group
            octets = pad(zero_points, (0, tiles * parts - zero_points.shape[1])).unflatten(1, (tiles, parts))
        return pad(octets, (0, 4 - octets.shape[-1])).contiguous().view(torch.int32).squeeze(-1)

    def apply(self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        y = int4_matmul(x.reshape(-1, x.shape[-1]), weights, bias, self.group, self.flip)
        return y.view(*x.shape[:-1], y.shape[1])

    def unpack(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._numbers(weights)

    def rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return self._numbers(
            {name: value[ids] if name == "weight" else value[:, ids] for name, value in weights.items()}
        )

    def _numbers(self, packed: dict[str, torch.Tensor]) -> torch.Tensor:
        octets = packed["weight"].view(torch.uint8).unflatten(1, (-1, self.tile // 8, 2, 2)).permute(0, 1, 4, 2, 3)
        codes = torch.stack((octets & 0xF, octets >> 4), dim=3).flatten(1)[:, : self.columns]
        slots = {
            "weight": pack_nibbles(pad(codes, (0, self.columns % 2)) ^ self.flip),
            "weight_scale": packed["weight_scale"].t(),
        }
        if self.spec.zero_point:
            words = packed["weight_zero_point"].t()
            octets = torch.stack([words >> 8 * part & 0xFF for part in range(4)], dim=-1)
            if 0 < self.group <= self.tile:
                octets = octets[:, :, : self.tile // self.group].flatten(1)[:, : len(packed["weight_scale"])]
            else:
                octets = octets[:, :: self.group // self.tile or octets.shape[1], 0]
            slots["weight_zero_point"] = octets.short() - self.flip
        return dequantize(slots, self.spec, self.ctx.dtype)[:, : self.columns]


class DequantizedInt4Linear(TritonInt4Linear):
    """Makes numbers of the whole weight before each product, which is torch's: for very many rows of activations.

    The numbers take as much memory for that time as a plain weight.
    """

    def apply(self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        weight = int4_dequantize(weights, self.columns, x.dtype, self.group, self.flip)
        return torch.nn.functional.linear(x, weight, bias)


@dataclass(frozen=True)
class Int4Configuration:
    """A tile of the product, and how many blocks of columns are on their way at a time.

    With ``split``, each of the warps has all rows of the tile and columns of its own, and their sums are added up at
    the end, in one order. Without, they have rows each: 16 at least, or the work is done twice. ``pieces`` programs
    share the columns of a tile; what they found is added up by another kernel, in one order too.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split: bool = False
    pieces: int = 1


def int4_configuration(num_rows: int, n: int, itemsize: int) -> Int4Configuration:
    """The cut for ``num_rows`` rows of x, of elements of ``itemsize`` bytes, and a weight of ``n`` rows.

    Up to 8 rows of x: as many programs as there are 16 or 32 rows of the weight, whose warps split the columns; wider
    tiles would leave multiprocessors idle. More rows: wide tiles, so that x is not read too often, in pieces where
    those are fewer than what a large device wants. Best of a sweep on an H200 (docs/measurements/h200.md).
    """
    if itemsize == 4:  # no matrix units: what is multiplied at a time stands in registers
        return Int4Configuration(16, 32, 4, 1)
    narrow = n < 8192
    if num_rows <= 8:
        block_m = 8 if num_rows > 4 else triton.next_power_of_2(num_rows)
        return Int4Configuration(block_m, 16 if narrow else 32, 4, 3, split=True)
    if num_rows <= 32:
        cut = Int4Configuration(16 if num_rows <= 16 else 32, 64 if narrow else 128, 4, 3)
    else:
        cut = Int4Configuration(64, 64, 4, 3)
    programs, pieces = triton.cdiv(num_rows, cut.block_m) * triton.cdiv(n, cut.block_n), 1
    while pieces < _MOST_PIECES and programs * pieces < _PROGRAMS:
        pieces *= 2
    return replace(cut, pieces=pieces)


def int4_matmul(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    bias: torch.Tensor | None,
    group: int,
    zero_point: int,
    configuration: Int4Configuration | None = None,
) -> torch.Tensor:
    """``x`` [M, K] times packed ``weights``, plus ``bias`` [N]: a new [M, N].

    ``group`` 0 is a scale for each row; ``zero_point``, 0 or 8, is for all, where the weights have none of their own.
    """
    (num_rows, k), words = x.shape, weights["weight"]
    n = words.shape[0]
    out = x.new_empty(num_rows, n)
    if not num_rows:
        return out
    cut = configuration or int4_configuration(num_rows, n, x.element_size())
    tile = _tile(group)
    split = cut.num_warps if cut.split else 1
    found = out if cut.pieces == 1 else torch.empty(cut.pieces, num_rows, n, dtype=torch.float32, device=x.device)
    _int4_matmul[triton.cdiv(n, cut.block_n) * triton.cdiv(num_rows, cut.block_m), cut.pieces](
        x,
        words,
        weights["weight_scale"],
        weights.get("weight_zero_point"),
        bias if cut.pieces == 1 else None,
        found,
        num_rows,
        n,
        k,
        words.shape[1],
        weights["weight_scale"].shape[0],
        x.stride(0),
        x.stride(1),
        GROUP=group,
        ZERO_POINT=8 if "weight_zero_point" in weights else zero_point,
        STEP=_STEP[x.dtype],
        TILE=tile,
        WHOLE=k % (tile * split * cut.pieces) == 0,
        SPLIT=split,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        TILES_TOGETHER=8,
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
    n, tile = words.shape[0], _tile(group)
    out = torch.empty(n, k, dtype=dtype, device=words.device)
    _int4_dequantize[triton.cdiv(n, 16), words.shape[1] * 8 // tile](
        words,
        weights["weight_scale"],
        weights.get("weight_zero_point"),
        out,
        n,
        k,
        words.shape[1],
        weights["weight_scale"].shape[0],
        GROUP=group,
        ZERO_POINT=8 if "weight_zero_point" in weights else zero_point,
        STEP=_STEP[dtype],
        TILE=tile,
        BLOCK_N=16,
        num_warps=4,
        **begun(words),
    )
    return out


def _tile(group: int) -> int:
    """The columns of a tile, a quarter of which has one scale."""
    return 128 if group == 32 else _LARGEST_TILE


@triton.jit
def _halves(pairs, dtype: tl.constexpr):
    """The lower and the upper half of 32 bits, side by side in a new last axis."""
    lower, upper = pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16)
    return tl.join(lower.to(dtype, bitcast=True), upper.to(dtype, bitcast=True))


@triton.jit
def _numbers(words, place: tl.constexpr, zero, STEP: tl.constexpr, shape: tl.constexpr, dtype: tl.constexpr):
    """Of the codes at ``place`` (0 to 3) of words: ``code * STEP + zero``, in ``shape``, twice as long as words'."""
    if dtype == tl.float32:
        codes = tl.join((words >> (4 * place)) & 0xF, (words >> (4 * place + 16)) & 0xF)
        return codes.reshape(shape).to(tl.float32) * STEP + zero
    else:  # noqa: RET505  # Triton reads on after a return
        # Place 3 becomes eights of the smallest number: where it needs no mask, LLVM takes the halves apart.
        pairs = (words >> (4 * place)) & 0x000F000F if place < 3 else (words >> 9) & 0x00780078
        smallest: tl.constexpr = (2.0**-133 if dtype == tl.bfloat16 else 2.0**-24) * (1 if place < 3 else 8)
        return tl.fma(_halves(pairs, dtype).reshape(shape), tl.full(shape, STEP / smallest, dtype), zero)


@triton.jit
def _zero_point(octets, part: tl.constexpr, STEP: tl.constexpr, dtype: tl.constexpr):
    """Of the zero point of a tile's group: ``(8 - zero_point) * STEP``."""
    octet = (octets >> (8 * part)) & 0xFF
    if dtype == tl.float32:
        return (8.0 - octet.to(tl.float32)) * STEP
    else:  # noqa: RET505  # Triton reads on after a return
        smallest: tl.constexpr = 2.0**-133 if dtype == tl.bfloat16 else 2.0**-24
        number = octet.to(tl.uint16).to(dtype, bitcast=True)
        return tl.fma(number, tl.full(number.shape, -STEP / smallest, dtype), tl.full(number.shape, 8 * STEP, dtype))


@triton.jit
def _of_groups(ptr, tile, n, N, G, GROUP: tl.constexpr, TILE: tl.constexpr):
    """A tuple: the scales of each group of a tile, for rows ``n``."""
    found = ()
    for part in tl.static_range(1 if GROUP == 0 or GROUP > TILE else TILE // GROUP):
        group = tile * (TILE // GROUP) + part if GROUP <= TILE and GROUP != 0 else tile
        if GROUP > TILE:
            group = tile // (GROUP // TILE)
        if GROUP == 0:
            group = tile * 0
        there = (n < N) & (group < G)
        values = tl.load(ptr + tl.cast(group, tl.int64) * N + n, mask=there, other=0.0)
        found = found + (values,)  # type: ignore[assignment]  # noqa: RUF005  # as Triton reads it
    return found


@triton.jit(do_not_specialize=["num_rows"])
def _int4_matmul(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_point_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    N,
    K,
    W,
    G,
    x_stride_m,
    x_stride_k,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_TOGETHER: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """A tile of the product, transposed. TILES_TOGETHER rows of tiles are worked on at a time: they share the weight.

    SPLIT is the number of warps, where each has a tile of columns of its own, or 1. The program's second number says
    which piece of the columns it has. WHOLE says that each of these is a whole number of what it takes at a time.
    """
    if BEGIN is not None:
        BEGIN()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    words_of_tile: tl.constexpr = TILE // 8
    step_columns: tl.constexpr = TILE // 4
    parts: tl.constexpr = 1 if GROUP == 0 or GROUP > TILE else TILE // GROUP
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    stripe = tl.program_id(0) // (TILES_TOGETHER * tiles_n)
    height = tl.minimum(tiles_m - stripe * TILES_TOGETHER, TILES_TOGETHER)
    within = tl.program_id(0) % (TILES_TOGETHER * tiles_n)
    out_n = (within // height * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    out_m = ((stripe * TILES_TOGETHER + within % height) * BLOCK_M + tl.arange(0, BLOCK_M))[None, :]
    word, column = tl.arange(0, words_of_tile)[None, :], tl.arange(0, step_columns)[:, None]
    shape: tl.constexpr = (BLOCK_N, step_columns) if SPLIT == 1 else (SPLIT, BLOCK_N, step_columns)
    if SPLIT == 1:
        n, m, own = out_n, out_m, tl.zeros([1, 1], tl.int32)
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        n, m, own = out_n[None, :, :], out_m[None, :, :], tl.arange(0, SPLIT)[:, None, None]
        word, column = word[None, :, :], column[None, :, :]
        sums = tl.zeros([SPLIT, BLOCK_N, BLOCK_M], tl.float32)
    tiles = W // words_of_tile
    piece = tl.cdiv(tiles, SPLIT * tl.num_programs(1)) * SPLIT
    start = tl.program_id(1) * piece
    words_ptrs = words_ptr + n.to(tl.int64) * W + ((start + own) * words_of_tile + word)
    x_ptrs = x_ptr + m.to(tl.int64) * x_stride_m + ((start + own) * TILE + column).to(tl.int64) * x_stride_k
    scales = _of_groups(scale_ptr, start + own, n, N, G, GROUP, TILE)
    fixed = tl.full(shape, -ZERO_POINT * STEP, dtype)
    for first in tl.range(start, tl.minimum(start + piece, tiles), SPLIT):
        tile = first + own
        next_scales = scales  # read ahead here: Triton does so only for what products take
        if GROUP != 0:
            next_scales = _of_groups(scale_ptr, tile + SPLIT, n, N, G, GROUP, TILE)
        there = n < N if WHOLE else (n < N) & (tile < tiles)
        words = tl.load(words_ptrs, mask=there, other=0).to(tl.uint32, bitcast=True)
        if zero_point_ptr is not None:
            octets = tl.load(zero_point_ptr + tile.to(tl.int64) * N + n, mask=there, other=0)
        for part in tl.static_range(parts):
            product = tl.zeros_like(sums)
            for place in tl.static_range(part * (4 // parts), (part + 1) * (4 // parts)):
                there = m < num_rows
                if not WHOLE:
                    there = there & (tile * TILE + place * step_columns + column < K)
                x = tl.load(x_ptrs + place * step_columns * x_stride_k, mask=there, other=0.0)
                weight = _numbers(words, place, fixed, STEP, shape, dtype)
                if zero_point_ptr is not None:
                    weight = weight + _zero_point(octets, part, STEP, dtype)
                product = tl.dot(weight, x, product, input_precision="ieee")
            sums += product * (scales[part].to(tl.float32) * (1 / STEP))
        scales = next_scales
        x_ptrs += SPLIT * TILE * x_stride_k
        words_ptrs += SPLIT * words_of_tile
    y = sums if SPLIT == 1 else tl.sum(sums, 0)
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
    W,
    G,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """A tile's columns of BLOCK_N rows."""
    if BEGIN is not None:
        BEGIN()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    words_of_tile: tl.constexpr = TILE // 8
    step_columns: tl.constexpr = TILE // 4
    parts: tl.constexpr = 1 if GROUP == 0 or GROUP > TILE else TILE // GROUP
    shape: tl.constexpr = (BLOCK_N, step_columns)
    n, tile = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None], tl.program_id(1)
    word = tile * words_of_tile + tl.arange(0, words_of_tile)[None, :]
    words = tl.load(words_ptr + n.to(tl.int64) * W + word, mask=n < N, other=0).to(tl.uint32, bitcast=True)
    scales = _of_groups(scale_ptr, tile, n, N, G, GROUP, TILE)
    if zero_point_ptr is not None:
        octets = tl.load(zero_point_ptr + tile.to(tl.int64) * N + n, mask=n < N, other=0)
    fixed = tl.full(shape, -ZERO_POINT * STEP, dtype)
    for part in tl.static_range(parts):
        for place in tl.static_range(part * (4 // parts), (part + 1) * (4 // parts)):
            weight = _numbers(words, place, fixed, STEP, shape, dtype).to(tl.float32)
            if zero_point_ptr is not None:
                weight = weight + _zero_point(octets, part, STEP, dtype).to(tl.float32)
            weight = weight * (scales[part].to(tl.float32) * (1 / STEP))
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
