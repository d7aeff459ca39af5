"""Linear layer: named row blocks of one weight, multiplied by the kernel that the selector chose."""

from __future__ import annotations

import torch

from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers.base import PluggableLayer
from hardpoint.ops.base import by_tokens
from hardpoint.plugins.blame import construct
from hardpoint_plugin_api import LinearArgs, LinearKernel, LinearWorkload, QuantSpec, WeightSlot


class Linear(PluggableLayer, name="linear"):
    """``y[T, out] = x[T, in] @ weight[out, in].T + bias[out]``. Slots: weight, and bias where there is one."""

    def __init__(self, ctx: Context, args: LinearArgs) -> None:
        super().__init__(ctx)
        self.args, self.dtype = args, dtype_name(ctx.dtype)
        plain = QuantSpec(self.dtype)
        workload = LinearWorkload(
            dtype=self.dtype, in_features=args.in_features, out_features=args.out_features, spec=(plain, plain)
        )
        plan = ctx.select(workload)
        self.kernels = [construct(e.offer, ctx.load(e.offer), LinearKernel, ctx, workload) for e in plan.entries]
        self._matmul = by_tokens([e.range.max for e in plan.entries], [k.apply for k in self.kernels])
        self._bias: torch.Tensor | None = None

    def declare(self) -> dict[str, WeightSlot]:
        parts = self.args.parts if len(self.args.parts) > 1 else ()
        slots = {"weight": WeightSlot((self.args.out_features, self.args.in_features), self.dtype, 0, parts)}
        if self.args.bias:
            slots["bias"] = WeightSlot((self.args.out_features,), self.dtype, 0, parts)
        return slots

    def prepare(self) -> None:
        self._bias = self.weights.pop("bias", None)
        self.weights = self.kernels[0].prepack(self.weights)

    def release(self) -> None:
        super().release()
        self._bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        return self._matmul(x, self.weights, self._bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` [T] of the weight, [T, in]: a tied embedding's look-up."""
        return self.kernels[0].rows(self.weights, ids)
