"""The feed-forward of a decoder block."""

from __future__ import annotations

import torch

from hardpoint.context import Context
from hardpoint.layers.base import PluggableLayer
from hardpoint.layers.linear import Linear
from hardpoint.ops.act_and_mul import act_and_mul
from hardpoint.ops.activation import activation
from hardpoint.parallel.shards import even_shard
from hardpoint_plugin_api import LinearArgs, MLPArgs


class MLP(PluggableLayer, name="mlp"):
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` where it is not gated."""

    def __init__(self, ctx: Context, args: MLPArgs) -> None:
        super().__init__(ctx)
        self.args = args
        width = args.intermediate_size
        parts = (("gate", width), ("up", width)) if args.gated else (("up", width),)
        self._group = group = ctx.parallel.tp
        shard = even_shard(width, group, "intermediate size")
        rows = (shard,) * len(parts) if shard else ()
        self.gate_up = Linear(ctx.child("gate_up"), LinearArgs(args.hidden_size, parts, args.bias, row_shards=rows))
        self.down = Linear(
            ctx.child("down"), LinearArgs(width, (("down", args.hidden_size),), args.bias, column_shard=shard)
        )
        self._activate = (act_and_mul if args.gated else activation).bind(ctx, activation=args.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        y: torch.Tensor = self.down(self._activate(self.gate_up(x), activation=self.args.activation))
        return self._group.all_reduce(y)
