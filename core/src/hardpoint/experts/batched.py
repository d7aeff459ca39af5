"""One batched matmul for all experts, each with as many rows, whether they mean something or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from hardpoint.experts.middle import bound_middle, is_gated
from hardpoint_plugin_api import BatchedExpertsKernel, BuildContext, ExpertsWorkload

if TYPE_CHECKING:
    from hardpoint.context import Context


class BatchedMatmul(BatchedExpertsKernel):
    """torch's own bmm over plain weights as they are. Every shape is known before the step."""

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.activation is not None
        assert workload.intermediate_size is not None
        self._middle = bound_middle(cast("Context", ctx), workload.activation)
        self._width = workload.intermediate_size * (2 if is_gated(workload.activation) else 1)

    def workspace_bytes(self, rows: int) -> int:
        """For what w13 makes."""
        return rows * self._width * self.ctx.dtype.itemsize

    def apply(
        self,
        x: torch.Tensor,
        counts: torch.Tensor,
        w: dict[str, torch.Tensor],
        out: torch.Tensor,
        workspace: torch.Tensor,
        *,
        scales: torch.Tensor | None = None,
    ) -> None:
        experts, rows, _ = x.shape
        first = workspace.view(x.dtype)[: experts * rows * self._width].view(experts, rows, self._width)
        torch.bmm(x, w["w13.weight"].transpose(1, 2), out=first)
        torch.bmm(self._middle(first), w["w2.weight"].transpose(1, 2), out=out)
