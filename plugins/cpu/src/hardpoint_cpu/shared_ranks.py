"""Ranks of one host that share memory: the communicator, and how ranks find that memory.

The memory is a file without a name (``memfd``) of rank 0, which the others open through ``/proc``. It goes with the
last process that holds it, however that ends, and the size of ``/dev/shm`` in a container does not limit it. The
collectives are compiled: csrc/shared_ranks.h.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from hardpoint_cpu import native
from hardpoint_cpu.compiled import missing
from hardpoint_plugin_api import (
    BuildContext,
    Communicator,
    CommunicatorWorkload,
    DeviceInfo,
    GroupMember,
    PlatformError,
    Reason,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from typing_extensions import CapsuleType

if missing() is None:
    from hardpoint_cpu import _native

_TOKEN_BYTES = 32
MOST_RANKS = 64
"""The memory grows with the square of their number, and a piece of a message shrinks with it."""


def reasons(ranks: int | None) -> list[Reason]:
    """Requirements of ``ranks`` that this machine does not meet."""
    found = []
    if not hasattr(os, "memfd_create"):
        found.append(Reason("memfd", "this system has no files without names (memfd_create, Linux 3.17)"))
    if ranks is not None and ranks > MOST_RANKS:
        found.append(Reason("ranks", "too many", wanted=str(ranks), supported=f"2 to {MOST_RANKS}"))
    return found


class RankMemory:
    """The memory of one group, as this rank has joined it."""

    def __init__(self, store: Store, rank: int, world: int, seconds: float) -> None:
        """Meet all ranks; waits for them ``seconds``, as each collective will.

        Raises PlatformError where this rank cannot reach the memory, RuntimeError where another does not come.
        """
        self.rank, self.world = rank, world
        descriptor = _created(store, world) if rank == 0 else _opened(store, world, seconds)
        try:
            self.group: CapsuleType = _native.ranks_open(descriptor, world, rank, seconds)
            _native.ranks_meet(self.group)
        finally:
            os.close(descriptor)

    def leave(self) -> None:
        """From any thread: calls under way, and later ones, raise RuntimeError; those of other ranks, too."""
        _native.ranks_leave(self.group)


def _created(store: Store, world: int) -> int:
    """Rank 0's file, which is announced to the others."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    descriptor = os.memfd_create("hardpoint-ranks", os.MFD_CLOEXEC)
    size: int = _native.ranks_bytes(world)
    os.ftruncate(descriptor, size + _TOKEN_BYTES)
    os.pwrite(descriptor, token, size)
    store.set("memory", json.dumps([os.getpid(), descriptor, token.hex()]))
    return descriptor


def _opened(store: Store, world: int, seconds: float) -> int:
    """Rank 0's file, opened by another rank."""
    store.wait(["memory"], timedelta(seconds=seconds))
    process, number, token = json.loads(store.get("memory"))
    path = f"/proc/{process}/fd/{number}"
    why = "it is another file: ranks do not see each other's processes"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        why = str(error)
    else:
        if os.pread(descriptor, _TOKEN_BYTES, _native.ranks_bytes(world)).hex() == token:
            return descriptor
        os.close(descriptor)
    raise PlatformError(
        f"this rank cannot open the memory of rank 0 at {path}: {why}; ranks need one host, one user and one namespace "
        "of processes to share memory. To do without: --communicator torch_distributed"
    )


class SharesMemory(GroupMember):
    """A member of a group whose ranks share memory of their own."""

    ctx: BuildContext
    _memory: RankMemory | None = None
    _has_left = False

    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        self._memory = RankMemory(store, rank, world, self.ctx.parallel.timeout)

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        self._has_left = True
        if self._memory is not None:
            self._memory.leave()

    @property
    def _joined(self) -> RankMemory:
        """The memory. Raises RuntimeError before this rank joins, and once it has left."""
        if self._memory is None or self._has_left:
            raise RuntimeError("this rank has left its group" if self._has_left else "this rank has joined no group")
        return self._memory


class SharedMemory(SharesMemory, Communicator):
    """All collectives among ranks of one host. Sums are taken in the order of the ranks, in float32, rounded once.

    Raises ValueError for rows that do not fit the tensor, TypeError for a sum in a dtype that is not claimed.
    """

    @classmethod
    def supports(cls, workload: CommunicatorWorkload, device: DeviceInfo) -> list[Reason]:
        return reasons(workload.ranks)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        _native.ranks_all_reduce(self._joined.group, sum_kernel(x), x.data_ptr(), x.numel(), x.itemsize)
        return x

    def all_gather(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        joined, x = self._joined, x.contiguous()
        rows = [x.shape[0]] * joined.world if rows is None else rows
        _check(rows, joined.world, rows[joined.rank], x)
        out, row = x.new_empty(sum(rows), *x.shape[1:]), _row_elements(x) * x.itemsize
        _native.ranks_all_gather(joined.group, x.data_ptr(), out.data_ptr(), [count * row for count in rows])
        return out

    def reduce_scatter(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        joined, x = self._joined, x.contiguous()
        rows = [x.shape[0] // joined.world] * joined.world if rows is None else rows
        _check(rows, joined.world, sum(rows), x)
        out, row = x.new_empty(rows[joined.rank], *x.shape[1:]), _row_elements(x)
        elements = [count * row for count in rows]
        _native.ranks_reduce_scatter(joined.group, sum_kernel(x), x.data_ptr(), out.data_ptr(), elements, x.itemsize)
        return out

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        _native.ranks_broadcast(self._joined.group, _in_place(x).data_ptr(), x.nbytes, root)

    def send(self, x: torch.Tensor, to: int) -> None:
        x = x.contiguous()
        _native.ranks_send(self._joined.group, x.data_ptr(), x.nbytes, to)

    def recv(self, x: torch.Tensor, source: int) -> None:
        _native.ranks_receive(self._joined.group, _in_place(x).data_ptr(), x.nbytes, source)

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        joined, x = self._joined, x.contiguous()
        _check(send, joined.world, sum(send), x)
        out, row = x.new_empty(sum(receive), *x.shape[1:]), _row_elements(x) * x.itemsize
        sent, received = [count * row for count in send], [count * row for count in receive]
        _native.ranks_all_to_all(joined.group, x.data_ptr(), out.data_ptr(), sent, received)
        return out


def sum_kernel(x: torch.Tensor) -> int:
    """The number of the kernel that sums tensors like ``x``. Raises TypeError where there is none."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"sums are of float32, float16 and bfloat16, not of {x.dtype}")
    return native.number_for("rank_sum", x.dtype)


def _row_elements(x: torch.Tensor) -> int:
    return x.shape[1:].numel()


def _check(rows: Sequence[int], world: int, have: int, x: torch.Tensor) -> None:
    """Compiled code reads as many rows as it is told: they must be there."""
    if len(rows) != world or have != x.shape[0] or min(rows) < 0:
        raise ValueError(f"rows {list(rows)} of {world} ranks do not fit a tensor of shape {list(x.shape)}")


def _in_place(x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        raise ValueError("a tensor that is filled in place must be contiguous")
    return x
