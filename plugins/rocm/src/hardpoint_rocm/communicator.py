"""RCCL between ranks: torch.distributed's backend ``nccl``, as PyTorch calls RCCL where it is built for ROCm.

Steps run without graphs on this platform so far: no collective is captured.
"""

from __future__ import annotations

from hardpoint.reference.torch_distributed import GatherAndSum, TorchDistributed


class Rccl(TorchDistributed):
    """Every collective, by RCCL's own algorithms."""


class RcclGatherAndSum(GatherAndSum):
    """The same, but sums are taken of all ranks' values in their order."""
