"""Mamba-2: a state space whose steps and inputs follow from the tokens.

Axes: T tokens, N requests, H heads, P head size, G groups, D state size, W width of the convolution.
"""

from __future__ import annotations

from typing import Any

import torch

from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers.base import PluggableLayer
from hardpoint.layers.linear import Linear
from hardpoint.layers.states import Recurrence, ShortConvolution, StateMetadata, add_states
from hardpoint.ops.gated_rms_norm import gated_rms_norm
from hardpoint.ops.recurrence_gates import recurrence_gates
from hardpoint.parallel.shards import HeadShards, widened
from hardpoint_plugin_api import (
    ConfigError,
    ForwardStep,
    LinearArgs,
    Mamba2Args,
    Plane,
    Quantized,
    ShardPlan,
    WeightSlot,
)


class Mamba2(PluggableLayer, name="mamba2"):
    """See Mamba2Args. Slots: conv [H P + 2 G D, 1, W] and conv_bias with the parts x, B, C; norm [H P]; float32 rate,
    step_bias and skip [H].

    The cache holds for each sequence the last W - 1 inputs of the convolution (``conv`` [W - 1, H P + 2 G D], in the
    model's dtype) and ``state`` float32 [H, P, D]. Ranks have whole groups.
    """

    def __init__(self, ctx: Context, args: Mamba2Args) -> None:
        super().__init__(ctx)
        self.args, self.dtype = args, dtype_name(ctx.dtype)
        self._group, self._returns_partial_sums = ctx.parallel.tp, False
        if args.num_groups % ctx.parallel.tp.size:
            raise ConfigError(
                f"--tensor-parallel-size {ctx.parallel.tp.size}: the model's {args.num_groups} groups of Mamba heads, "
                "each of which is normed as a whole, do not divide among as many ranks"
            )
        self._heads = heads = HeadShards.of(args.num_heads, args.num_groups, ctx.parallel.tp)
        width, states = args.num_heads * args.head_size, args.num_groups * args.state_size
        self._shards = _shards(heads, args.head_size, args.state_size)
        hidden, self._by_head = args.hidden_size, () if heads.query is None else (heads.query,)
        parts = (("z", width), ("x", width), ("B", states), ("C", states), ("dt", args.num_heads))
        shards = (*self._shards[:1], *self._shards, *self._by_head)
        self.inputs = Linear(ctx.child("inputs"), LinearArgs(hidden, parts, args.bias, row_shards=shards))
        self.input_spec = self.inputs.input_spec
        self.out = Linear(
            ctx.child("out"),
            LinearArgs(width, (("out", hidden),), args.bias, column_shard=heads.columns(args.head_size)),
        )
        self._parts = self.inputs.args.own_parts[1:4]
        self._widths = [rows for _, rows in self._parts]
        self.index = add_states(
            ctx,
            Plane("conv", (args.conv_width - 1, sum(self._widths)), self.dtype),
            Plane("state", (heads.num_heads, args.head_size, args.state_size), "float32"),
        )
        self._conv = ShortConvolution(ctx, args.activation)
        self._gates = recurrence_gates.bind(ctx)
        self._recurrence = Recurrence(ctx, args.state_size, scale=1.0, delta_rule=False, normalize=False)
        self._norm_scalars: dict[str, Any] = {"eps": args.norm_eps, "gate_first": True}
        self._norm = gated_rms_norm.bind(ctx, activation="silu", scalars=self._norm_scalars)

    def declare(self) -> dict[str, WeightSlot]:
        channels, heads = sum(self._widths), self._heads.num_heads
        by_head = WeightSlot((heads,), "float32", 0, shards=self._by_head)
        conv = WeightSlot((channels, 1, self.args.conv_width), self.dtype, 0, self._parts, shards=self._shards)
        bias = WeightSlot((channels,), self.dtype, 0, self._parts, shards=self._shards)
        norm = WeightSlot((heads * self.args.head_size,), self.dtype, 0, shards=self._shards[:1])
        slots = {"conv": conv, "norm": norm, "rate": by_head, "step_bias": by_head, "skip": by_head}
        return slots | ({"conv_bias": bias} if self.args.conv_bias else {})

    def return_partial_sums(self) -> bool:
        self._returns_partial_sums = True
        return True

    def forward(self, x: torch.Tensor | Quantized, step: ForwardStep) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. Advances the states of the step's requests."""
        channels, heads, weights = sum(self._widths), self._heads.num_heads, self.weights
        z, xbc, dt = self.inputs(x, step).split([self._widths[0], channels, heads], dim=1)
        decay, steps = self._gates(dt, None, weights["rate"], weights["step_bias"], low=self.args.min_step)
        mixed = xbc.new_empty(len(xbc), heads, self.args.head_size)
        step.interrupt(self.index, self._advance, xbc, decay, steps, mixed)
        groups = len(xbc), self._heads.num_kv_heads, self._widths[0] // self._heads.num_kv_heads
        norm = weights["norm"].view(self._heads.num_kv_heads, -1)
        y = self._norm(mixed.view(groups), z.view(groups), norm, activation="silu", **self._norm_scalars)
        y = self.out(y.flatten(1), step)
        return y if self._returns_partial_sums else self._group.all_reduce(y)

    def _advance(
        self,
        cache: dict[str, torch.Tensor],
        plan: StateMetadata,
        xbc: torch.Tensor,
        decay: torch.Tensor,
        steps: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the results of inputs xbc [T, H P + 2 G D] to ``out`` [T, H, P]; mutates ``cache``."""
        mixed = self._conv.advance(xbc, self.weights["conv"], self.weights.get("conv_bias"), cache["conv"], plan)
        x, b, c = mixed.split(self._widths, dim=1)
        x = x.unflatten(1, (-1, self.args.head_size))
        b, c = (y.unflatten(1, (-1, self.args.state_size)) for y in (b, c))
        self._recurrence.advance((c, b, x, decay, steps), cache["state"], plan, out)
        out += self.weights["skip"][:, None] * x


def _shards(heads: HeadShards, head_size: int, state_size: int) -> tuple[ShardPlan, ...]:
    """The rows of x, B and C; nothing for one rank."""
    if heads.query is None or heads.kv is None:
        return ()
    states = widened(heads.kv, state_size)
    return widened(heads.query, head_size), states, states
