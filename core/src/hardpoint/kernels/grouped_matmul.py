"""Experts over plain weights: pairs of a token and an expert, brought together by expert in tiles of one matmul.

Rows are never copied into order. A tile is a list of pairs of one expert; the first matmul gathers their tokens, and
each result is stored where its pair stands, so that summing a token's results needs no list. Behind the first matmul
the activation is applied to what is still in registers.

Few pairs are listed by the programs that need them, with no launch of its own: the program of a pair does the work for
all pairs of its expert, if it is the first of them. Many are listed by two launches, a count and a placement, into as
many tiles as there could be; programs of tiles that are not there end at once.

Axes: T tokens, K experts of a token, P = T * K pairs, E experts, H hidden, I width of an expert.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from hardpoint.experts.middle import is_gated
from hardpoint.kernels.activation import activate, gated
from hardpoint.kernels.experts_tiling import MatmulShape, Tiling, TilingTable
from hardpoint_plugin_api import BuildContext, ExpertsKernel, ExpertsWorkload

_MOST_LISTED_IN_PLACE = 512
"""Pairs that every program reads; more are listed once."""
_ROWS_LISTED_IN_PLACE = 16
_COUNTED_AT_ONCE = 512
"""Pairs of one program of the two launches that list many."""
_LEAST_HALVED = 128
"""Rows of tiles of which half as many are still worth the whole width of a matrix unit."""
_ALIGNMENT = 256


class TritonGroupedExperts(ExpertsKernel):
    """Plain weights as they are. Tiles are those tuned for the device and the experts' shape, or chosen by rule.

    ``rows_of_w13`` are an expert's.
    """

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.num_experts is not None
        assert workload.top_k is not None
        assert workload.activation is not None
        assert workload.hidden_size is not None
        assert workload.intermediate_size is not None
        self._experts, self._top_k = workload.num_experts, workload.top_k
        self._hidden, self._width = workload.hidden_size, workload.intermediate_size
        self._activation, self._gated = workload.activation.removesuffix("_and_mul"), is_gated(workload.activation)
        self._descriptions: dict[tuple[int, MatmulShape], TensorDescriptor] = {}
        self.rows_of_w13 = self._width * (2 if self._gated else 1)
        self._tilings = TilingTable.of(ctx, self._experts, self._width, self._hidden)

    def workspace_bytes(self, rows: int) -> int:
        """For both matmuls' results, and the list of pairs by expert with the counts that it is made from."""
        return sum(map(_aligned, self._sizes(rows * self._top_k)))

    def _sizes(self, pairs: int) -> tuple[int, int, int]:
        """Bytes of the first matmul's results, of the second's, and of lists (at their longest)."""
        itemsize = self.ctx.dtype.itemsize
        listed = pairs + min(self._experts, pairs) * self._tilings.most_rows
        counts = triton.cdiv(pairs, _COUNTED_AT_ONCE) * triton.next_power_of_2(self._experts)
        return pairs * self._width * itemsize, pairs * self._hidden * itemsize, 4 * (listed + counts)

    def apply(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        w: dict[str, torch.Tensor],
        out: torch.Tensor,
        workspace: torch.Tensor,
        *,
        scales: torch.Tensor | None = None,
    ) -> None:
        tokens, top_k = ids.shape
        if not tokens:
            return
        self.run(self._tilings.of_pairs(tokens * top_k), x, ids, weights, w, out, workspace)

    def run(
        self,
        tiling: Tiling,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        w: dict[str, torch.Tensor],
        out: torch.Tensor,
        workspace: torch.Tensor,
    ) -> None:
        """``apply`` in the given tiles, of at least one token."""
        tokens, top_k = ids.shape
        pairs, width, hidden = tokens * top_k, self._width, self._hidden
        first, second, lists = workspace.split_with_sizes(_padded(self._sizes(pairs), workspace.numel()))[:3]
        middle = first.view(x.dtype)[: pairs * width]
        results = second.view(x.dtype)[: pairs * hidden]
        rows = tiling.rows
        in_place = pairs <= _MOST_LISTED_IN_PLACE and rows <= _ROWS_LISTED_IN_PLACE
        if in_place:
            listed, tiles, listed_size = ids, pairs, triton.next_power_of_2(pairs)
        else:
            tiles, listed_size = (pairs + min(self._experts, pairs) * (rows - 1)) // rows, 0
            listed = lists.view(torch.int32)
            self._list(ids, listed, tiles * rows, rows)
        for name, shape, source, divisor, target, columns, depth in (
            ("w13", tiling.w13, x, top_k, middle, width, hidden),
            ("w2", tiling.w2, middle, 1, results, hidden, width),
        ):
            is_first, weight = name == "w13", w[f"{name}.weight"]
            described = shape.described and _can_be_described(weight)
            _expert_tiles[tiles * triton.cdiv(columns, shape.columns),](
                source,
                self._description(weight, shape) if described else weight,
                target,
                ids,
                listed,
                pairs,
                columns,
                depth,
                divisor,
                self._activation if is_first else None,
                is_first and self._gated,
                listed_size,
                described,
                depth % shape.depth == 0,
                rows >= _LEAST_HALVED,
                rows,
                shape.columns,
                shape.depth,
                num_warps=shape.num_warps,
                num_stages=shape.num_stages,
            )
        block = min(triton.next_power_of_2(hidden), 1024 if tokens >= 64 else 256)
        _sum_of_results[tokens, triton.cdiv(hidden, block)](
            results, ids, weights, out, hidden, top_k, block, num_warps=4
        )

    def _description(self, weight: torch.Tensor, shape: MatmulShape) -> TensorDescriptor:
        """All experts' rows as one matrix, read in blocks. Made once for each place in memory."""
        key = weight.data_ptr(), shape
        if key not in self._descriptions:
            block = [shape.columns, shape.depth]
            self._descriptions[key] = TensorDescriptor.from_tensor(weight.flatten(0, 1), block)
        return self._descriptions[key]

    def _list(self, ids: torch.Tensor, listed: torch.Tensor, size: int, rows: int) -> None:
        """Write ``size`` places of ``listed``: pairs by expert, each expert's rounded up to whole tiles; counts go
        behind them."""
        pairs, experts = ids.numel(), triton.next_power_of_2(self._experts)
        programs = triton.cdiv(pairs, _COUNTED_AT_ONCE)
        counts = listed[size:]
        _count_pairs[programs,](ids, counts, listed, pairs, size, _COUNTED_AT_ONCE, experts, num_warps=4)
        _place_pairs[programs,](ids, counts, listed, pairs, rows, _COUNTED_AT_ONCE, experts, 16, num_warps=8)


