"""Collectives between the GPUs of one host, which write small tensors to each other's memory. NCCL moves the rest.

One launch takes the place of NCCL's and, for columns side by side (logits of a divided vocabulary), of the copy behind
it. Kernels are in kernels/peer_collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hardpoint.dtypes import dtype_of
from hardpoint.kernels.launch import Launcher, aligned
from hardpoint_cuda.communicator import Nccl
from hardpoint_cuda.kernels.peer_collectives import gather_columns_kernel, sum_kernel
from hardpoint_cuda.peer_memory import LeavingWord, PeerMemory, addresses, allocator_reasons
from hardpoint_plugin_api import BuildContext, CommunicatorWorkload, DeviceInfo, Reason

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SLOT_BYTES = 8 << 20
"""The largest tensor of a rank that is gathered by its own kernel."""
SUM_BYTES = 1 << 20
"""The largest total of all ranks' tensors that are summed by their own kernel: each rank reads all of it."""
PROGRAMS = 256
"""The most programs of a launch. There is one for each multiprocessor, so that all run at once."""
WARPS = 8
_VECTOR = 16
"""Bytes that a thread copies at once. Rows that are no multiple go through NCCL."""
_LAUNCHED_EARLY, _LAUNCHED_LATE = 1, 129
"""Numbers of rows for which a kernel is launched early, and is not: ``init`` compiles both. See launch.py."""
_INTEGER = 4
_ALIGN = 128


@dataclass(frozen=True)
class Layout:
    """The parts of a rank's memory: bytes from its start. The inbox [2, N, SLOT_BYTES] is at 0.

    ``flags`` int32 [N, PROGRAMS]; ``meetings`` int32 [PROGRAMS]; ``left`` int32: see kernels/meeting.py. ``size``: all
    of it.
    """

    flags: int
    meetings: int
    left: int
    size: int

    @classmethod
    def of(cls, ranks: int) -> Layout:
        """For a group of so many ranks."""
        flags = 2 * ranks * SLOT_BYTES
        meetings = flags + ranks * PROGRAMS * _INTEGER
        left = meetings + PROGRAMS * _INTEGER
        return cls(flags, meetings, left, left + _ALIGN)


class PeerCommunicator(Nccl):
    """Sums are taken in the order of the ranks, in float32; those of large tensors are NCCL's."""

    _peers: PeerMemory | None = None

    def __init__(self, ctx: BuildContext, workload: CommunicatorWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.ranks is not None
        assert workload.dtype is not None
        self._ranks, self._dtype = workload.ranks, dtype_of(workload.dtype)
        self._most_summed = min(SUM_BYTES // workload.ranks, SLOT_BYTES)
        self.layout = Layout.of(workload.ranks)
        self._gather, self._sum = Launcher(gather_columns_kernel), Launcher(sum_kernel)
        self._key = f"cuda.peer_communicator {workload.key()}"
        ctx.resources.declare(self._key, self.layout.size, scope="collective")

    @classmethod
    def supports(cls, workload: CommunicatorWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse memory that torch's allocator keeps to its process."""
        return allocator_reasons()

    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        super().init(store, rank, world, group)
        own = self.ctx.resources.get(self._key)
        own.zero_()
        self._leaving = LeavingWord(own.device)
        self._table = addresses([own.data_ptr()] * world, self._leaving, own.device)
        self._programs = _programs(own.device)
        self._load(own.device)
        own.zero_()
        store.set(f"programs/{rank}", str(self._programs))
        peers = PeerMemory(own, store, rank, world, self.ctx.parallel.timeout, "--deny communicator=cuda_peer")
        self._programs = min(int(store.get(f"programs/{other}")) for other in range(world))
        self._table = addresses(peers.pointers, self._leaving, own.device)
        self._peers = peers

    def _load(self, device: torch.device) -> None:
        """Compile the kernels and put them on the device, by launches among no ranks.

        Loading waits for the device, on which a program may wait for a rank that this thread keeps from going on.
        """
        for rows in (_LAUNCHED_EARLY, _LAUNCHED_LATE):
            x = torch.zeros(rows, _VECTOR, dtype=torch.int32, device=device)
            self._launch(self._gather, x, x.new_empty(rows, _VECTOR * self._ranks), world=0)
            x = torch.zeros(rows, _VECTOR, dtype=self._dtype, device=device)
            self._launch(self._sum, x, x, self._ranks, world=0)

    def close(self) -> None:
        try:
            if self._peers is not None:
                self._peers.close()
        finally:
            super().close()

    def abort(self) -> None:
        """Programs that wait on the device see a word that changes."""
        self._has_left = True  # before they go on, with results that are not whole
        if self._peers is not None:
            self._leaving.write()
        super().abort()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self._dtype or not _in_vectors(x.nbytes) or x.nbytes > self._most_summed:
            return super().all_reduce(x)
        x = _placed(x)
        rows = x.view(x.shape[0] if _in_vectors(x[0].nbytes) else 1, -1)
        self._together(self._sum, rows, rows, self._ranks)
        return x

    def all_gather(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        if len(set(rows or (0,))) > 1 or not _in_vectors(x.nbytes) or x.nbytes > SLOT_BYTES:
            return super().all_gather(x, rows)
        return self._columns(x.reshape(1, -1)).view(self._ranks * x.shape[0], *x.shape[1:])

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        if not _in_vectors(x.shape[1] * x.itemsize) or not 0 < x.nbytes <= SLOT_BYTES:
            return super().all_gather_columns(x)
        return self._columns(x)

    def _columns(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, n], with rows in whole vectors, to [T, N * n]."""
        out = x.new_empty(x.shape[0], self._ranks * x.shape[1])
        self._together(self._gather, _placed(x).view(torch.int32), out.view(torch.int32))
        return out

    def _together(self, launcher: Launcher, x: torch.Tensor, out: torch.Tensor, *constants: int) -> None:
        """Launch a kernel that waits on the device for all ranks'. Raises RuntimeError where this rank has left."""
        if not self._has_left and self._peers is not None:
            self._launch(launcher, x, out, *constants, world=self._ranks)
        if self._has_left or self._peers is None:
            raise RuntimeError("this rank has left its group")

    def _launch(self, launcher: Launcher, x: torch.Tensor, out: torch.Tensor, *constants: int, world: int) -> None:
        at, vector = self.layout, _VECTOR // x.itemsize
        launcher(
            (x.dtype,),
            (self._programs, 1, 1),
            WARPS,
            x,
            out,
            self._table,
            x.shape[0] if world else 0,
            x.shape[1],
            self._rank,
            world,
            SLOT_BYTES,
            at.flags,
            at.meetings,
            at.left,
            *constants,
            vector,
            PROGRAMS,
            vector * 32 * WARPS,
        )


def _programs(device: torch.device) -> int:
    """How many programs a launch has on the device."""
    if device.type != "cuda":
        return PROGRAMS
    return min(PROGRAMS, torch.cuda.get_device_properties(device).multi_processor_count)


def _in_vectors(nbytes: int) -> bool:
    """Whether so many bytes are whole vectors, which all ranks answer alike."""
    return nbytes > 0 and nbytes % _VECTOR == 0


def _placed(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy whose address is a multiple of 16 bytes, as vectors need."""
    return x if aligned(x) else x.clone()
