"""Experts whose weights have 4 bits, laid out in tiles (four_bit_tiles.py) as those of linear layers.

Codes go from memory to registers and become numbers there, for one pair of a token and an expert or for many
(tile_product.py).

Axes: T tokens, K experts of a token, P = T * K pairs, E experts, H hidden, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint.kernels.expert_layouts import LaidOutExperts, store_pairs
from hardpoint.kernels.four_bit_tiles import STEP, TILE_ROWS, FourBitTiles, unsupported_groups
from hardpoint.kernels.launch import begun
from hardpoint.kernels.pair_lists import PairList, pairs_of_tile
from hardpoint.kernels.paired_experts import BatchedPairs, Pairs
from hardpoint.kernels.tables import NO_OPTIONS, Options, table_of
from hardpoint.kernels.tile_product import tile_product
from hardpoint_plugin_api import BuildContext, ExpertsWorkload, QuantSpec, Reason

_FACTS: Mapping[str, type] = {"rows": int, "pairs": int, "itemsize": int}


@dataclass(frozen=True)
class ExpertTiles:
    """A tile of one expert's products, and how many blocks of columns are on their way at a time.

    ``rows`` are pairs, ``columns`` rows of the weight. With ``split``, each of the warps has all of the tile and
    columns of the sum of its own; see tile_product.py.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    split: bool = False
    options: Options = NO_OPTIONS


class TritonTiledExperts(LaidOutExperts[ExpertTiles, FourBitTiles]):
    """4-bit integers, or e2m1 with scales of a byte; activations as they are."""

    layout = "triton_experts_int4_tiles"
    tile_rows = TILE_ROWS

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        super().__init__(ctx, workload)
        self._cuts = table_of(ctx, "experts_int4", ExpertTiles, _FACTS)

    @staticmethod
    def tiles_of(spec: QuantSpec, columns: int, dtype: torch.dtype) -> FourBitTiles:
        return FourBitTiles(spec, columns, dtype)

    @staticmethod
    def unsupported(spec: QuantSpec, columns: int) -> list[Reason]:
        return unsupported_groups(spec, columns)

    def tiling(self, pairs: int) -> ExpertTiles:
        rows = -(-pairs // self._experts)
        return self._cuts.find(rows=rows, pairs=pairs, itemsize=self.ctx.dtype.itemsize)

    def launch(
        self,
        name: str,
        cut: ExpertTiles,
        x: torch.Tensor,
        out: torch.Tensor,
        listed: PairList,
        pairs: Pairs,
        num_stages: int,
    ) -> None:
        w, tiles, is_first = pairs.w, self._tiles[name], name == "w13"
        n = out.shape[1] * (2 if is_first and self._gated else 1)
        words, scales = w[f"{name}.weight"], w[f"{name}.weight_scale"]
        split = cut.num_warps if cut.split else 1
        multiply_tiles[(triton.cdiv(n, cut.columns) * listed.tiles,)](
            x,
            words,
            scales,
            w.get(f"{name}.weight_zero_point"),
            w.get(f"{name}.weight_scale_2"),
            w.get(f"{name}.bias"),
            out,
            pairs.ids,
            listed.listed,
            out.shape[0],
            n,
            x.shape[1],
            words.shape[2],
            words.stride(0),
            scales.stride(0),
            pairs.ids.shape[1] if is_first else 1,
            ACTIVATION=self._activation if is_first else None,
            GATED=is_first and self._gated,
            GROUP=tiles.group,
            ZERO_POINT=tiles.flip,
            STEP=1.0 if tiles.is_e2m1 else STEP[x.dtype],
            E2M1=tiles.is_e2m1,
            TILE=tiles.tile,
            WHOLE=x.shape[1] % (tiles.tile * split) == 0,
            EVEN=n % cut.columns == 0,
            SPLIT=split,
            LISTED_IN_PLACE=listed.lanes,
            BLOCK_M=cut.rows,
            BLOCK_N=cut.columns,
            STAGES=num_stages,
            num_warps=cut.num_warps,
            num_stages=num_stages,
            **cut.options,
            **begun(x),
        )


class TritonBatchedTiledExperts(BatchedPairs):
    """The same over batches."""

    layout = TritonTiledExperts.layout
    kind = TritonTiledExperts


@triton.jit(do_not_specialize=["num_pairs"])
def multiply_tiles(
    x,
    words,
    scales,
    zero_points,
    outer,
    bias,
    out,
    ids,
    listed,
    num_pairs,
    N,
    K,
    T,
    words_stride,
    scales_stride,
    divisor,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    STEP: tl.constexpr,
    E2M1: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    LISTED_IN_PLACE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Rows ``pair // divisor`` of x [., K] times the N rows of the pairs' expert -> rows ``pair`` of out.

    With ``GATED`` rows of the weight are a gate's and what it gates by turns, and out has half as many columns. Strides
    are those of experts. ``outer`` and ``bias`` are [E, N], or None; other parameters are those of ``tile_product``.
    """
    if BEGIN is not None:
        BEGIN()
    blocks = tl.cdiv(N, BLOCK_N)
    tile, tile_n = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    expert, pairs = pairs_of_tile(ids, listed, tile, num_pairs, LISTED_IN_PLACE, BLOCK_M)
    if expert < 0:
        return
    expert = expert.to(tl.int64)
    source = tl.minimum(pairs, num_pairs - 1) // divisor  # where there is no pair, some row: nothing of it is stored
    zero_points_of_expert = zero_points
    if zero_points is not None:
        zero_points_of_expert = zero_points + expert * T * N * 4
    y = tile_product(
        (x + source.to(tl.int64) * K)[None, :],
        1,
        words + expert * words_stride,
        scales + expert * scales_stride,
        zero_points_of_expert,
        tile_n,
        0,
        T,
        N,
        K,
        T,
        GROUP,
        ZERO_POINT,
        STEP,
        E2M1,
        TILE,
        WHOLE,
        EVEN,
        SPLIT,
        BLOCK_M,
        BLOCK_N,
        STAGES,
    )
    if outer is not None:
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        y = y * tl.load(outer + expert * N + n, mask=n < N, other=0.0)[:, None]
    store_pairs(y, bias, out, expert, pairs, tile_n, num_pairs, N, ACTIVATION, GATED, BLOCK_M, BLOCK_N)
