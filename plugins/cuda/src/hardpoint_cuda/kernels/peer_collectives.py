"""Collectives in which the GPUs of one host write to each other's memory: columns side by side, and sums.

Each rank has one piece of memory, which all ranks of the group reach (``peer_communicator.Layout``). It begins with the
inbox [2, N, slot]: a part of each rank, twice, since a rank may be one call ahead of another. Which half a call takes
follows from the number of its meeting (meeting.py). Every launch has the same number of programs, so that all programs
of all ranks count alike.

A half is read by the time it is written again: the call between has met, and a rank comes to that meeting when it has
read the half.

Axes: N ranks, T rows of a call, w words of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint_cuda.kernels.meeting import meet, pointer, row_start

_ARGUMENTS = ["num_rows", "words", "rank", "world", "slot", "flags_at", "meetings_at", "left_at"]
"""Integer arguments whose values Triton compiles no variants for."""


@triton.jit
def _part(address, half, world, source, slot, kind):
    """Where the part of rank ``source`` begins in the memory at ``address``."""
    return pointer(address + (half * world + source).to(tl.int64) * slot, kind)


@triton.jit
def _half(peers_ptr, rank, meetings_at):
    """The half of the inbox that this call takes."""
    meetings = pointer(tl.load(peers_ptr + rank) + meetings_at, tl.pointer_type(tl.int32))
    return tl.load(meetings + tl.program_id(0)) & 1


@triton.jit
def _place(item, words, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """The row of a block of words, the words' places in it, and which of them there are."""
    blocks = tl.cdiv(words, BLOCK)
    at = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
    return item // blocks, at, tl.max_constancy(at < words, [VECTOR])


@triton.jit(do_not_specialize=_ARGUMENTS)
def gather_columns_kernel(
    x_ptr,
    out_ptr,
    peers_ptr,
    num_rows,
    words,
    rank,
    world,
    slot,
    flags_at,
    meetings_at,
    left_at,
    VECTOR: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """x [T, w] of all ranks to out [T, N * w]; T rows of w words take at most ``slot`` bytes.

    Words are int32, and w is a multiple of VECTOR. Without ranks (world = 0) and rows nothing happens. Results of a
    rank that leaves its group meanwhile are undefined.
    """
    if BEGIN is not None:
        BEGIN()
    half, own = _half(peers_ptr, rank, meetings_at), tl.load(peers_ptr + rank)
    items, wide = num_rows * tl.cdiv(words, BLOCK), words * world
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row, at, inside = _place(item, words, VECTOR, BLOCK)
        value = tl.load(row_start(x_ptr, row, words, VECTOR) + at, mask=inside)
        for step in range(1, world):  # each begins with another, so that no rank's link takes them all
            peer = tl.load(peers_ptr + (rank + step) % world)
            to = row_start(_part(peer, half, world, rank, slot, x_ptr.dtype), row, words, VECTOR)
            tl.store(to + at, value, mask=inside)
        out = row_start(out_ptr, row, wide, VECTOR) + tl.multiple_of(rank * words, VECTOR)
        tl.store(out + at, value, mask=inside)
    meet(peers_ptr, rank, world, flags_at, meetings_at, left_at, PROGRAMS)
    for step in range(1, world):
        peer = (rank + step) % world
        came = _part(own, half, world, peer, slot, x_ptr.dtype)
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            row, at, inside = _place(item, words, VECTOR, BLOCK)
            # Not from the cache of a multiprocessor, which other devices' writes do not reach.
            value = tl.load(row_start(came, row, words, VECTOR) + at, mask=inside, cache_modifier=".cg")
            out = row_start(out_ptr, row, wide, VECTOR) + tl.multiple_of(peer * words, VECTOR)
            tl.store(out + at, value, mask=inside)


@triton.jit(do_not_specialize=_ARGUMENTS)
def sum_kernel(
    x_ptr,
    out_ptr,
    peers_ptr,
    num_rows,
    words,
    rank,
    world,
    slot,
    flags_at,
    meetings_at,
    left_at,
    WORLD: tl.constexpr,
    VECTOR: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """x [T, w], of floats, of all ranks to their sum out [T, w], in the order of the ranks, in float32.

    ``out`` may be ``x``. Otherwise as ``gather_columns_kernel``; WORLD is N.
    """
    if BEGIN is not None:
        BEGIN()
    half, own = _half(peers_ptr, rank, meetings_at), tl.load(peers_ptr + rank)
    items = num_rows * tl.cdiv(words, BLOCK)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row, at, inside = _place(item, words, VECTOR, BLOCK)
        value = tl.load(row_start(x_ptr, row, words, VECTOR) + at, mask=inside)
        for step in range(world):
            peer = tl.load(peers_ptr + (rank + step) % world)
            to = row_start(_part(peer, half, world, rank, slot, x_ptr.dtype), row, words, VECTOR)
            tl.store(to + at, value, mask=inside)
    meet(peers_ptr, rank, world, flags_at, meetings_at, left_at, PROGRAMS)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row, at, inside = _place(item, words, VECTOR, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(WORLD):  # unrolled: all loads are under way at once
            came = row_start(_part(own, half, world, peer, slot, x_ptr.dtype), row, words, VECTOR) + at
            total += tl.load(came, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        out = row_start(out_ptr, row, words, VECTOR)
        tl.store(out + at, total.to(out_ptr.dtype.element_ty), mask=inside)
