"""Tokens sorted by expert, then one grouped matmul for all experts: how many each has stays on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch.nn import functional

from hardpoint.experts.middle import bound_middle
from hardpoint.ops.moe_permute import moe_permute
from hardpoint.ops.moe_unpermute import moe_unpermute
from hardpoint_plugin_api import BuildContext, DeviceInfo, ExpertsCall, ExpertsKernel, ExpertsWorkload, Reason

if TYPE_CHECKING:
    from hardpoint.context import Context

_ALIGNMENT = 16
"""Bytes that rows must be a multiple of: torch's grouped_mm checks for it on every device."""


class GroupedMatmul(ExpertsKernel):
    """torch's own grouped_mm over plain weights as they are.

    On accelerators torch has a kernel for bfloat16 alone. For other dtypes it multiplies one group after the other, and
    waits for their sizes: then it is in no graph (torch 2.11 on an H200, November 2026).
    """

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        super().__init__(ctx, workload)
        self.capturable = ctx.dtype == torch.bfloat16
        core_ctx = cast("Context", ctx)
        assert workload.activation is not None
        self._permute, self._unpermute = moe_permute.bind(core_ctx), moe_unpermute.bind(core_ctx)
        self._middle = bound_middle(core_ctx, workload.activation)

    @classmethod
    def supports(cls, workload: ExpertsWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse a torch without the function, and widths that it does not take."""
        if not hasattr(functional, "grouped_mm"):
            return [Reason("package-version", "this torch has no grouped_mm", supported=torch.__version__)]
        itemsize = getattr(torch, str(workload.dtype)).itemsize
        widths = {"hidden size": workload.hidden_size, "intermediate size": workload.intermediate_size}
        return [
            Reason("shape", f"grouped_mm needs rows of a multiple of {_ALIGNMENT} bytes", wanted=f"{what} {width}")
            for what, width in widths.items()
            if width is not None and width * itemsize % _ALIGNMENT
        ]

    def apply(self, call: ExpertsCall) -> None:
        num_experts = call.w["w2.weight"].shape[0]
        rows, starts, places = self._permute(call.x, call.ids, num_experts=num_experts)
        ends = starts[1:].to(torch.int32)
        expert = None
        if "w13.bias" in call.w:  # each row's; any for rows behind the last expert's, which nobody reads
            row = torch.arange(rows.shape[0], dtype=ends.dtype, device=ends.device)
            expert = torch.bucketize(row, ends, right=True).clamp(max=num_experts - 1)
        y = self._product(self._middle(self._product(rows, "w13", ends, expert, call.w)), "w2", ends, expert, call.w)
        call.out.copy_(self._unpermute(y, places, call.weights))

    @staticmethod
    def _product(
        rows: torch.Tensor, name: str, ends: torch.Tensor, expert: torch.Tensor | None, w: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Sorted rows times their experts' matrices ``name``, plus the biases of each row's ``expert``."""
        y = functional.grouped_mm(rows, w[f"{name}.weight"].transpose(1, 2), offs=ends)
        return y if expert is None else y + w[f"{name}.bias"][expert]
