"""Experts whose weights have 4 bits, laid out in tiles (four_bit_tiles.py) as those of linear layers.

Codes go from memory to registers and become numbers there, for one pair of a token and an expert or for many
(tile_product.py). A gate's rows and those of what it gates lie in turns, so that a program has both of them.

Axes: T tokens, K experts of a token, P = T * K pairs, E experts, H hidden, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from hardpoint.experts.middle import unsupported_activation
from hardpoint.kernels.activation import activate, gated
from hardpoint.kernels.four_bit_tiles import STEP, TILE_ROWS, FourBitTiles, unsupported_groups
from hardpoint.kernels.launch import begun, in_stages_that_fit
from hardpoint.kernels.pair_lists import PairList, pairs_of_tile
from hardpoint.kernels.paired_experts import BatchedPairs, PairedExperts, Pairs
from hardpoint.kernels.tables import NO_OPTIONS, Options, table_of
from hardpoint.kernels.tile_product import tile_product
from hardpoint_plugin_api import BuildContext, DeviceInfo, ExpertsWorkload, Reason
from hardpoint_plugin_api.experts import MATRICES, expert_matrix

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


class TritonTiledExperts(PairedExperts[ExpertTiles]):
    """4-bit integers, or e2m1 with scales of a byte; activations as they are."""

    layout = "triton_experts_int4_tiles"
    most_rows = 128

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.spec is not None
        spec, dtype = workload.spec[0], ctx.dtype
        self._tiles = {"w13": FourBitTiles(spec, self._hidden, dtype), "w2": FourBitTiles(spec, self._width, dtype)}
        self._cuts = table_of(ctx, "experts_int4", ExpertTiles, _FACTS)

    @classmethod
    def supports(cls, workload: ExpertsWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse activations that are not known, groups that tiles cannot have, and rows that tiles do not divide."""
        reasons = unsupported_activation(workload.activation)
        if workload.spec is None:
            return reasons
        for name, columns, least in (
            ("hidden_size", workload.hidden_size, TILE_ROWS),
            ("intermediate_size", workload.intermediate_size, TILE_ROWS // 2),  # of a gate there are as many rows again
        ):
            if columns is not None:
                reasons += unsupported_groups(workload.spec[0], columns)
            if columns is not None and columns % least:
                reasons.append(Reason(name, name, wanted=str(columns), supported=f"multiples of {least}"))
        return reasons

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each expert's matrix as ``FourBitTiles.packed`` has it; rows of a gate and of what it gates by turns."""
        packed: dict[str, torch.Tensor] = {}
        for name in MATRICES:
            each = [self._packed(name, expert_matrix(weights, name, e)) for e in range(self._experts)]
            packed |= {f"{name}.{slot}": torch.stack([one[slot] for one in each]) for slot in each[0]}
        return packed

    def _packed(self, name: str, slots: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One expert's matrix."""
        if name == "w13" and self._gated:
            slots = {slot: w.unflatten(0, (2, self._width)).transpose(0, 1).flatten(0, 1) for slot, w in slots.items()}
        bias = {"bias": slots.pop("bias")} if "bias" in slots else {}
        return self._tiles[name].packed(slots) | bias

    def unpack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name in MATRICES:
            each = [expert_matrix(weights, name, number) for number in range(self._experts)]
            found[name] = torch.stack([self._tiles[name].unpacked(slots) for slots in each])
        if self._gated:
            found["w13"] = found["w13"].unflatten(1, (self._width, 2)).transpose(1, 2).flatten(1, 2)
        return found

    def tiling(self, pairs: int) -> ExpertTiles:
        rows = -(-pairs // self._experts)
        return self._cuts.find(rows=rows, pairs=pairs, itemsize=self.ctx.dtype.itemsize)

    def multiply(self, tiling: ExpertTiles, pairs: Pairs) -> None:
        pair_list = self._lists.of(pairs.ids, pairs.lists, tiling.rows)
        for name, x, out in (("w13", pairs.x, pairs.middle), ("w2", pairs.middle, pairs.results)):
            launch = partial(self._launch, name, tiling, x, out, pair_list, pairs)
            in_stages_that_fit((name, tiling, self.workload, x.device), tiling.num_stages, launch)

    def _launch(
        self,
        name: str,
        cut: ExpertTiles,
        x: torch.Tensor,
        out: torch.Tensor,
        pair_list: PairList,
        pairs: Pairs,
        num_stages: int,
    ) -> None:
        """``out`` [P, columns]: rows of ``x`` [P / K or P, .] times the matrix ``name`` of their experts."""
        w, tiles, is_first = pairs.w, self._tiles[name], name == "w13"
        n = out.shape[1] * (2 if is_first and self._gated else 1)
        words, scales = w[f"{name}.weight"], w[f"{name}.weight_scale"]
        split = cut.num_warps if cut.split else 1
        multiply_tiles[(triton.cdiv(n, cut.columns) * pair_list.tiles,)](
            x,
            words,
            scales,
            w.get(f"{name}.weight_zero_point"),
            w.get(f"{name}.weight_scale_2"),
            w.get(f"{name}.bias"),
            out,
            pairs.ids,
            pair_list.listed,
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
            LISTED_IN_PLACE=pair_list.lanes,
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
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if outer is not None:
        y = y * tl.load(outer + expert * N + n, mask=n < N, other=0.0)[:, None]
    if bias is not None:
        y = y + tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    dtype = out.dtype.element_ty
    y = y.to(dtype)
    if GATED:
        gate, up = tl.split(y.reshape(BLOCK_N // 2, 2, BLOCK_M).permute(0, 2, 1))
        y = gated(gate, up, ACTIVATION)
        columns, at = N // 2, tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        if ACTIVATION is not None:
            y = activate(y.to(tl.float32), ACTIVATION).to(dtype)
        columns, at = N, n
    targets = out + pairs.to(tl.int64)[None, :] * columns + at[:, None]
    tl.store(targets, y, mask=(pairs < num_pairs)[None, :] & (at < columns)[:, None])
