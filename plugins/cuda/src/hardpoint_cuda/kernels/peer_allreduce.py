"""The sum over ranks, residual addition and norm in one kernel: GPUs of one host write to each other's memory.

Each rank has one piece of memory, which all ranks of the group reach; ``peers_ptr`` int64 [N + 1] holds its address on
every rank, and offsets into it are alike on all ranks (``peer_allreduce.Layout``). It begins with the inbox [2, N, M,
n]: rows of each rank, twice, since a rank may be one call ahead of another. The last address is that of the host's
int32 which is not zero once this rank has left its group.

An element that has not arrived is minus zero. No rank sends minus zero: it sends zero instead. So data need no flag
beside them, and no rank waits for a second write, as in the LL protocol of NCCL and the Lamport buffers of
TensorRT-LLM. A program that has read a row fills it with minus zeros again. Another rank writes to that place two calls
later, when it has this rank's rows of the call between. This rank sends those after the kernel that filled the place.

Axes: N ranks, T rows of a call, M the most of them, n columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint.kernels.norm import normed
from hardpoint_cuda.kernels.meeting import POLLS, pointer


@triton.jit(do_not_specialize=["num_rows", "most", "rank", "turns_at"])
def allreduce_add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    peers_ptr,
    num_rows,
    n,
    most,
    rank,
    turns_at,
    eps,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Rows of x [T, n] summed over WORLD ranks in their order, in float32, then as ``rms_norm_kernel`` has it.

    residual, out and total [T, n], weight [n]. A row is sent, waited for and summed by one program on each rank; the
    programs of a launch all run at once, and no element is in two warps. A row waits in vain no longer than until this
    rank leaves its group; its results are void then.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    own = tl.load(peers_ptr + rank)
    tl.debug_barrier()
    if BEGIN is not None:
        BEGIN()
    dtype = x_ptr.dtype.element_ty
    word: tl.constexpr = tl.int16 if x_ptr.dtype.element_ty.primitive_bitwidth == 16 else tl.int32
    absent: tl.constexpr = -(2 ** (x_ptr.dtype.element_ty.primitive_bitwidth - 1))
    inbox = pointer(own, tl.pointer_type(word))
    left_ptr = pointer(tl.load(peers_ptr + WORLD), tl.pointer_type(tl.int32))
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        turn_ptr = pointer(own + turns_at, tl.pointer_type(tl.int32)) + row
        turn = tl.load(turn_ptr)
        at = row * n + columns  # of so few rows that 32 bits hold it
        sent = tl.load(x_ptr + at, mask=inside, other=0.0).to(word, bitcast=True)
        sent = tl.where(sent == absent, 0, sent).to(word)
        first = (turn * WORLD).to(tl.int64)
        for step in tl.static_range(WORLD):
            peer = tl.load(peers_ptr + (rank + step + 1) % WORLD)  # the others first, then this rank
            to = pointer(peer, tl.pointer_type(word)) + ((first + rank) * most + row) * n
            tl.store(to + columns, sent, mask=inside)
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(WORLD):
            came = inbox + ((first + peer) * most + row) * n + columns
            part = tl.load(came, mask=inside, other=0, volatile=True)
            missing = tl.max((part == absent).to(tl.int32), 0)
            polls, left = missing * 0, missing * 0
            while missing != 0:
                part = tl.load(came, mask=inside, other=0, volatile=True)
                polls += 1
                if polls % POLLS == 0:
                    left = tl.load(left_ptr, volatile=True)  # by each thread: all leave by the one result of tl.max
                missing = tl.max(((part == absent) & (left == 0)).to(tl.int32), 0)
            tl.store(came, tl.full([BLOCK], absent, word), mask=inside)
            total += part.to(dtype, bitcast=True).to(tl.float32)
        tl.store(turn_ptr, 1 - turn)
        total = (total + residual).to(dtype)
        tl.store(total_ptr + at, total, mask=inside)
        y = normed(total.to(tl.float32)[None, :], weight, n, eps, dtype).to(dtype)
        tl.store(out_ptr + at[None, :], y, mask=inside[None, :])
