"""NCCL between ranks: torch.distributed's, which a CUDA graph may record.

A collective is captured with the step that makes it, once it has run before: communicators are set up by their first
call. A communicator must outlive no graph that holds it, so graphs go before groups are left.
"""

from __future__ import annotations

from hardpoint.reference.torch_distributed import GatherAndSum, TorchDistributed


class Nccl(TorchDistributed):
    """Every collective, by NCCL's own algorithms."""

    capturable = True


class NcclGatherAndSum(GatherAndSum):
    """The same, but sums are taken of all ranks' values in their order."""

    capturable = True
