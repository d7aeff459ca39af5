"""The feed-forward of a decoder block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hardpoint.context import Context
from hardpoint.layers.base import PluggableLayer
from hardpoint.layers.linear import Linear
from hardpoint.ops.act_and_mul import act_and_mul, act_and_mul_quantized
from hardpoint.ops.activation import activation
from hardpoint.parallel.shards import even_shard
from hardpoint_plugin_api import ForwardStep, LinearArgs, MLPArgs, Quantized


class MLP(PluggableLayer, name="mlp"):
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` where it is not gated."""

    def __init__(self, ctx: Context, args: MLPArgs) -> None:
        super().__init__(ctx)
        self.args = args
        width = args.intermediate_size
        parts = (("gate", width), ("up", width)) if args.gated else (("up", width),)
        self._group, self._returns_partial_sums = ctx.parallel.tp, False
        group = self._group
        shard = even_shard(width, group, "intermediate size")
        rows = (shard,) * len(parts) if shard else ()
        self.gate_up = Linear(ctx.child("gate_up"), LinearArgs(args.hidden_size, parts, args.bias, row_shards=rows))
        self.down = Linear(
            ctx.child("down"), LinearArgs(width, (("down", args.hidden_size),), args.bias, column_shard=shard)
        )
        self.input_spec = self.gate_up.input_spec
        self._middle = self._bound_middle(ctx)

    def return_partial_sums(self) -> bool:
        self._returns_partial_sums = True
        return True

    def forward(self, x: torch.Tensor | Quantized, step: ForwardStep) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        y: torch.Tensor = self.down(self._middle(self.gate_up(x, step)), step)
        return y if self._returns_partial_sums else self._group.all_reduce(y)

    def _bound_middle(self, ctx: Context) -> Callable[[torch.Tensor], torch.Tensor | Quantized]:
        """The activation, to the form that ``down`` wants where it is a gate."""
        name, spec = self.args.activation, self.down.input_spec
        if spec is None or not self.args.gated:
            return partial((act_and_mul if self.args.gated else activation).bind(ctx, activation=name), activation=name)
        rounding = act_and_mul_quantized.bind(ctx, activation=name, spec=spec)
        return lambda x: Quantized(*rounding(x, activation=name, spec=spec), spec)
