"""Kernels of an exchange of tokens in which the GPUs of one host write to each other's memory.

Each rank has one piece of memory, which all ranks of the group reach; ``peers_ptr`` holds its address on every rank,
and offsets into it are alike on all ranks (``peer_all2all.Layout``). Row ``rank * most + token`` of a rank's rows is
that token of ``rank``; ``most`` is the number of tokens of the rank that has the most.

Program p of a rank handles the tokens p, p + P, ... of every rank, and meets program p of the others (meeting.py).
Between two dispatches there is a combine, in which every rank waits for all the others: so the rows of a rank are read
no more when those of the next dispatch arrive, and its sums are not when those of the next combine do.

Axes: N ranks, K experts per token, H hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint_cuda.kernels.meeting import copy, meet, pointer, row_start

SCALES: tl.constexpr = tl.constexpr(128)
"""Elements of scales that a program copies at once."""

_ARGUMENTS = ["num_tokens", "most", "top_k", "own", "rank", "world", "flags_at", "meetings_at", "left_at", "ids_at"]
"""Integer arguments whose values Triton compiles no variants for."""


@triton.jit(do_not_specialize=[*_ARGUMENTS, "words", "scale_words", "weights_at", "rows_at", "scales_at"])
def dispatch_kernel(
    x_ptr,
    scales_ptr,
    ids_ptr,
    weights_ptr,
    peers_ptr,
    num_tokens,
    most,
    words,
    scale_words,
    top_k,
    own,
    rank,
    world,
    flags_at,
    meetings_at,
    left_at,
    ids_at,
    weights_at,
    rows_at,
    scales_at,
    VECTOR: tl.constexpr,
    TOP_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Write rows to the ranks of their experts, and experts and weights of all tokens to all ranks; wait for theirs.

    x [num_tokens, words], scales [num_tokens, scale_words], ids int32 and weights float32 [num_tokens, top_k]; ``own``
    experts are on each rank. Experts of other ranks, and those of tokens behind ``num_tokens``, arrive as -1. Without
    ranks (world = 0) nothing happens.
    """
    if BEGIN is not None:
        BEGIN()
    places = tl.arange(0, TOP_K)
    for token in range(tl.program_id(0), most, tl.num_programs(0)):
        wanted = (places < top_k) & (token < num_tokens)
        ids = tl.load(ids_ptr + token * top_k + places, mask=wanted, other=-1)
        weights = tl.load(weights_ptr + token * top_k + places, mask=wanted, other=0.0)
        row = rank * most + token
        for step in range(world):
            peer = (rank + step) % world  # each begins with another, so that no rank's link takes them all
            base = tl.load(peers_ptr + peer)
            local = ids - peer * own
            local = tl.where((local >= 0) & (local < own), local, -1)
            at = row * top_k + places
            tl.store(pointer(base + ids_at, tl.pointer_type(tl.int32)) + at, local, mask=places < top_k)
            tl.store(pointer(base + weights_at, tl.pointer_type(tl.float32)) + at, weights, mask=places < top_k)
            if tl.max(local, 0) >= 0:
                to = row_start(pointer(base + rows_at, x_ptr.dtype), row, words, VECTOR)
                copy(row_start(x_ptr, token, words, VECTOR), to, words, VECTOR, BLOCK)
                to = row_start(pointer(base + scales_at, scales_ptr.dtype), row, scale_words, 1)
                copy(row_start(scales_ptr, token, scale_words, 1), to, scale_words, 1, SCALES)
    meet(peers_ptr, rank, world, flags_at, meetings_at, left_at, PROGRAMS)


@triton.jit(do_not_specialize=[*_ARGUMENTS, "hidden", "sums_at"])
def combine_kernel(
    y_ptr,
    out_ptr,
    ids_ptr,
    peers_ptr,
    num_tokens,
    most,
    hidden,
    top_k,
    own,
    rank,
    world,
    flags_at,
    meetings_at,
    left_at,
    ids_at,
    sums_at,
    WORLD: tl.constexpr,
    VECTOR: tl.constexpr,
    TOP_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Write results to the ranks of their tokens, wait for the other ranks', and sum them in the order of the ranks.

    y [N * most, hidden] in the rows that ``dispatch_kernel`` filled, out [num_tokens, hidden], ids int32 [num_tokens,
    top_k] as they were dispatched. A token without experts becomes zeros. Without ranks nothing happens; WORLD is N.
    """
    if BEGIN is not None:
        BEGIN()
    places = tl.arange(0, TOP_K)
    mine = tl.load(peers_ptr + rank)
    came = pointer(mine + ids_at, tl.pointer_type(tl.int32))
    for step in range(world):
        peer = (rank + step) % world
        base = pointer(tl.load(peers_ptr + peer) + sums_at, y_ptr.dtype)
        for token in range(tl.program_id(0), most, tl.num_programs(0)):
            row = peer * most + token
            local = tl.load(came + row * top_k + places, mask=places < top_k, other=-1)
            if tl.max(local, 0) >= 0:
                to = row_start(base, rank * most + token, hidden, VECTOR)
                copy(row_start(y_ptr, row, hidden, VECTOR), to, hidden, VECTOR, BLOCK)
    meet(peers_ptr, rank, world, flags_at, meetings_at, left_at, PROGRAMS)
    sums = pointer(mine + sums_at, y_ptr.dtype)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        ids = tl.load(ids_ptr + token * top_k + places, mask=places < top_k, other=-1)
        for start in range(0, hidden, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = tl.max_constancy(at < hidden, [VECTOR])
            total = tl.zeros([BLOCK], tl.float32)
            for peer in tl.static_range(WORLD):  # unrolled: all loads are under way at once
                local = ids - peer * own
                is_there = tl.max(((local >= 0) & (local < own)).to(tl.int32), 0) > 0
                part = row_start(sums, peer * most + token, hidden, VECTOR) + at
                # Not from the cache of a multiprocessor, which other devices' writes do not reach.
                total += tl.load(part, mask=inside & is_there, other=0.0, cache_modifier=".cg").to(tl.float32)
            tl.store(row_start(out_ptr, token, hidden, VECTOR) + at, total.to(out_ptr.dtype.element_ty), mask=inside)
