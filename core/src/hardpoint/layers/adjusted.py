"""A sub-layer of a block whose result is changed before it is added to the residual stream."""

from __future__ import annotations

import torch

from hardpoint.context import Context
from hardpoint.layers.base import PluggableLayer, build_layer
from hardpoint.layers.norm import Norm
from hardpoint_plugin_api import AdjustedArgs, ForwardStep, Quantized


class Adjusted(PluggableLayer, name="adjusted"):
    """``multiplier * norm(inner(x))``, without the norm where the arguments have none."""

    traceable = True

    def __init__(self, ctx: Context, args: AdjustedArgs) -> None:
        super().__init__(ctx)
        self.args = args
        self.inner = build_layer(ctx.child("inner"), args.inner)
        self.norm = None if args.norm is None else Norm(ctx.child("norm"), args.norm)
        self.input_spec = self.inner.input_spec

    def return_partial_sums(self) -> bool:
        """Partial sums may be multiplied, and not normed."""
        return self.norm is None and self.inner.return_partial_sums()

    def forward(self, x: torch.Tensor | Quantized, step: ForwardStep) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        y: torch.Tensor = self.inner(x, step)
        if self.norm is not None:
            y = self.norm(y)[0]
        return y if self.args.multiplier == 1.0 else y * self.args.multiplier
