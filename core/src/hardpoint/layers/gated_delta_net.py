"""Gated delta net: linear attention whose state forgets, and corrects what it holds for a key before it adds to it.

Axes: T tokens, N requests, H heads, K key heads, D key size, V value size, W width of the convolution.
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
from hardpoint_plugin_api import ForwardStep, GatedDeltaNetArgs, LinearArgs, Plane, ShardPlan, WeightSlot


class GatedDeltaNet(PluggableLayer, name="gated_delta_net"):
    """See GatedDeltaNetArgs. Slots: conv [2 K D + H V, 1, W] with the parts q, k, v; norm [V]; float32 rate and
    step_bias [H].

    The cache holds for each sequence the last W - 1 inputs of the convolution (``conv`` [W - 1, 2 K D + H V], in the
    model's dtype) and ``state`` float32 [H, V, D].
    """

    def __init__(self, ctx: Context, args: GatedDeltaNetArgs) -> None:
        super().__init__(ctx)
        self.args, self.dtype = args, dtype_name(ctx.dtype)
        self._group, self._returns_partial_sums = ctx.parallel.tp, False
        self._heads = heads = HeadShards.of(args.num_heads, args.num_key_heads, ctx.parallel.tp)
        keys, values = args.num_key_heads * args.key_size, args.num_heads * args.value_size
        self._shards = _shards(heads, args.key_size, args.value_size)
        by_head = () if heads.query is None else (heads.query,)
        parts = (("q", keys), ("k", keys), ("v", values))
        self.qkv = Linear(ctx.child("qkv"), LinearArgs(args.hidden_size, parts, row_shards=self._shards))
        self.z = Linear(ctx.child("z"), LinearArgs(args.hidden_size, (("z", values),), row_shards=self._shards[2:]))
        gates = (("b", args.num_heads), ("a", args.num_heads))
        self.ba = Linear(ctx.child("ba"), LinearArgs(args.hidden_size, gates, row_shards=by_head * 2))
        self.out = Linear(
            ctx.child("out"),
            LinearArgs(values, (("out", args.hidden_size),), column_shard=heads.columns(args.value_size)),
        )
        self._parts = tuple((name, rows) for name, rows in self.qkv.args.own_parts)
        self._widths = [rows for _, rows in self._parts]
        self.index = add_states(
            ctx,
            Plane("conv", (args.conv_width - 1, sum(self._widths)), self.dtype),
            Plane("state", (heads.num_heads, args.value_size, args.key_size), "float32"),
        )
        self._conv = ShortConvolution(ctx, args.activation)
        self._gates = recurrence_gates.bind(ctx)
        self._recurrence = Recurrence(ctx, args.key_size, scale=args.key_size**-0.5, delta_rule=True, normalize=True)
        self._norm_scalars: dict[str, Any] = {"eps": args.norm_eps, "gate_first": False}
        self._norm = gated_rms_norm.bind(ctx, activation="silu", scalars=self._norm_scalars)

    def declare(self) -> dict[str, WeightSlot]:
        query = self._heads.query
        by_head = WeightSlot((self._heads.num_heads,), "float32", 0, shards=(query,) if query else ())
        conv = WeightSlot((sum(self._widths), 1, self.args.conv_width), self.dtype, 0, self._parts, shards=self._shards)
        norm = WeightSlot((self.args.value_size,), self.dtype)
        return {"conv": conv, "norm": norm, "rate": by_head, "step_bias": by_head}

    def return_partial_sums(self) -> bool:
        self._returns_partial_sums = True
        return True

    def forward(self, x: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. Advances the states of the step's requests."""
        qkv, z = self.qkv(x, step), self.z(x, step)
        b, a = self.ba(x, step).chunk(2, dim=1)
        decay, beta = self._gates(a, b, self.weights["rate"], self.weights["step_bias"], low=0.0)
        mixed = qkv.new_empty(x.shape[0], self._heads.num_heads, self.args.value_size)
        step.interrupt(self.index, self._advance, qkv, decay, beta, mixed)
        gate = z.view(mixed.shape)
        y = self._norm(mixed, gate, self.weights["norm"][None], activation="silu", **self._norm_scalars)
        y = self.out(y.flatten(1), step)
        return y if self._returns_partial_sums else self._group.all_reduce(y)

    def _advance(
        self,
        cache: dict[str, torch.Tensor],
        plan: StateMetadata,
        qkv: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the results of inputs qkv [T, 2 K D + H V] to ``out`` [T, H, V]; mutates ``cache``."""
        mixed = self._conv.advance(qkv, self.weights["conv"], None, cache["conv"], plan)
        q, k, v = mixed.split(self._widths, dim=1)
        q, k = (x.unflatten(1, (-1, self.args.key_size)) for x in (q, k))
        inputs = q, k, v.unflatten(1, (-1, self.args.value_size)), decay, beta
        self._recurrence.advance(inputs, cache["state"], plan, out)


def _shards(heads: HeadShards, key_size: int, value_size: int) -> tuple[ShardPlan, ...]:
    """The rows of q, k and v; nothing for one rank."""
    if heads.query is None or heads.kv is None:
        return ()
    keys = widened(heads.kv, key_size)
    return keys, keys, widened(heads.query, value_size)
