"""AITER's quick all-reduce among ranks in threads of one process; part of ``aiter_stand_in``.

Parameters and defaults: aiter/ops/quick_all_reduce.py at 4f5c2ba6229cfdb750fc68d9d19815b37ad5a06d of
github.com/ROCm/aiter. Checks: csrc/kernels/quick_all_reduce.cu at 0bfb047d37cc977865c16436ee7cdeb3ae434609,
csrc/include/quick_all_reduce.cuh at 0187b44afc5117befe1583b42b4270a198d364df, which this follows: each rank sums a part
of all ranks' values as they were sent, and sends the sum in the same numbers. Groups of 32 elements share a scale.
"""

from __future__ import annotations

import ctypes
import itertools
import threading

import torch
from torch import Tensor

from tests.support.aiter_calls import count

_BITS = {2: 6, 3: 4, 4: 3}
_HANDLE = ctypes.c_uint64 * 8
_SECONDS = 30.0

_numbers = itertools.count(1000)
_lock = threading.Lock()
_comms: dict[int, _Comm] = {}
_meetings: dict[tuple[int, ...], _Meeting] = {}


class _Meeting:
    """The memory that ranks write to, and the place where they wait for each other."""

    def __init__(self, world: int) -> None:
        self.given: list[Tensor | None] = [None] * world
        self.barrier = threading.Barrier(world, timeout=_SECONDS)


class _Comm:
    def __init__(self, rank: int, world: int, most: int) -> None:
        self.rank, self.world, self.most = rank, world, most
        self.meeting: _Meeting | None = None


def init_custom_qr(rank: int, world_size: int, qr_max_size: int | None = None, quant_level: int | None = None) -> int:
    """A number that stands for the address of the library's object."""
    count("init_custom_qr")
    if world_size > 8 or world_size % 2 or world_size == 6 or not 0 <= rank < world_size:
        raise ValueError("Odd num gpus is not supported for now")
    with _lock:
        made = next(_numbers)
        _comms[made] = _Comm(rank, world_size, qr_max_size or 2**31)
    return made


def qr_get_handle(fa: int, out_ptr: int) -> None:
    """Writes 64 bytes to memory of the host."""
    _HANDLE.from_address(out_ptr)[0] = fa
    assert fa in _comms


def qr_open_handles(fa: int, handle_ptrs: list[int]) -> None:
    """Reads 64 bytes of each rank."""
    comm = _comms[fa]
    group = tuple(int(_HANDLE.from_address(pointer)[0]) for pointer in handle_ptrs)
    assert [_comms[other].rank for other in group] == list(range(comm.world)), "handles in another order"
    with _lock:
        comm.meeting = _meetings.setdefault(group, _Meeting(comm.world))


def qr_all_reduce(fa: int, inp: Tensor, out: Tensor, quant_level: int, cast_bf2half: bool = False) -> None:
    """Writes to ``out``."""
    count("qr_all_reduce")
    comm = _comms[fa]
    if not 0 <= quant_level <= 4:
        raise ValueError("invalid QuickReduce quantization level")
    if inp.dtype != out.dtype:
        raise ValueError("qr_all_reduce: inp/out dtype mismatch")
    if inp.numel() != out.numel():
        raise ValueError("qr_all_reduce: inp/out numel mismatch")
    if not out.numel():
        raise ValueError("qr_all_reduce: empty input is unsupported")
    if out.nbytes > comm.most:
        raise ValueError("qr_all_reduce: input bytes exceed kMaxProblemSize")
    if out.nbytes % 16:
        raise ValueError("qr_all_reduce: input bytes must be divisible by 16 outside PullQ4")
    if inp.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("quick allreduce only supports float16 and bfloat16")
    if comm.world not in (2, 4, 8):
        raise RuntimeError(f"All Reduce not supported for world_size = {comm.world}")
    if quant_level == 4 and comm.world != 2:
        raise RuntimeError("INT3 quick all-reduce is only supported for world_size == 2")
    assert inp.is_contiguous(), "its kernels read by the address alone"
    assert out.is_contiguous()
    assert comm.meeting is not None, "no handles were opened"
    numbers = inp.flatten().to(torch.float16) if cast_bf2half else inp.flatten()
    comm.meeting.given[comm.rank] = _sent(numbers, quant_level)
    comm.meeting.barrier.wait()
    total = torch.zeros_like(numbers)
    for given in comm.meeting.given:
        assert given is not None
        assert given.shape == total.shape, "ranks sum tensors of unlike sizes"
        total += given
    comm.meeting.barrier.wait()
    out.copy_(_sent(total, quant_level).view(inp.shape))


def qr_destroy(fa: int) -> None:
    """Frees the memory."""
    count("qr_destroy")
    with _lock:
        del _comms[fa]


def _sent(x: Tensor, level: int) -> Tensor:
    """x [n] as another rank reads it."""
    if level == 0:
        return x.clone()
    padded = torch.nn.functional.pad(x.float(), (0, -len(x) % 32)).view(-1, 32)
    largest = padded.abs().amax(1, keepdim=True)
    if level == 1:
        scale = (largest / 448).clamp(min=1e-7)
        found = (padded / scale).to(torch.float8_e4m3fn).float() * scale
    else:
        half = 1 << (_BITS[level] - 1)
        scale = (largest / half).clamp(min=1e-7)
        found = (padded / scale).round().clamp(-half, half - 1) * scale
    return found.flatten()[: len(x)].to(x.dtype)
