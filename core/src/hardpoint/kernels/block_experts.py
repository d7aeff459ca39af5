"""Experts whose weights have the blocks of GGUF files, laid out as those of linear layers (block_tiles.py).

block_product.py has the product: codes go from memory to registers and become numbers there.

Axes: P pairs of a token and an expert, E experts, N rows of a matrix (out), K its columns (in), T tiles of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint.kernels.block_product import block_product
from hardpoint.kernels.block_tiles import TILE_COLUMNS, TILE_ROWS, BlockTiles, unsupported_blocks
from hardpoint.kernels.expert_layouts import LaidOutExperts, store_pairs
from hardpoint.kernels.launch import begun
from hardpoint.kernels.pair_lists import PairList, pairs_of_tile
from hardpoint.kernels.paired_experts import Pairs
from hardpoint.kernels.tables import NO_OPTIONS, Options, table_of
from hardpoint_plugin_api import BuildContext, ExpertsWorkload, QuantSpec, Reason

_FACTS: Mapping[str, type] = {"rows": int, "pairs": int, "itemsize": int}


@dataclass(frozen=True)
class BlockExpertTiles:
    """A tile of one expert's products, and how many blocks of columns are on their way at a time.

    ``rows`` are pairs, ``columns`` rows of the weight. ``numbers_first``: see block_tuning.py.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    numbers_first: bool = False
    options: Options = NO_OPTIONS


class TritonBlockExperts(LaidOutExperts[BlockExpertTiles, BlockTiles]):
    """Integers of 2 to 8 bits in groups of 16 or 32 columns, in one or two levels, with or without minima.

    Either matrix may have a spec of its own.
    """

    layout = "triton_experts_block_tiles"
    tile_rows = TILE_ROWS

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        super().__init__(ctx, workload)
        self._cuts = table_of(ctx, "experts_blocks", BlockExpertTiles, _FACTS)

    @staticmethod
    def tiles_of(spec: QuantSpec, columns: int, dtype: torch.dtype) -> BlockTiles:
        return BlockTiles(spec, columns, dtype)

    @staticmethod
    def unsupported(spec: QuantSpec, columns: int) -> list[Reason]:
        return unsupported_blocks(spec, columns)

    def tiling(self, pairs: int) -> BlockExpertTiles:
        rows = -(-pairs // self._experts)
        return self._cuts.find(rows=rows, pairs=pairs, itemsize=self.ctx.dtype.itemsize)

    def launch(
        self,
        name: str,
        cut: BlockExpertTiles,
        x: torch.Tensor,
        out: torch.Tensor,
        listed: PairList,
        pairs: Pairs,
        num_stages: int,
    ) -> None:
        w, tiles, is_first = pairs.w, self._tiles[name], name == "w13"
        n = out.shape[1] * (2 if is_first and self._gated else 1)
        words, scales, outer = (w.get(f"{name}.{slot}") for slot in ("weight", "weight_scale", "weight_scale_2"))
        assert words is not None
        assert scales is not None
        multiply_blocks[(triton.cdiv(n, cut.columns) * listed.tiles,)](
            x,
            words,
            w.get(f"{name}.high"),
            scales,
            outer,
            w.get(f"{name}.weight_min"),
            w.get(f"{name}.weight_min_2"),
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
            0 if outer is None else outer.stride(0),
            pairs.ids.shape[1] if is_first else 1,
            ACTIVATION=self._activation if is_first else None,
            GATED=is_first and self._gated,
            GROUP=tiles.group,
            BIAS=tiles.bias,
            SIGNED=tiles.is_signed,
            WHOLE=x.shape[1] % TILE_COLUMNS == 0,
            LISTED_IN_PLACE=listed.lanes,
            BLOCK_M=cut.rows,
            BLOCK_N=cut.columns,
            NUMBERS_FIRST=cut.numbers_first,
            STAGES=num_stages,
            num_warps=cut.num_warps,
            num_stages=num_stages,
            **cut.options,
            **begun(x),
        )


@triton.jit(do_not_specialize=["num_pairs"])
def multiply_blocks(
    x,
    words,
    high,
    scales,
    outer,
    minima,
    outer_minima,
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
    outer_stride,
    divisor,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    SIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    LISTED_IN_PLACE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUMBERS_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Rows ``pair // divisor`` of x [., K] times the N rows of the pairs' expert -> rows ``pair`` of out.

    Strides are those of experts: of words and half words, of scales and minima, of the second level of both. Other
    parameters are those of ``block_product`` and ``store_pairs``.
    """
    if BEGIN is not None:
        BEGIN()
    blocks = tl.cdiv(N, BLOCK_N)
    tile, tile_n = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    expert, pairs = pairs_of_tile(ids, listed, tile, num_pairs, LISTED_IN_PLACE, BLOCK_M)
    if expert < 0:
        return
    expert = expert.to(tl.int64)
    # Triton before 3.7 lets no function return None, so each pointer that may be absent moves here.
    if high is not None:
        high += expert * words_stride
    if outer is not None:
        outer += expert * outer_stride
    if minima is not None:
        minima += expert * scales_stride
    if outer_minima is not None:
        outer_minima += expert * outer_stride
    source = tl.minimum(pairs, num_pairs - 1) // divisor  # where there is no pair, some row: nothing of it is stored
    y = block_product(
        (x + source.to(tl.int64) * K)[None, :],
        1,
        words + expert * words_stride,
        high,
        scales + expert * scales_stride,
        outer,
        minima,
        outer_minima,
        tile_n,
        0,
        T,
        N,
        K,
        T,
        GROUP,
        BIAS,
        SIGNED,
        WHOLE,
        BLOCK_M,
        BLOCK_N,
        NUMBERS_FIRST,
        STAGES,
    )
    store_pairs(y, bias, out, expert, pairs, tile_n, num_pairs, N, ACTIVATION, GATED, BLOCK_M, BLOCK_N)
