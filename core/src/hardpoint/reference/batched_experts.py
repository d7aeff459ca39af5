"""One batched matmul for all experts, each with as many rows, whether they mean something or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from hardpoint.experts.middle import bound_middle, is_gated
from hardpoint_plugin_api import BatchedExpertsCall, BatchedExpertsKernel, BuildContext, ExpertsWorkload

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

    def apply(self, call: BatchedExpertsCall) -> None:
        x, w = call.x, call.w
        experts, rows, _ = x.shape
        first = call.workspace.view(x.dtype)[: experts * rows * self._width].view(experts, rows, self._width)
        _product(x, "w13", w, first)
        _product(self._middle(first), "w2", w, call.out)


def _product(x: torch.Tensor, name: str, w: dict[str, torch.Tensor], out: torch.Tensor) -> None:
    """``out`` [E, M, rows]: x [E, M, columns] times each expert's matrix ``name``, plus its bias."""
    weight, bias = w[f"{name}.weight"].transpose(1, 2), w.get(f"{name}.bias")
    if bias is None:
        torch.bmm(x, weight, out=out)
    else:
        torch.baddbmm(bias.unsqueeze(1), x, weight, out=out)
