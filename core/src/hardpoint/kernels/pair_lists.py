"""A step's pairs of a token and an expert, brought together by expert in tiles of rows.

Few pairs are listed by the programs that need them, with no launch of its own: the program of a pair does the work for
all pairs of its expert, if it is the first of them. Many are listed by two launches, a count and a placement, into as
many tiles as there could be; programs of tiles that are not there end at once.

Axes: T tokens, K experts of a token, P = T * K pairs, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint.kernels.launch import begun

_MOST_LISTED_IN_PLACE = 512
"""Pairs that every program reads; more are listed once."""
_ROWS_LISTED_IN_PLACE = 16
_COUNTED_AT_ONCE = 256
"""Pairs of one program of the two launches that list many."""
_COMPARED_AT_ONCE = 32
"""Of them, with all of a program's: more take more registers, fewer more rounds."""
_COUNTS_AT_ONCE = 8192
"""Of all programs and experts, that a program adds up in one round."""


@dataclass(frozen=True)
class PairList:
    """Pairs by expert, as ``pairs_of_tile`` reads them, and the number of tiles that there may be.

    ``lanes`` is 0 where there is a list, else as many as hold all pairs; 1 for tiles of one row.
    """

    listed: torch.Tensor
    tiles: int
    lanes: int


class PairLists:
    """Lists pairs of ``num_experts`` experts."""

    def __init__(self, num_experts: int) -> None:
        self._experts = num_experts

    def nbytes(self, pairs: int, most_rows: int) -> int:
        """Bytes of a list of ``pairs`` in tiles of up to ``most_rows``, with the counts that it is made from."""
        listed = pairs + min(self._experts, pairs) * most_rows
        counts: int = triton.cdiv(pairs, _COUNTED_AT_ONCE) * triton.next_power_of_2(self._experts)
        return 4 * (listed + counts)

    def of(self, ids: torch.Tensor, scratch: torch.Tensor, rows: int) -> PairList:
        """The pairs of ``ids`` int32 [T, K] in tiles of ``rows``; ``scratch`` uint8 has ``nbytes``."""
        pairs = ids.numel()
        if rows == 1:
            return PairList(ids, pairs, 1)
        if pairs <= _MOST_LISTED_IN_PLACE and rows <= _ROWS_LISTED_IN_PLACE:
            return PairList(ids, pairs, triton.next_power_of_2(pairs))
        listed, tiles = scratch.view(torch.int32), (pairs + min(self._experts, pairs) * (rows - 1)) // rows
        self._write(ids, listed, tiles * rows, rows)
        return PairList(listed, tiles, 0)

    def _write(self, ids: torch.Tensor, listed: torch.Tensor, size: int, rows: int) -> None:
        """Write ``size`` places of ``listed``: pairs by expert, each expert's rounded up to whole tiles; counts go
        behind them."""
        pairs, experts = ids.numel(), triton.next_power_of_2(self._experts)
        programs = triton.cdiv(pairs, _COUNTED_AT_ONCE)
        counts = listed[size:]
        alike = _COUNTED_AT_ONCE, experts
        count_pairs[programs,](ids, counts, listed, pairs, size, *alike, num_warps=4, **begun(ids))
        counts_of = max(1, _COUNTS_AT_ONCE // experts)
        place_pairs[programs,](
            ids, counts, listed, pairs, rows, *alike, _COMPARED_AT_ONCE, counts_of, num_warps=8, **begun(ids)
        )


@triton.jit
def pairs_of_tile(ids, listed, tile, num_pairs, LISTED_IN_PLACE: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a tile, or -1 where there is no such tile, and the tile's pairs [ROWS].

    ``LISTED_IN_PLACE`` is a list's ``lanes``. Pairs that are not there are ``num_pairs``.
    """
    rows = tl.arange(0, ROWS)
    if ROWS == 1:
        expert = tl.load(ids + tile)
        pairs = rows + tile
    elif LISTED_IN_PLACE:
        lanes = tl.arange(0, LISTED_IN_PLACE)
        expert = tl.load(ids + tile)
        is_alike = tl.load(ids + lanes, mask=lanes < num_pairs, other=-1) == expert
        rank = tl.sum((is_alike & (lanes < tile)).to(tl.int32), axis=0)
        ranks = tl.where(is_alike, tl.cumsum(is_alike.to(tl.int32), axis=0) - 1 - rank, -1)
        pairs = tl.min(tl.where(ranks[None, :] == rows[:, None], lanes[None, :], num_pairs), axis=1)
        expert = tl.where(rank % ROWS == 0, expert, -1)
    else:
        mine = listed + tile.to(tl.int64) * ROWS
        first = tl.load(mine)
        # While kernels are compiled ahead, the launch that makes the list may be left out: anything stands there then.
        is_listed = (first >= 0) & (first < num_pairs)
        expert = tl.load(ids + first, mask=is_listed, other=-1)
        pairs = tl.load(mine + rows)
        pairs = tl.where(pairs < 0, num_pairs, pairs)
    return expert, pairs


@triton.jit(do_not_specialize=["num_pairs", "size"])
def count_pairs(
    ids,
    counts,
    listed,
    num_pairs,
    size,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """How many of a program's pairs each expert has; and its share of the places, as if no pair stood there."""
    if BEGIN is not None:
        BEGIN()
    program = tl.program_id(0)
    at = program * PAIRS + tl.arange(0, PAIRS)
    experts = tl.load(ids + at, mask=at < num_pairs, other=-1)
    found = tl.histogram(tl.maximum(experts, 0), EXPERTS, mask=experts >= 0)
    tl.store(counts + program * EXPERTS + tl.arange(0, EXPERTS), found)
    for start in range(program * PAIRS, size, tl.num_programs(0) * PAIRS):
        places = start + tl.arange(0, PAIRS)
        tl.store(listed + places, tl.zeros([PAIRS], tl.int32) + num_pairs, mask=places < size)


@triton.jit(do_not_specialize=["num_pairs"])
def place_pairs(
    ids,
    counts,
    listed,
    num_pairs,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    COMPARED: tl.constexpr,
    COUNTS: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Write a program's pairs to their places: by expert, then in the order of the pairs.

    COMPARED pairs are compared with all of the program's at a time, and the counts of COUNTS programs read.
    """
    if BEGIN is not None:
        BEGIN()
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
    for first in range(0, PAIRS, COMPARED):
        lane = first + tl.arange(0, COMPARED)
        other = program * PAIRS + lane
        theirs = tl.load(ids + other, mask=other < num_pairs, other=-1)
        is_earlier = (theirs[None, :] == mine[:, None]) & (lane[None, :] < lanes[:, None])
        rank += tl.sum(is_earlier.to(tl.int32), axis=1)
    place = tl.gather(starts, tl.maximum(mine, 0), 0) + rank
    tl.store(listed + place, at, mask=mine >= 0)
