"""Meetings of programs on the GPUs of one host, which write to each other's memory.

Each rank has one piece of memory, which all ranks of the group reach; ``peers_ptr`` int64 [N + 1] holds its address on
every rank, and offsets into it are alike on all ranks. Three parts of it belong to meetings: flags int32 [N, PROGRAMS],
by the rank that raises them; meetings int32 [PROGRAMS], the number of each program's last; one int32 that is not zero
once a program has seen that this rank has left its group. The last address is that of the int32 of the host where this
is said. A program that waits reads it each ``POLLS`` looks at a flag, since such a read takes longer.

Programs of one number meet: program p of a rank writes to the other ranks, raises its flag there, and waits until
program p of every rank has raised its own. A flag holds the number of the meeting and only grows, and the programs
count meetings in memory of the device: a captured graph replays them without any argument of the host. No program waits
for another of its own rank. All programs of a launch must run at once.

Writes of a rank before it raises its flag (release) can be read by the program that has seen the flag (acquire), and by
every later kernel on that program's rank: PTX ISA, "Memory Consistency Model".
"""

from __future__ import annotations

import triton
import triton.language as tl

POLLS = tl.constexpr(256)


@triton.jit
def pointer(address, kind):
    """``address`` as a pointer of type ``kind``; all parts of the memory begin at multiples of 16 bytes."""
    return tl.multiple_of(address.to(kind), 16)


@triton.jit
def row_start(base, row, count, VECTOR: tl.constexpr):
    """The address of row number ``row`` of rows of ``count`` elements, a multiple of VECTOR."""
    return base + tl.multiple_of(row * count.to(tl.int64), VECTOR)


@triton.jit
def copy(source, target, count, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """``count`` elements, a multiple of VECTOR, in vectors of so many."""
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = tl.max_constancy(at < count, [VECTOR])
        tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


@triton.jit
def meet(peers_ptr, rank, world, flags_at, meetings_at, left_at, PROGRAMS: tl.constexpr):
    """Wait until the programs of this number are here on all ranks, or this rank has left its group."""
    program = tl.program_id(0)
    int_pointer: tl.constexpr = tl.pointer_type(tl.int32)
    own = tl.load(peers_ptr + rank)
    meetings = pointer(own + meetings_at, int_pointer) + program
    meeting = tl.load(meetings) + 1
    tl.debug_barrier()  # all that the program's threads wrote comes before the flag
    for peer in range(world):
        flag = pointer(tl.load(peers_ptr + peer) + flags_at, int_pointer) + rank * PROGRAMS + program
        tl.atomic_xchg(flag, meeting, sem="release", scope="sys")
    left_ptr = pointer(tl.load(peers_ptr + world), int_pointer)
    polls, left = meeting * 0, meeting * 0
    for peer in range(world):
        flag = pointer(own + flags_at, int_pointer) + peer * PROGRAMS + program
        ahead = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - meeting  # 1 where that rank is at the next already
        while (ahead < 0) & (left == 0):
            ahead = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - meeting
            polls += 1
            if polls % POLLS == 0:
                # An atomic's result is that of one thread, so that all threads of a program leave the loop together.
                said = tl.load(left_ptr, volatile=True)
                left = tl.atomic_or(pointer(own + left_at, int_pointer), said, sem="relaxed", scope="gpu")
    tl.store(meetings, meeting)
    tl.debug_barrier()
