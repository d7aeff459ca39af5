"""The linear family's truth for plain weights: torch's own matmul, on any device."""

from __future__ import annotations

import torch
from torch.nn import functional

from hardpoint_plugin_api import LinearCall, LinearKernel


class PlainLinear(LinearKernel):
    """Weight as it stands in the checkpoint, [out, in]."""

    def apply(self, call: LinearCall) -> torch.Tensor:
        return functional.linear(call.x, call.weights["weight"], call.bias)
