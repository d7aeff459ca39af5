"""Root-mean-square norm of a residual stream."""

from __future__ import annotations

import torch

from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers.base import PluggableLayer
from hardpoint.ops.add_rms_norm import add_rms_norm, add_rms_norm_quantized
from hardpoint.ops.allreduce_add_rms_norm import allreduce_add_rms_norm
from hardpoint.ops.rms_norm import rms_norm, rms_norm_quantized
from hardpoint_plugin_api import NormArgs, Quantized, WeightSlot


class Norm(PluggableLayer, name="norm"):
    """Adds what the last sub-layer made to the residual and norms the sum. Slot: weight."""

    def __init__(self, ctx: Context, args: NormArgs) -> None:
        super().__init__(ctx)
        self.args, self.dtype = args, dtype_name(ctx.dtype)
        spec, self._scalars = args.spec, {"eps": args.eps}
        if spec is None:
            self._rms_norm = rms_norm.bind(ctx, scalars=self._scalars)
            self._add_rms_norm = add_rms_norm.bind(ctx, scalars=self._scalars)
        else:
            self._rms_norm_quantized = rms_norm_quantized.bind(ctx, spec=spec, scalars=self._scalars)
            self._add_rms_norm_quantized = add_rms_norm_quantized.bind(ctx, spec=spec, scalars=self._scalars)

    def declare(self) -> dict[str, WeightSlot]:
        return {"weight": WeightSlot((self.args.size,), self.dtype)}

    @property
    def takes_partial_sums(self) -> bool:
        """False where the output is quantized, too: no kernel sums over ranks, norms and quantizes."""
        return self.args.spec is None

    def take_partial_sums(self, ctx: Context) -> None:
        self._add_rms_norm = allreduce_add_rms_norm.bind(ctx, hidden_size=self.args.size, scalars=self._scalars)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | Quantized, torch.Tensor]:
        """x, residual [T, n] -> norm(x + residual), x + residual. Without a residual, x is it.

        May write to ``residual``, and to ``x`` where that is a partial sum. The norm is in the form of the arguments'
        ``spec``.
        """
        weight, eps, spec = self.weights["weight"], self.args.eps, self.args.spec
        if spec is None:
            if residual is None:
                return self._rms_norm(x, weight, eps=eps), x
            return self._add_rms_norm(x, residual, weight, eps=eps)
        if residual is None:
            return Quantized(*self._rms_norm_quantized(x, weight, eps=eps, spec=spec), spec), x
        data, scale, total = self._add_rms_norm_quantized(x, residual, weight, eps=eps, spec=spec)
        return Quantized(data, scale, spec), total
