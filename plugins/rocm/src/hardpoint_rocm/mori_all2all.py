"""MORI's all-to-all between AMD GPUs of one host. None of this ran on hardware.

Arguments are passed by name. ``MORI`` says which, as recorded from ``python/mori/ops/dispatch_combine.py`` and
``python/mori/shmem/api.py`` of github.com/ROCm/mori, 624002c8.

Axes: T tokens of this rank, R rows received, K experts per token, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from hardpoint.experts.library_all2all import LibraryAll2All
from hardpoint.parallel.store_comm import StoreComm
from hardpoint.plugin_host.recorded_library import RecordedLibrary
from hardpoint_plugin_api import All2AllWorkload, DeviceInfo, Dispatched, DispatchHandle, PlatformError, Reason

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MORI = RecordedLibrary(
    "MORI",
    "mori",
    "install MORI (github.com/ROCm/mori) for this ROCm and PyTorch",
    {
        "mori.ops:EpDispatchCombineConfig.__init__": (
            *("data_type", "rank", "world_size", "hidden_dim", "scale_dim", "scale_type_size", "max_token_type_size"),
            *("max_num_inp_token_per_rank", "num_experts_per_rank", "num_experts_per_token", "gpu_per_node"),
        ),
        "mori.ops:EpDispatchCombineOp.__init__": ("config",),
        "mori.ops:EpDispatchCombineOp.dispatch": ("input", "weights", "scales", "indices"),
        "mori.ops:EpDispatchCombineOp.combine": ("input", "weights", "indices"),
        "mori.shmem:shmem_get_unique_id": (),
        "mori.shmem:shmem_init_attr": ("flags", "rank", "nranks", "unique_id"),
        "mori.shmem:shmem_finalize": (),
    },
)

MOST_RANKS = 8

_users: dict[tuple[int, int], int] = {}
"""How many exchanges use MORI's memory, by (ranks, rank): a process joins once, whatever the number of shapes."""


class MoriAll2All(LibraryAll2All):
    """A token goes once to each rank that has experts of it. The host waits for how many came."""

    @classmethod
    def supports(cls, workload: All2AllWorkload, device: DeviceInfo) -> list[Reason]:
        found = MORI.reasons()
        if workload.ranks is not None and workload.ranks > MOST_RANKS:
            most = f"up to {MOST_RANKS}"
            found.insert(0, Reason("ranks", "smaller groups only", wanted=str(workload.ranks), supported=most))
        return found

    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        comm = StoreComm(store, rank, world, self.ctx.parallel.timeout)
        self._place = (world, rank)
        if not _users.get(self._place):
            unique_id = comm.bcast(MORI.find("mori.shmem:shmem_get_unique_id")() if rank == 0 else None, 0)
            flags = MORI.find("mori.shmem:MORI_SHMEM_INIT_WITH_UNIQUEID")
            status = MORI.find("mori.shmem:shmem_init_attr")(flags=flags, rank=rank, nranks=world, unique_id=unique_id)
            if status:
                raise PlatformError(f"MORI cannot set up the memory that GPUs share: shmem_init_attr returns {status}")
        _users[self._place] = _users.get(self._place, 0) + 1
        config = MORI.find("mori.ops:EpDispatchCombineConfig")(
            data_type=self.ctx.dtype,
            rank=rank,
            world_size=world,
            hidden_dim=self._hidden,
            scale_dim=0,
            scale_type_size=0,
            max_token_type_size=self.ctx.dtype.itemsize,
            max_num_inp_token_per_rank=self._most_tokens,
            num_experts_per_rank=self._own,
            num_experts_per_token=self.workload.top_k,
            gpu_per_node=world,
        )
        self._rank, self._made = rank, MORI.find("mori.ops:EpDispatchCombineOp")(config=config)
        # MORI zeroes what ranks write to, and waits for the others by torch.distributed alone, which is not set up.
        torch.zeros(1, device=self.ctx.torch_device).cpu()
        comm.barrier()

    def close(self) -> None:
        if self._made is None:
            return
        self._made = None
        _users[self._place] -= 1
        if not _users[self._place]:
            MORI.find("mori.shmem:shmem_finalize")()

    def dispatch(
        self, x: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
    ) -> Dispatched:
        if scales is not None:
            raise ValueError(
                "MORI moves tokens without scales here; take an experts kernel without quantized input, or another "
                "--all2all-backend"
            )
        wanted = ids.int().contiguous()
        came, came_weights, _, came_ids, total = self._object.dispatch(
            input=x.contiguous(), weights=weights.contiguous(), scales=None, indices=wanted
        )
        rows = int(total.item())
        local = came_ids[:rows] - self._rank * self._own
        local = torch.where((local >= 0) & (local < self._own), local, -1)
        return Dispatched(came[:rows], None, local, came_weights[:rows], None, DispatchHandle(wanted))

    def combine(self, y: torch.Tensor, handle: object, out: torch.Tensor) -> None:
        wanted = cast("DispatchHandle[torch.Tensor]", handle).take()
        sums, _ = self._object.combine(input=y.contiguous(), weights=None, indices=wanted)
        out.copy_(sums[: out.shape[0]])
