"""The feed-forward of a decoder block."""

from __future__ import annotations

import torch

from hardpoint.context import Context
from hardpoint.layers.base import PluggableLayer
from hardpoint.layers.linear import Linear
from hardpoint.ops.act_and_mul import act_and_mul
from hardpoint.ops.activation import activation
from hardpoint_plugin_api import LinearArgs, MLPArgs


class MLP(PluggableLayer, name="mlp"):
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` where it is not gated."""

    def __init__(self, ctx: Context, args: MLPArgs) -> None:
        super().__init__(ctx)
        self.args = args
        width = args.intermediate_size
        parts = (("gate", width), ("up", width)) if args.gated else (("up", width),)
        self.gate_up = Linear(ctx.child("gate_up"), LinearArgs(args.hidden_size, parts, args.bias))
        self.down = Linear(ctx.child("down"), LinearArgs(width, (("down", args.hidden_size),), args.bias))
        self._activate = (act_and_mul if args.gated else activation).bind(ctx, activation=args.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        y: torch.Tensor = self.down(self._activate(self.gate_up(x), activation=self.args.activation))
        return y