def _can_be_described(weight: torch.Tensor) -> bool:
    """Whether rows begin where descriptors want them."""
    return weight.data_ptr() % 16 == 0 and weight.stride(1) * weight.itemsize % 16 == 0


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT


def _padded(sizes: tuple[int, ...], total: int) -> list[int]:
    """Sizes rounded up, and what remains of ``total``."""
    aligned = [_aligned(size) for size in sizes]
    return [*aligned, total - sum(aligned)]


@triton.jit(do_not_specialize=["num_pairs", "size"])
def _count_pairs(
    ids,
    counts,
    listed,
    num_pairs,
    size,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """How many of a program's pairs each expert has; and its share of the places, as if no pair stood there."""
    program = tl.program_id(0)
    at = program * PAIRS + tl.arange(0, PAIRS)
    experts = tl.load(ids + at, mask=at < num_pairs, other=-1)
    found = tl.histogram(tl.maximum(experts, 0), EXPERTS, mask=experts >= 0)
    tl.store(counts + program * EXPERTS + tl.arange(0, EXPERTS), found)
    for start in range(program * PAIRS, size, tl.num_programs(0) * PAIRS):
        places = start + tl.arange(0, PAIRS)
        tl.store(listed + places, tl.zeros([PAIRS], tl.int32) + num_pairs, mask=places < size)


@triton.jit(do_not_specialize=["num_pairs"])
def _place_pairs(
    ids,
    counts,
    listed,
    num_pairs,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Write a program's pairs to their places: by expert, then in the order of the pairs."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, EXPERTS)
    everywhere, before = tl.zeros([EXPERTS], tl.int32), tl.zeros([EXPERTS], tl.int32)
    for first in range(0, programs, COUNTS):
        others = first + tl.arange(0, COUNTS)
        found = tl.load(
            counts + others[:, None] * EXPERTS + experts[None, :], mask=(others < programs)[:, None], other=0
        )
        everywhere += tl.sum(found, axis=0)
        before += tl.sum(tl.where((others < program)[:, None], found, 0), axis=0)
    in_tiles = tl.cdiv(everywhere, ROWS) * ROWS
    starts = tl.cumsum(in_tiles, axis=0) - in_tiles + before
    lanes = tl.arange(0, PAIRS)
    at = program * PAIRS + lanes
    mine = tl.load(ids + at, mask=at < num_pairs, other=-1)
    rank = tl.zeros([PAIRS], tl.int32)
    for first in range(0, PAIRS, 16):
        lane = first + tl.arange(0, 16)
        other = program * PAIRS + lane
        theirs = tl.load(ids + other, mask=other < num_pairs, other=-1)
        is_earlier = (theirs[None, :] == mine[:, None]) & (lane[None, :] < lanes[:, None])
        rank += tl.sum(is_earlier.to(tl.int32), axis=1)
    place = tl.gather(starts, tl.maximum(mine, 0), 0) + rank
    tl.store(listed + place, at, mask=mine >= 0)


@triton.jit(do_not_specialize=["num_pairs"])
def _expert_tiles(
    x,
    weight,
    out,
    ids,
    listed,
    num_pairs,
    columns,
    depth,
    divisor,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    LISTED_IN_PLACE: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WHOLE_DEPTH: tl.constexpr,
    HALF_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Rows ``pair // divisor`` of x [., depth] times the matrix of the pairs' expert -> rows ``pair`` of out.

    weight is [E, columns, depth], or [E, 2 * columns, depth] with ``GATED``. ``LISTED_IN_PLACE`` is 0 where ``listed``
    holds a tile's pairs, and as many lanes as hold all pairs where there is no list. With ``HALF_ROWS`` an expert's
    last tile is half as high where that is enough: at two tiles an expert, whole ones would waste a quarter. With
    ``DESCRIBED`` weight is a tensor descriptor, of blocks [COLUMNS, DEPTH] of all experts' rows. Such blocks may reach
    into the next expert's rows, and nothing of that is stored.
    """
    blocks = tl.cdiv(columns, COLUMNS)
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    rows = tl.arange(0, ROWS)
    if LISTED_IN_PLACE:
        expert = tl.load(ids + tile)
        if expert < 0:
            return
        lanes = tl.arange(0, LISTED_IN_PLACE)
        is_alike = tl.load(ids + lanes, mask=lanes < num_pairs, other=-1) == expert
        rank = tl.sum((is_alike & (lanes < tile)).to(tl.int32), axis=0)
        if rank % ROWS != 0:
            return
        ranks = tl.where(is_alike, tl.cumsum(is_alike.to(tl.int32), axis=0) - 1 - rank, -1)
        pairs = tl.min(tl.where(ranks[None, :] == rows[:, None], lanes[None, :], num_pairs), axis=1)
        _multiply(
            x,
            weight,
            out,
            pairs,
            expert,
            block,
            num_pairs,
            columns,
            depth,
            divisor,
            ACTIVATION,
            GATED,
            DESCRIBED,
            WHOLE_DEPTH,
            ROWS,
            COLUMNS,
            DEPTH,
        )
    else:
        mine = listed + tile.to(tl.int64) * ROWS
        first = tl.load(mine)
        if first >= num_pairs:
            return
        expert = tl.load(ids + first)
        if HALF_ROWS and tl.load(mine + ROWS // 2) >= num_pairs:
            _multiply(
                x,
                weight,
                out,
                tl.load(mine + tl.arange(0, ROWS // 2)),
                expert,
                block,
                num_pairs,
                columns,
                depth,
                divisor,
                ACTIVATION,
                GATED,
                DESCRIBED,
                WHOLE_DEPTH,
                ROWS // 2,
                COLUMNS,
                DEPTH,
            )
        else:
            _multiply(
                x,
                weight,
                out,
                tl.load(mine + rows),
                expert,
                block,
                num_pairs,
                columns,
                depth,
                divisor,
                ACTIVATION,
                GATED,
                DESCRIBED,
                WHOLE_DEPTH,
                ROWS,
                COLUMNS,
                DEPTH,
            )


@triton.jit
def _multiply(
    x,
    weight,
    out,
    pairs,
    expert,
    block,
    num_pairs,
    columns,
    depth,
    divisor,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WHOLE_DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile: ``pairs`` [ROWS] of one expert, the columns of number ``block``."""
    is_row = pairs < num_pairs
    sources = tl.where(is_row, pairs, 0) // divisor
    at = block * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, DEPTH)
    x_at = x + sources.to(tl.int64)[:, None] * depth + inner[None, :]
    first_row = expert * columns * (2 if GATED else 1) + block * COLUMNS
    if not DESCRIBED:
        # Behind the last column the first ones are read again, which needs no mask; nothing is stored there.
        matrix = weight + expert.to(tl.int64) * columns * depth * (2 if GATED else 1)
        w_at = matrix + (at % columns)[:, None] * depth + inner[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        is_inside = (start + inner < depth)[None, :]
        if WHOLE_DEPTH:
            a = tl.load(x_at + start)
        else:
            a = tl.load(x_at + start, mask=is_inside, other=0.0)
        if DESCRIBED:
            b = weight.load([first_row, start])
        elif WHOLE_DEPTH:
            b = tl.load(w_at + start)
        else:
            b = tl.load(w_at + start, mask=is_inside, other=0.0)
        total = tl.dot(a, b.T, total, input_precision="ieee")
        if GATED:
            if DESCRIBED:
                c = weight.load([first_row + columns, start])
            elif WHOLE_DEPTH:
                c = tl.load(w_at + columns * depth + start)
            else:
                c = tl.load(w_at + columns * depth + start, mask=is_inside, other=0.0)
            up = tl.dot(a, c.T, up, input_precision="ieee")
    dtype = out.dtype.element_ty
    result = total.to(dtype)
    if GATED:
        result = gated(result, up.to(dtype), ACTIVATION)
    elif ACTIVATION is not None:
        result = activate(result.to(tl.float32), ACTIVATION).to(dtype)
    targets = out + pairs.to(tl.int64)[:, None] * columns + at[None, :]
    tl.store(targets, result, mask=is_row[:, None] & (at < columns)[None, :])


@triton.jit
def _sum_of_results(
    results,
    ids,
    weights,
    out,
    hidden,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token's results, each times its weight; those of experts that are not here were never written."""
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        is_here = tl.load(ids + pair) >= 0
        found = tl.load(results + pair * hidden + at, mask=is_here & (at < hidden), other=0.0).to(tl.float32)
        total += tl.where(is_here, found * tl.load(weights + pair), 0.0)
    tl.store(out + token * hidden + at, total, mask=at < hidden)
