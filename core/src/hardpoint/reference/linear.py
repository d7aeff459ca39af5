"""The linear family's truth for plain weights: torch's own matmul, on any device."""

from __future__ import annotations

import torch
from torch.nn import functional

from hardpoint_plugin_api import LinearCall, LinearKernel


def whole_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., K], copied where torch's product would read behind its rows.

    With AMX, oneDNN multiplies the elements behind a row of bfloat16 by zeros, up to the next multiple of 32 columns; a
    NaN there comes through (torch 2.13).
    """
    return x.contiguous() if x.shape[-1] % 32 else x


class PlainLinear(LinearKernel):
    """Weight as it stands in the checkpoint, [out, in]."""

    def apply(self, call: LinearCall) -> torch.Tensor:
        return functional.linear(whole_rows(call.x), call.weights["weight"], call.bias)
