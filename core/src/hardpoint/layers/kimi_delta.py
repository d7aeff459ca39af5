"""Kimi Delta Attention: a gated delta net that forgets each channel of a key at a speed of its own.

Axes: T tokens, N requests, H heads, D head size, W width of the convolution.
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
from hardpoint.parallel.shards import HeadShards
from hardpoint_plugin_api import ForwardStep, KimiDeltaAttentionArgs, LinearArgs, Plane, WeightSlot


class KimiDeltaAttention(PluggableLayer, name="kimi_delta_attention"):
    """See KimiDeltaAttentionArgs. Slots: conv [3 H D, 1, W] with the parts q, k, v; norm [D]; float32 rate [1, 1, H, 1]
    and step_bias [H D].

    The cache holds for each sequence the last W - 1 inputs of the convolution (``conv`` [W - 1, 3 H D], in the model's
    dtype) and ``state`` float32 [H, D, D], values along axis 1.
    """

    def __init__(self, ctx: Context, args: KimiDeltaAttentionArgs) -> None:
        super().__init__(ctx)
        self.args, self.dtype = args, dtype_name(ctx.dtype)
        self._group, self._returns_partial_sums = ctx.parallel.tp, False
        self._heads = heads = HeadShards.of(args.num_heads, args.num_heads, ctx.parallel.tp)
        width, rank, hidden = args.num_heads * args.head_size, args.gate_rank, args.hidden_size
        self._shards = heads.rows(args.head_size)
        self._by_head = () if heads.query is None else (heads.query,)
        parts = (("q", width), ("k", width), ("v", width))
        self.qkv = Linear(ctx.child("qkv"), LinearArgs(hidden, parts, row_shards=self._shards))
        self.b = Linear(ctx.child("b"), LinearArgs(hidden, (("b", args.num_heads),), row_shards=self._by_head))
        self.gates = Linear(ctx.child("gates"), LinearArgs(hidden, (("decay", rank), ("z", rank))))
        self.decay, self.z = (
            Linear(ctx.child(name), LinearArgs(rank, ((name, width),), row_shards=self._shards[:1]))
            for name in ("decay", "z")
        )
        self.out = Linear(
            ctx.child("out"), LinearArgs(width, (("out", hidden),), column_shard=heads.columns(args.head_size))
        )
        self._parts = self.qkv.args.own_parts
        self._widths = [rows for _, rows in self._parts]
        self.index = add_states(
            ctx,
            Plane("conv", (args.conv_width - 1, sum(self._widths)), self.dtype),
            Plane("state", (heads.num_heads, args.head_size, args.head_size), "float32"),
        )
        self._conv, self._gates = ShortConvolution(ctx, args.activation), recurrence_gates.bind(ctx)
        size = args.head_size
        self._recurrence = Recurrence(ctx, size, scale=size**-0.5, delta_rule=True, normalize=True, channel_decay=True)
        self._norm_scalars: dict[str, Any] = {"eps": args.norm_eps, "gate_first": False}
        self._norm = gated_rms_norm.bind(ctx, activation="sigmoid", scalars=self._norm_scalars)

    def declare(self) -> dict[str, WeightSlot]:
        heads, size = self._heads.num_heads, self.args.head_size
        conv = WeightSlot((sum(self._widths), 1, self.args.conv_width), self.dtype, 0, self._parts, shards=self._shards)
        rate = WeightSlot((1, 1, heads, 1), "float32", 2, shards=self._by_head)
        bias = WeightSlot((heads * size,), "float32", 0, shards=self._shards[:1])
        return {"conv": conv, "norm": WeightSlot((size,), self.dtype), "rate": rate, "step_bias": bias}

    def return_partial_sums(self) -> bool:
        self._returns_partial_sums = True
        return True

    def forward(self, x: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. Advances the states of the step's requests."""
        shape = x.shape[0], self._heads.num_heads, self.args.head_size
        qkv, (low_decay, low_z) = self.qkv(x, step), self.gates(x, step).chunk(2, dim=1)
        rate, bias = self.weights["rate"].flatten(), self.weights["step_bias"].view(shape[1:])
        a = self.decay(low_decay, step).view(shape)
        decay, beta = self._gates(a, self.b(x, step), rate, bias, low=0.0)
        mixed = qkv.new_empty(shape)
        step.interrupt(self.index, self._advance, qkv, decay, beta, mixed)
        z, weight = self.z(low_z, step).view(shape), self.weights["norm"][None]
        y = self._norm(mixed, z, weight, activation="sigmoid", **self._norm_scalars)
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
        """Write the results of inputs qkv [T, 3 H D] to ``out`` [T, H, D]; mutates ``cache``."""
        mixed = self._conv.advance(qkv, self.weights["conv"], None, cache["conv"], plan)
        q, k, v = (x.unflatten(1, (-1, self.args.head_size)) for x in mixed.split(self._widths, dim=1))
        self._recurrence.advance((q, k, v, decay, beta), cache["state"], plan, out)
