"""Root-mean-square norm of a residual stream."""

from __future__ import annotations

import torch

from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers.base import PluggableLayer
from hardpoint.ops.add_rms_norm import add_rms_norm
from hardpoint.ops.rms_norm import rms_norm
from hardpoint_plugin_api import NormArgs, WeightSlot


class Norm(PluggableLayer, name="norm"):
    """Adds what the last sub-layer made to the residual and norms the sum. Slot: weight."""

    def __init__(self, ctx: Context, args: NormArgs) -> None:
        super().__init__(ctx)
        self.args, self.dtype = args, dtype_name(ctx.dtype)
        self._rms_norm = rms_norm.bind(ctx)
        self._add_rms_norm = add_rms_norm.bind(ctx)

    def declare(self) -> dict[str, WeightSlot]:
        return {"weight": WeightSlot((self.args.size,), self.dtype)}

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, n] -> norm(x + residual), x + residual. Without a residual, x is it.

        May write to ``residual``.
        """
        if residual is None:
            return self._rms_norm(x, self.weights["weight"], eps=self.args.eps), x
        return self._add_rms_norm(x, residual, self.weights["weight"], eps=self.args.eps)
