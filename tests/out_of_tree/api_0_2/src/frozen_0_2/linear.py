"""A matmul kernel with a weight layout of its own."""

from __future__ import annotations

import torch

from hardpoint_plugin_api import (
    BuildContext,
    DeviceInfo,
    LinearCall,
    LinearKernel,
    LinearWorkload,
    QuantSpec,
    Reason,
    TableElement,
)

TERNARY = TableElement("ternary", 2, table=(0.0, 1.0, -1.0, -1.0))


class FrozenLinear(LinearKernel):
    """Keeps the weight transposed."""

    layout = "frozen_transposed"

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.spec == (QuantSpec(str(workload.dtype)),) * 2

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        return [Reason("too-wide", "it is too wide")] if (workload.out_features or 0) > 10**6 else []

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"transposed": weights["weight"].T.contiguous()}

    def unpack(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return weights["transposed"].T.contiguous()

    def rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return weights["transposed"][:, ids].T

    def apply(self, call: LinearCall) -> torch.Tensor:
        x, weights, bias = call.x, call.weights, call.bias
        y = x @ weights["transposed"]
        return y if bias is None else y + bias
