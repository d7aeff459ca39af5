"""FlashInfer's fused sum over ranks, residual addition and norm, through its unified interface.

Of its two backends ``trtllm`` needs memory that GPUs of one host reach, and nothing else; ``mnnvl`` needs NVLink's
multicast, which is left alone here. FlashInfer 0.6.14 takes that memory from torch's symmetric memory, which sets up
multicast wherever it can; so here it is a resource of the engine, shared by interprocess handles (peer_memory.py), and
laid out as ``trtllm_create_ipc_workspace_for_all_reduce_fusion`` lays it out: for each rank a buffer, flags, and a
triple buffer full of negative zeros, by which a kernel sees what has not arrived; beside them five integers of the
rank's own: a counter, a flag for each algorithm, the size of one of the three, and how much of it to clear.

Written from the sources of 0.6.14 and 0.6.18.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hardpoint_cuda.flashinfer_builds import communication_build
from hardpoint_cuda.flashinfer_library import COMMUNICATION, module, reasons
from hardpoint_cuda.peer_memory import PeerMemory
from hardpoint_plugin_api import BuildContext, DeviceInfo, GroupMember, KernelBuild, OpWorkload, Reason

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MOST_TOKENS = 512
"""As the manifest says. Workspace: 8 x ranks bytes for each element of as many rows (32 MiB for two ranks and rows of
4096)."""

RANKS = (2, 4, 8)
_ELEMENT, _INTEGER = 2, 4
_FLAGS = 256
"""Flags of each rank: BarrierFlagCount."""


def fits(hidden_size: int) -> bool:
    """Whether a row divides among blocks of whole warps.

    In 0.6.14 a warp that is not full adds up what lanes that are not there hold. Blocks are as
    ``allreduce_fusion_kernel_launcher`` makes them on sm_90 and later, eight elements a thread.
    """
    if hidden_size % 8:
        return False
    threads, cluster = hidden_size // 8, 8
    while threads % cluster and cluster > 1:
        cluster //= 2
    threads //= cluster
    while threads < 128 and cluster >= 2:
        threads, cluster = threads * 2, cluster // 2
    return threads % 32 == 0 and threads <= 1024


class FlashInferAllReduce(GroupMember):
    """The op ``allreduce_add_rms_norm`` for at most MOST_TOKENS rows of one width."""

    capturable = True

    def __init__(self, ctx: BuildContext, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]) -> None:
        assert workload.ranks is not None
        assert workload.hidden_size is not None
        self._ctx, self._hidden_size = ctx, workload.hidden_size
        one = workload.ranks * MOST_TOKENS * workload.hidden_size * _ELEMENT
        self._sizes = {"buffer": one, "flags": workload.ranks * _FLAGS * _INTEGER, "triple": 3 * one}
        self._key = f"cuda.flashinfer_allreduce {workload.key()}"
        ctx.resources.declare(self._key, sum(self._sizes.values()) + 5 * _INTEGER, scope="collective")
        self._run: Callable[..., object] | None = None

    @staticmethod
    def supports(workload: OpWorkload, device: DeviceInfo) -> list[Reason]:
        """Conditions that the manifest cannot express, and missing parts of FlashInfer."""
        found = []
        if workload.ranks not in (None, *RANKS):
            supported = ", ".join(map(str, RANKS))
            found.append(Reason("ranks", "groups of other sizes only", wanted=str(workload.ranks), supported=supported))
        if workload.hidden_size is not None and not fits(workload.hidden_size):
            found.append(
                Reason("hidden-size", "rows do not divide among whole warps", wanted=str(workload.hidden_size))
            )
        return found + reasons(frozenset({COMMUNICATION}))

    @classmethod
    def pending_build(cls, workload: OpWorkload, device: DeviceInfo) -> KernelBuild | None:
        """The build that nvcc has to make first, which takes minutes."""
        return communication_build()

    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        COMMUNICATION.load()
        comm, own = module("flashinfer.comm"), self._ctx.resources.get(self._key)
        *parts, control = own.split([*self._sizes.values(), 5 * _INTEGER])
        for part in parts[:2]:
            part.zero_()
        parts[2].view(torch.int16).fill_(torch.iinfo(torch.int16).min)  # -0.0 in either dtype
        control.view(torch.int32).copy_(torch.tensor([0, 0, 0, self._sizes["buffer"], 0], dtype=torch.int32))
        self._peers = PeerMemory(own, store, rank, world, self._ctx.parallel.timeout)
        offsets = [part.data_ptr() - own.data_ptr() for part in parts]
        addresses = [pointer + offset for offset in offsets for pointer in self._peers.pointers]
        workspace = _workspace(
            comm,
            world,
            rank,
            torch.tensor([*addresses, control.data_ptr()], dtype=torch.int64, device=own.device),
            {"tp_rank": rank, "tp_size": world, "max_token_num": MOST_TOKENS, "hidden_dim": self._hidden_size}
            | {"use_fp32_lamport": False},
        )
        pattern = comm.AllReduceFusionPattern.kARResidualRMSNorm
        self._run = partial(comm.allreduce_fusion, workspace=workspace, pattern=pattern, fp32_acc=True)

    def close(self) -> None:
        self._run = None
        self._peers.close()

    def abort(self) -> None:
        self._run = None

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the op. Its kernel waits on the device for the other ranks'."""
        if self._run is None:
            raise RuntimeError("this rank has left its group")
        x, residual = x.contiguous(), residual.contiguous()
        normed, total = torch.empty_like(x), torch.empty_like(x)
        if x.shape[0]:
            # This pattern leaves ``output`` as it is; without one, FlashInfer allocates it.
            self._run(
                input=x,
                output=x,
                residual_in=residual,
                residual_out=total,
                norm_out=normed,
                rms_gamma=weight,
                rms_eps=eps,
            )
        return normed, total


def _workspace(comm: Any, world: int, rank: int, pointers: torch.Tensor, metadata: Mapping[str, object]) -> Any:
    """A workspace of FlashInfer's own class, over memory that is there already."""

    class Workspace(comm.TRTLLMAllReduceFusionWorkspace):  # type: ignore[misc]  # the class is found when it is wanted
        def __init__(self) -> None:
            comm.AllReduceFusionWorkspace.__init__(self, world, rank)
            self.workspace_tensor, self.metadata = pointers, dict(metadata)
            self._destroyed = True  # there is nothing that it would have to free

    return Workspace()
