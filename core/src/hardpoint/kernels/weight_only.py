"""4-bit weights with scales for groups of columns; activations as they are, a few rows or many.

A row of the weight is laid out in *tiles* of 256 columns, which are 32 words: nibble ``j`` of word ``i`` is the code of
column ``32 j + i``. So what is unpacked at a time by one shift are neighbours, as are the activations that they meet,
and a group of 32, 64 or 128 columns is a whole number of nibbles' places.

A code becomes a number without a conversion: put into the mantissa of 1.0, it makes ``1 + code * 2 ** -s``. Activations
are multiplied by ``2 ** s`` beforehand, and what the ones add up to is taken off at the end (which makes NaN of
infinite activations). For float32, in whose last bits that would show, codes are converted.

Axes: M rows of x, N rows of the weight (out), K columns (in), W words of a row, G groups of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from hardpoint.kernels.gemm import GemmConfiguration
from hardpoint.kernels.gemv import GemvConfiguration, gemv_configuration
from hardpoint.quantization.numerics import pack_nibbles
from hardpoint_plugin_api import BuildContext, DeviceInfo, LinearKernel, LinearWorkload, Reason, dequantize

_TILE = 256
_WORDS = tl.constexpr(32)
_PROGRAMS = 512
"""Fewer than for wider elements: what is done to x is more beside what is done to a row of the weight."""
_MOST_SUMS = 8


class Int4Linear(LinearKernel):
    """What the products share: the layout, and the way back from it."""

    layout = "triton_int4_tiles"

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse groups that are no whole number of places in a tile, or of tiles, or end within the last group."""
        assert workload.spec is not None
        group, columns = workload.spec[0].scales[0].block[1], workload.in_features or 0
        fits = group == -1 or (columns % group == 0 and (group in (32, 64, 128) or group % _TILE == 0))
        supported = f"32, 64, 128 or multiples of {_TILE}, that divide the columns"
        wanted = f"{group} of {columns}"
        return [] if fits else [Reason("group", "groups of columns", wanted=wanted, supported=supported)]

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.spec is not None
        assert workload.in_features is not None
        self.spec, self.columns = workload.spec[0], workload.in_features
        group = self.spec.scales[0].block[1]
        self.group = 0 if group == -1 else group
        self.flip = 8 if self.spec.element == "int4" else 0

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``weight``: int32 [N, W]; ``weight_scale`` [G, N]; ``weight_zero_point``: uint8 [G, N], if any.

        Groups come first, so that one read brings the scales of all rows that a thread works on.
        """
        stored = weights["weight"]
        codes = torch.stack((stored & 0xF, stored >> 4), dim=-1).flatten(-2)[:, : self.columns] ^ self.flip
        places = pad(codes, (0, -self.columns % _TILE)).unflatten(1, (-1, 4, 2, _TILE // 8))
        octets = places[:, :, :, 0] | (places[:, :, :, 1] << 4)
        packed = {
            "weight": octets.transpose(2, 3).contiguous().view(torch.int32).flatten(1),
            "weight_scale": weights["weight_scale"].t().contiguous(),
        }
        if self.spec.zero_point:
            zero_points = (weights["weight_zero_point"].short() + self.flip).to(torch.uint8)
            packed["weight_zero_point"] = zero_points.t().contiguous()
        return packed

    def unpack(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._numbers(weights)

    def rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return self._numbers(
            {name: value[ids] if name == "weight" else value[:, ids] for name, value in weights.items()}
        )

    def _numbers(self, packed: dict[str, torch.Tensor]) -> torch.Tensor:
        octets = packed["weight"].view(torch.uint8).unflatten(1, (-1, _TILE // 8, 4)).transpose(2, 3)
        codes = torch.stack((octets & 0xF, octets >> 4), dim=3).flatten(1)[:, : self.columns]
        slots = {
            "weight": pack_nibbles(pad(codes, (0, self.columns % 2)) ^ self.flip),
            "weight_scale": packed["weight_scale"].t(),
        }
        if self.spec.zero_point:
            slots["weight_zero_point"] = packed["weight_zero_point"].t().short() - self.flip
        return dequantize(slots, self.spec, self.ctx.dtype)[:, : self.columns]


class TritonInt4Gemv(Int4Linear):
    """A few rows of activations."""

    def apply(self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        y = int4_gemv(x.reshape(-1, x.shape[-1]), weights, bias, self.group, self.flip)
        return y.view(*x.shape[:-1], y.shape[1])


class TritonInt4Gemm(Int4Linear):
    """Any number of rows of activations: weights become numbers in registers, on their way to matrix units."""

    def apply(self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        y = int4_gemm(x.reshape(-1, x.shape[-1]), weights, bias, self.group, self.flip)
        return y.view(*x.shape[:-1], y.shape[1])


def int4_gemv(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    bias: torch.Tensor | None,
    group: int,
    zero_point: int,
    configuration: GemvConfiguration | None = None,
) -> torch.Tensor:
    """``x`` [M, K] times packed ``weights``, plus ``bias`` [N]: a new [M, N].

    ``group`` 0 is a scale for each row; ``zero_point`` is for all, where the weights have none of their own.
    """
    (num_rows, k), words = x.shape, weights["weight"]
    n = words.shape[0]
    out = x.new_empty(num_rows, n)
    if not num_rows:
        return out
    cut = configuration or gemv_configuration(num_rows, n, 4 * words.shape[1], _PROGRAMS, _MOST_SUMS)
    _int4_gemv[-(-n // cut.block_n), -(-num_rows // cut.rows)](
        x,
        words,
        weights["weight_scale"],
        weights.get("weight_zero_point"),
        bias,
        out,
        num_rows,
        n,
        k,
        words.shape[1],
        weights["weight_scale"].shape[0],
        x.stride(0),
        x.stride(1),
        GROUP=group,
        ZERO_POINT=zero_point,
        EXACT=x.dtype == torch.float32,
        ROWS=cut.rows,
        BLOCK_N=cut.block_n,
        VECTORS=32 * cut.num_warps,
        UNROLL=cut.unroll,
        num_warps=cut.num_warps,
        num_stages=1,
    )
    return out


def int4_gemm_configuration(num_rows: int, itemsize: int) -> GemmConfiguration:
    """The tiles for ``num_rows`` rows of x, of elements of ``itemsize`` bytes; a whole tile of columns at a time."""
    if num_rows <= 16 or itemsize == 4:
        return GemmConfiguration(16, 32, _TILE, 4, 5 if itemsize < 4 else 1)
    if num_rows <= 64:
        return GemmConfiguration(32 if num_rows <= 32 else 64, 64, _TILE, 4, 4 if num_rows <= 32 else 3)
    return GemmConfiguration(128, 128, _TILE, 8, 3)


def int4_gemm(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    bias: torch.Tensor | None,
    group: int,
    zero_point: int,
    configuration: GemmConfiguration | None = None,
) -> torch.Tensor:
    """See ``int4_gemv``."""
    (num_rows, k), words = x.shape, weights["weight"]
    n = words.shape[0]
    out = x.new_empty(num_rows, n)
    if not num_rows:
        return out
    cut = configuration or int4_gemm_configuration(num_rows, x.element_size())
    _int4_gemm[triton.cdiv(n, cut.block_n) * triton.cdiv(num_rows, cut.block_m),](
        x,
        words,
        weights["weight_scale"],
        weights.get("weight_zero_point"),
        bias,
        out,
        num_rows,
        n,
        k,
        words.shape[1],
        weights["weight_scale"].shape[0],
        x.stride(0),
        x.stride(1),
        GROUP=group,
        ZERO_POINT=zero_point,
        EXACT=x.dtype == torch.float32,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        TILES_TOGETHER=8,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )
    return out


@triton.jit
def _number(words, place: tl.constexpr, EXACT: tl.constexpr):
    """Of the codes at ``place`` (0 to 7) of words: the code itself, or ``1 + code / _unit(place)``."""
    if EXACT:
        return ((words >> (4 * place)) & 0xF).to(tl.float32)
    # Codes of two neighbouring places are brought to bits 12 and 16 of the mantissa by the same shift.
    if place < 4:
        shifted = words << (12 - 8 * (place // 2))
    else:
        shifted = words >> (8 * (place // 2) - 12)
    code = shifted & (0xF << (12 + 4 * (place % 2)))
    return (code | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _unit(place: tl.constexpr, EXACT: tl.constexpr):
    return 1.0 if EXACT else (2048.0 if place % 2 == 0 else 128.0)


@triton.jit(do_not_specialize=["num_rows"])
def _int4_gemv(
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
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VECTORS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """ROWS rows of x times BLOCK_N rows of the weight; a thread reads four words of each at a time."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_row = tl.program_id(1) * ROWS
    vector = tl.arange(0, VECTORS)
    word = tl.arange(0, VECTORS * 4)
    words_ptrs = words_ptr + n.to(tl.int64)[:, None] * W + word[None, :]
    groups: tl.constexpr = 1 if GROUP == 0 or GROUP > 256 else 256 // GROUP
    sums = (tl.zeros([BLOCK_N, VECTORS], tl.float32),) * ROWS
    for start in tl.range(0, W, VECTORS * 4, loop_unroll_factor=UNROLL):
        words = tl.load(words_ptrs + start, mask=(n < N)[:, None] & (start + word < W)[None, :], other=0)
        words = words.to(tl.uint32, bitcast=True).reshape(BLOCK_N, VECTORS, 4)
        tile = (start + vector * 4) // _WORDS
        first_column = (start + word) // _WORDS * 256 + (start + word) % _WORDS
        for part in tl.static_range(groups):
            group = tile * groups + part if GROUP <= 256 else tile // (GROUP // 256)
            if GROUP == 0:
                group = tile * 0
            of_group = group.to(tl.int64)[None, :] * N + n[:, None]
            there = (n < N)[:, None] & (group < G)[None, :]
            scale = tl.load(scale_ptr + of_group, mask=there, other=0.0).to(tl.float32)
            zero_point = tl.full([BLOCK_N, VECTORS], ZERO_POINT, tl.float32)
            if zero_point_ptr is not None:
                zero_point = tl.load(zero_point_ptr + of_group, mask=there, other=0).to(tl.float32)
            added = ()
            for row in tl.static_range(ROWS):
                m = (first_row + row).to(tl.int64)
                products = tl.zeros([BLOCK_N, VECTORS, 4], tl.float32)
                even = tl.zeros([1, VECTORS, 4], tl.float32)
                odd = tl.zeros([1, VECTORS, 4], tl.float32)
                for place in tl.static_range(part * (8 // groups), (part + 1) * (8 // groups)):
                    k = first_column + place * _WORDS
                    x = tl.load(
                        x_ptr + m * x_stride_m + k.to(tl.int64) * x_stride_k, mask=(m < num_rows) & (k < K), other=0.0
                    )
                    x = x.to(tl.float32).reshape(1, VECTORS, 4)
                    products += _number(words, place, EXACT) * (x * _unit(place, EXACT))
                    if place % 2 == 0:
                        even += x
                    else:
                        odd += x
                product = tl.sum(products, 2)
                if not EXACT:
                    product -= tl.sum(even * _unit(0, EXACT) + odd * _unit(1, EXACT), 2)
                product = scale * (product - zero_point * tl.sum(even + odd, 2))
                added = added + (sums[row] + product,)  # type: ignore[assignment]  # noqa: RUF005  # as Triton reads it
            sums = added
    for row in tl.static_range(ROWS):
        m = (first_row + row).to(tl.int64)
        y = tl.sum(sums[row], 1)
        if bias_ptr is not None:
            y = y + tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + m * N + n, y.to(out_ptr.dtype.element_ty), mask=(n < N) & (m < num_rows))


@triton.jit(do_not_specialize=["num_rows"])
def _int4_gemm(
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
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_TOGETHER: tl.constexpr,
):
    """A tile of the product, transposed: the weight stands on the left, which matrix units take from registers."""
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    stripe = tl.program_id(0) // (TILES_TOGETHER * tiles_n)
    first_m = stripe * TILES_TOGETHER
    height = tl.minimum(tiles_m - first_m, TILES_TOGETHER)
    within = tl.program_id(0) % (TILES_TOGETHER * tiles_n)
    m = (first_m + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.arange(0, _WORDS)
    x_ptrs = x_ptr + m.to(tl.int64)[None, :] * x_stride_m + word.to(tl.int64)[:, None] * x_stride_k
    words_ptrs = words_ptr + n.to(tl.int64)[:, None] * W + word[None, :]
    groups: tl.constexpr = 1 if GROUP == 0 or GROUP > 256 else 256 // GROUP
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for tile in tl.range(0, W // _WORDS):
        words = tl.load(words_ptrs, mask=(n < N)[:, None], other=0).to(tl.uint32, bitcast=True)
        for part in tl.static_range(groups):
            group = tile * groups + part if GROUP <= 256 else tile // (GROUP // 256)
            if GROUP == 0:
                group = tile * 0
            of_group = tl.cast(group, tl.int64) * N + n
            there = (n < N) & (group < G)
            scale = tl.load(scale_ptr + of_group, mask=there, other=0.0).to(tl.float32)
            zero_point = tl.full([BLOCK_N], ZERO_POINT, tl.float32)
            if zero_point_ptr is not None:
                zero_point = tl.load(zero_point_ptr + of_group, mask=there, other=0).to(tl.float32)
            for place in tl.static_range(part * (8 // groups), (part + 1) * (8 // groups)):
                unit = _unit(place, EXACT)
                if EXACT:
                    weight = (_number(words, place, EXACT) - zero_point[:, None]) * scale[:, None]
                else:
                    weight = _number(words, place, EXACT) * (scale * unit)[:, None]
                    weight = weight - (scale * (unit + zero_point))[:, None]
                inside = tile * 256 + place * _WORDS + word < K
                x = tl.load(
                    x_ptrs + place * _WORDS * x_stride_k, mask=inside[:, None] & (m < num_rows)[None, :], other=0.0
                )
                sums = tl.dot(weight.to(x.dtype), x, sums, input_precision="ieee")
        x_ptrs += 256 * x_stride_k
        words_ptrs += _WORDS
    y = sums
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    there = (n < N)[:, None] & (m < num_rows)[None, :]
    tl.store(out_ptr + m.to(tl.int64)[None, :] * N + n[:, None], y.to(out_ptr.dtype.element_ty), mask=there)
