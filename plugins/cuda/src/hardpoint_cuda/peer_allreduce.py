"""The op ``allreduce_add_rms_norm`` between the GPUs of one host, which write to each other's memory.

One kernel of our own (kernels/peer_allreduce.py), without a library that has to be built: every rank sends its rows to
all others, which for few rows takes the time of one write over the link. Graphs capture it, and it is launched early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.dtypes import dtype_of
from hardpoint.kernels.launch import Launcher, aligned
from hardpoint.kernels.quantize import whole_rows
from hardpoint_cuda.kernels.peer_allreduce import allreduce_add_rms_norm_kernel
from hardpoint_cuda.peer_memory import LeavingWord, PeerMemory, addresses, allocator_reasons
from hardpoint_plugin_api import BuildContext, DeviceInfo, GroupMember, OpWorkload, Reason

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MOST_ROWS = 512
"""As the manifest says."""
_LAUNCHED_EARLY, _LAUNCHED_LATE = 1, 129
"""Numbers of rows for which the kernel is launched early, and is not: ``init`` compiles both. See launch.py."""
_MOST_WARPS = 32
"""Of the programs that a multiprocessor runs at once, by a cautious count."""
_WARP = 32
_INTEGER = 4
_ALIGN = 128


@dataclass(frozen=True)
class Layout:
    """The parts of a rank's memory: bytes from its start. The inbox [2, N, MOST_ROWS, n] is at 0.

    ``turns`` int32 [MOST_ROWS]: which half of the inbox a row's next call takes. ``size``: all of it.
    """

    turns: int
    size: int

    @classmethod
    def of(cls, ranks: int, row_bytes: int) -> Layout:
        """For rows of so many bytes."""
        turns = -(-2 * ranks * MOST_ROWS * row_bytes // _ALIGN) * _ALIGN
        return cls(turns, turns + MOST_ROWS * _INTEGER)


class PeerAllReduce(GroupMember):
    """For at most MOST_ROWS rows of one width. Partial sums are added in the order of the ranks, in float32."""

    capturable = True

    def __init__(self, ctx: BuildContext, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]) -> None:
        assert workload.ranks is not None
        assert workload.hidden_size is not None
        assert workload.dtype is not None
        self._ctx, self._ranks, self._dtype = ctx, workload.ranks, dtype_of(workload.dtype)
        self._hidden_size = workload.hidden_size
        self.layout = Layout.of(workload.ranks, workload.hidden_size * self._dtype.itemsize)
        self._launcher = Launcher(allreduce_add_rms_norm_kernel)
        self._key = f"cuda.peer_allreduce {workload.key()}"
        self._peers: PeerMemory | None = None
        self._has_left = False
        ctx.resources.declare(self._key, self.layout.size, scope="collective")

    @classmethod
    def supports(cls, workload: OpWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse memory that torch's allocator keeps to its process."""
        return allocator_reasons()

    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        own = self._ctx.resources.get(self._key)
        own.zero_()
        inbox = own[: self.layout.turns].view(torch.int16 if self._dtype.itemsize == 2 else torch.int32)
        inbox.fill_(torch.iinfo(inbox.dtype).min)  # -0.0
        self._memory, self._rank = own, rank
        self._leaving = LeavingWord(own.device)
        self._table = addresses([own.data_ptr()] * world, self._leaving, own.device)
        _, self._block, warps = whole_rows(self._hidden_size, operands=2)
        # No element in two warps, which would not wait for each other.
        self._warps = min(warps, max(1, self._block // _WARP))
        self._programs = _programs(own.device, self._warps)
        self._load()
        store.set(f"programs/{rank}", str(self._programs))
        peers = PeerMemory(own, store, rank, world, self._ctx.parallel.timeout)
        self._programs = min(int(store.get(f"programs/{other}")) for other in range(world))
        self._table = addresses(peers.pointers, self._leaving, own.device)
        self._peers = peers

    def _load(self) -> None:
        """Compile the kernel and put it on the device, by launches for no rows.

        Loading waits for the device, on which a program may wait for a rank that this thread keeps from going on.
        """
        for rows in (_LAUNCHED_EARLY, _LAUNCHED_LATE):
            x = torch.zeros(rows, self._hidden_size, dtype=self._dtype, device=self._memory.device)
            self._launch(x, x, x[0], torch.empty_like(x), torch.empty_like(x), 1e-6, 0)

    def close(self) -> None:
        self._has_left = True
        if self._peers is not None:
            self._peers.close()

    def abort(self) -> None:
        """Programs that wait on the device see a word that changes."""
        self._has_left = True
        if self._peers is not None:
            self._leaving.write()

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the op. Its kernel waits on the device for the other ranks'."""
        if self._has_left or self._peers is None:
            raise RuntimeError("this rank has left its group")
        if x.shape[0] > MOST_ROWS:
            raise ValueError(f"{x.shape[0]} rows are more than the {MOST_ROWS} that the ranks' memory has room for")
        x, residual = x.contiguous(), residual.contiguous()
        normed, total = torch.empty_like(x), torch.empty_like(x)
        if x.shape[0]:
            self._launch(x, residual, weight, normed, total, eps, x.shape[0])
        return normed, total

    def _launch(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        normed: torch.Tensor,
        total: torch.Tensor,
        eps: float,
        num_rows: int,
    ) -> None:
        key = (x.dtype, residual.dtype, weight.dtype, x.shape[1])
        self._launcher(
            key if aligned(x, residual, weight, normed, total) else None,
            (max(1, min(num_rows, self._programs)), 1, 1),
            self._warps,
            x,
            residual,
            weight,
            normed,
            total,
            self._table,
            num_rows,
            x.shape[1],
            MOST_ROWS,
            self._rank,
            self.layout.turns,
            float(eps),
            self._ranks,
            self._block,
        )


def _programs(device: torch.device, warps: int) -> int:
    """How many programs of so many warps the device runs at once."""
    if device.type != "cuda":
        return MOST_ROWS
    return torch.cuda.get_device_properties(device).multi_processor_count * max(1, _MOST_WARPS // warps)
