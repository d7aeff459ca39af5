"""Kernels of an exchange of tokens in which the GPUs of one host write to each other's memory.

Each rank has one piece of memory, which all ranks of the group reach; ``peers_ptr`` holds its address on every rank,
and offsets into it are alike on all ranks (``peer_all2all.Layout``). Row ``rank * most + token`` of a rank's rows is
that token of ``rank``; ``most`` is the number of tokens of the rank that has the most.

Programs of one number meet: program p of a rank handles the tokens p, p + P, ... of every rank, writes to the other
ranks, raises its flag there, and waits until program p of every rank has raised its own. A flag holds the number of
the meeting and only grows, and the programs count meetings in memory of the device: a captured graph replays them
without any argument of the host. No program waits for another of its own rank, and there are no more programs than a
device runs at once.

Writes of a rank before it raises its flag (release) can be read by the program that has seen the flag (acquire), and by
every later kernel on that program's rank: PTX ISA, "Memory Consistency Model". Between two dispatches there
is a combine, in which every rank waits for all the others: so the rows of a rank are read no more when those of the
next dispatch arrive, and its sums are not when those of the next combine do.

Axes: N ranks, K experts per token, H hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCALES: tl.constexpr = tl.constexpr(128)
"""Elements of scales that a program copies at once."""

_ARGUMENTS = ["num_tokens", "most", "top_k", "own", "rank", "world", "flags_at", "meetings_at", "left_at", "ids_at"]
"""Numbers of which no variant is compiled."""


@triton.jit
def _pointer(address, kind):
    """``address`` as a pointer of type ``kind``; all parts of the memory begin at multiples of 16 bytes."""
    return tl.multiple_of(address.to(kind), 16)


@triton.jit
def _row(pointer, row, count, VECTOR: tl.constexpr):
    """Where a row of ``count`` elements begins, a multiple of VECTOR of them."""
    return pointer + tl.multiple_of(row * count.to(tl.int64), VECTOR)


@triton.jit
def _copy(source, target, count, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """``count`` elements, a multiple of VECTOR, in vectors of so many."""
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = tl.max_constancy(at < count, [VECTOR])
        tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


@triton.jit
def _meet(peers_ptr, rank, world, flags_at, meetings_at, left_at, PROGRAMS: tl.constexpr):
    """Wait until the programs of this number are here on all ranks, or this rank has left its group."""
    program = tl.program_id(0)
    int_pointer: tl.constexpr = tl.pointer_type(tl.int32)
    own = tl.load(peers_ptr + rank)
    meetings = _pointer(own + meetings_at, int_pointer) + program
    meeting = tl.load(meetings) + 1
    tl.debug_barrier()  # all that the program's threads wrote comes before the flag
    for peer in range(world):
        flag = _pointer(tl.load(peers_ptr + peer) + flags_at, int_pointer) + rank * PROGRAMS + program
        tl.atomic_xchg(flag, meeting, sem="release", scope="sys")
    left = tl.load(_pointer(own + left_at, int_pointer), volatile=True)
    for peer in range(world):
        flag = _pointer(own + flags_at, int_pointer) + peer * PROGRAMS + program
        ahead = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - meeting  # 1 where that rank is at the next already
        while (ahead < 0) & (left == 0):
            ahead = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - meeting
            left = tl.load(_pointer(own + left_at, int_pointer), volatile=True)
    tl.store(meetings, meeting)
    tl.debug_barrier()


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
            tl.store(_pointer(base + ids_at, tl.pointer_type(tl.int32)) + at, local, mask=places < top_k)
            tl.store(_pointer(base + weights_at, tl.pointer_type(tl.float32)) + at, weights, mask=places < top_k)
            if tl.max(local, 0) >= 0:
                to = _row(_pointer(base + rows_at, x_ptr.dtype), row, words, VECTOR)
                _copy(_row(x_ptr, token, words, VECTOR), to, words, VECTOR, BLOCK)
                to = _row(_pointer(base + scales_at, scales_ptr.dtype), row, scale_words, 1)
                _copy(_row(scales_ptr, token, scale_words, 1), to, scale_words, 1, SCALES)
    _meet(peers_ptr, rank, world, flags_at, meetings_at, left_at, PROGRAMS)


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
    came = _pointer(mine + ids_at, tl.pointer_type(tl.int32))
    for step in range(world):
        peer = (rank + step) % world
        base = _pointer(tl.load(peers_ptr + peer) + sums_at, y_ptr.dtype)
        for token in range(tl.program_id(0), most, tl.num_programs(0)):
            row = peer * most + token
            local = tl.load(came + row * top_k + places, mask=places < top_k, other=-1)
            if tl.max(local, 0) >= 0:
                to = _row(base, rank * most + token, hidden, VECTOR)
                _copy(_row(y_ptr, row, hidden, VECTOR), to, hidden, VECTOR, BLOCK)
    _meet(peers_ptr, rank, world, flags_at, meetings_at, left_at, PROGRAMS)
    sums = _pointer(mine + sums_at, y_ptr.dtype)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        ids = tl.load(ids_ptr + token * top_k + places, mask=places < top_k, other=-1)
        for start in range(0, hidden, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = tl.max_constancy(at < hidden, [VECTOR])
            total = tl.zeros([BLOCK], tl.float32)
            for peer in tl.static_range(WORLD):  # unrolled: all loads are under way at once
                local = ids - peer * own
                is_there = tl.max(((local >= 0) & (local < own)).to(tl.int32), 0) > 0
                part = _row(sums, peer * most + token, hidden, VECTOR) + at
                # Not from the cache of a multiprocessor, which other devices' writes do not reach.
                total += tl.load(part, mask=inside & is_there, other=0.0, cache_modifier=".cg").to(tl.float32)
            tl.store(_row(out_ptr, token, hidden, VECTOR) + at, total.to(out_ptr.dtype.element_ty), mask=inside)
