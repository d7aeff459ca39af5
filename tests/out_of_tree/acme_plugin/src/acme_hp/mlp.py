"""Acme's feed-forward: one layer without sub-layers, which takes the weights that core's sub-layers would hold."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers import PluggableLayer
from hardpoint_plugin_api import ConfigError, ForwardStep, MLPArgs, WeightSlot


class AcmeMLP(PluggableLayer):
    """``down(silu(gate(x)) * up(x))``. Slots bear the paths of core's sub-layers, so checkpoints load unchanged."""

    def __init__(self, ctx: Context, args: MLPArgs) -> None:
        super().__init__(ctx)
        if args.activation != "silu" or not args.gated or args.bias:
            raise ConfigError(f"{ctx.path}: acme_mlp serves feed-forwards gated by SiLU and without biases, not {args}")
        self.args, self.dtype = args, dtype_name(ctx.dtype)

    def declare(self) -> dict[str, WeightSlot]:
        width, hidden = self.args.intermediate_size, self.args.hidden_size
        return {
            "gate_up.weight": WeightSlot((2 * width, hidden), self.dtype, 0, (("gate", width), ("up", width))),
            "down.weight": WeightSlot((hidden, width), self.dtype, 1),
        }

    def forward(self, x: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        gate, up = linear(x.contiguous(), self.weights["gate_up.weight"]).chunk(2, dim=-1)
        return linear(silu(gate) * up, self.weights["down.weight"])
