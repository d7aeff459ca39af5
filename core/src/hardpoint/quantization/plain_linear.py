"""The linear family's truth for plain weights: torch's own matmul, on any device."""

from __future__ import annotations

import torch
from torch.nn import functional

from hardpoint_plugin_api import LinearKernel


class PlainLinear(LinearKernel):
    """Weight as it stands in the checkpoint, [out, in]."""

    def apply(self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(x, weights["weight"], bias)
