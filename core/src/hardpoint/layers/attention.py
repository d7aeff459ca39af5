"""Self-attention of a decoder block: project, norm, rotate and store in one composite op, attend, project back.

Axes: T tokens, H query heads, K KV heads, D head size. A group of ranks divides the heads; each sums what all made.
"""

from __future__ import annotations

from typing import Any

import torch

from hardpoint.attention.build import attention_backend
from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers.base import PluggableLayer
from hardpoint.layers.linear import Linear
from hardpoint.layers.norm import NormAcrossHeads
from hardpoint.layers.query_scaling import QueryScaling
from hardpoint.ops.activation import activation
from hardpoint.ops.qk_norm_rope_store import qk_norm_rope_store
from hardpoint.ops.rope_table import rope_table
from hardpoint.parallel.shards import HeadShards, widened
from hardpoint_plugin_api import (
    AttentionArgs,
    AttentionCall,
    AttentionSpec,
    ForwardStep,
    LinearArgs,
    Quantized,
    WeightSlot,
)


class Attention(PluggableLayer, name="attention"):
    """Slots: q_norm and k_norm [D] where heads are normed ([H D] and [K D] across heads), sinks [H] where there are
    sinks, k_scale and v_scale [1] where the checkpoint has scales for an 8-bit cache."""

    def __init__(self, ctx: Context, args: AttentionArgs) -> None:
        super().__init__(ctx)
        self.args, self.dtype, self._device = args, dtype_name(ctx.dtype), ctx.torch_device
        self._num_positions = ctx.max_model_len
        q_size, kv_size = args.num_heads * args.head_size, args.num_kv_heads * args.head_size
        self._group, self._returns_partial_sums = ctx.parallel.tp, False
        self._heads = heads = HeadShards.of(args.num_heads, args.num_kv_heads, ctx.parallel.tp)
        own = heads.num_heads, heads.num_kv_heads, heads.num_kv_heads
        parts, shards = (("q", q_size), ("k", kv_size), ("v", kv_size)), heads.rows(args.head_size)
        if args.output_gate:
            own, parts = (2 * own[0], *own[1:]), (("q", 2 * q_size), *parts[1:])
            shards = shards and (widened(shards[0], 2), *shards[1:])
            self._sigmoid = activation.bind(ctx, activation="sigmoid")
        self._widths = list(own)
        self.qkv = Linear(ctx.child("qkv"), LinearArgs(args.hidden_size, parts, args.qkv_bias, row_shards=shards))
        self.input_spec = self.qkv.input_spec
        self.out = Linear(
            ctx.child("out"),
            LinearArgs(q_size, (("out", args.hidden_size),), args.out_bias, column_shard=heads.columns(args.head_size)),
        )
        spec = AttentionSpec(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_size=args.head_size,
            scale=args.scale,
            dtype=self.dtype,
            kv_dtype=ctx.kv_dtype,
            block_size=ctx.block_size,
            window=args.window,
            chunk=args.chunk,
            soft_cap=args.soft_cap,
            sinks=args.sinks,
            alibi=args.alibi,
            static_cache_scales=ctx.quantization.cache_scales(ctx.path, ctx.kv_dtype),
        )
        self._static_cache_scales = spec.static_cache_scales
        self.index, self.backend, layout = attention_backend(ctx, spec)
        eps = args.qk_norm_eps or 0.0
        self._norm_across_heads = NormAcrossHeads(ctx, eps) if args.qk_norm_across_heads else None
        self._query_scaling = QueryScaling(ctx, args.query_scaling) if args.query_scaling else None
        self._scalars: dict[str, Any] = {
            "eps": 0.0 if args.qk_norm_across_heads else eps,
            "interleaved": args.rope is not None and args.rope.interleaved,
        }
        self._qk_norm_rope_store = qk_norm_rope_store.bind(
            ctx,
            parts={"store": self.backend.store},
            layout=layout,
            kv_dtype=ctx.kv_dtype,
            head_size=args.head_size,
            scalars=self._scalars,
        )
        self._shared = ctx.shared
        self._cos_sin: torch.Tensor | None = None
        self._ones: torch.Tensor | None = None

    def declare(self) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {}
        if self.args.qk_norm_across_heads:
            heads, size = self._heads, self.args.head_size
            rows = heads.rows(size) or (None, None)
            slots |= {
                "q_norm": NormAcrossHeads.slot(heads.num_heads * size, self.dtype, rows[0]),
                "k_norm": NormAcrossHeads.slot(heads.num_kv_heads * size, self.dtype, rows[1]),
            }
        elif self.args.qk_norm_eps is not None and self.args.qk_norm_weights:
            slots |= {name: WeightSlot((self.args.head_size,), self.dtype) for name in ("q_norm", "k_norm")}
        if self.args.sinks:
            query = self._heads.query
            slots["sinks"] = WeightSlot((self._heads.num_heads,), "float32", 0, shards=(query,) if query else ())
        if self._static_cache_scales:
            slots |= {name: WeightSlot((1,), "float32") for name in ("k_scale", "v_scale")}
        return slots

    def bind(self) -> None:
        rope = self.args.rope
        if rope is not None:
            self._cos_sin = self._shared(rope, lambda: rope_table(rope, self._num_positions, self._device))
        if self.args.qk_norm_eps is not None and not self.args.qk_norm_weights:
            self._ones = torch.ones(self.args.head_size, dtype=getattr(torch, self.dtype), device=self._device)
        if self._query_scaling is not None:
            self._query_scaling.bind()
        slopes = alibi_slopes(self.args.num_heads, self._device)[self._heads.own] if self.args.alibi else None
        self.backend.set_head_constants(self.weights.get("sinks"), slopes)
        if self._static_cache_scales:
            self.backend.set_cache_scales(self.weights["k_scale"], self.weights["v_scale"])

    def return_partial_sums(self) -> bool:
        self._returns_partial_sums = True
        return True

    def _ungated(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries [T, H, D] and their gates alike, of [T, 2 H, D] where there are gates: a head's query is first."""
        if not self.args.output_gate:
            return q, None
        q, gate = q.unflatten(1, (-1, 2)).unbind(2)
        return q.contiguous(), gate

    def forward(self, x: torch.Tensor | Quantized, step: ForwardStep) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. Writes this step's keys and values to the layer's cache."""
        size = self.args.head_size
        qkv = self.qkv(x, step).view(x.shape[0], -1, size)
        q, k, v = qkv.split(self._widths, dim=1)
        q, gate = self._ungated(q)
        q_norm, k_norm = self.weights.get("q_norm", self._ones), self.weights.get("k_norm", self._ones)
        if self._norm_across_heads is not None:
            q, k = (
                self._norm_across_heads(q, self.weights["q_norm"]),
                self._norm_across_heads(k, self.weights["k_norm"]),
            )
            q_norm = k_norm = None
        q, k = self._qk_norm_rope_store(
            q,
            k,
            v,
            self._cos_sin,
            step.rotary_positions,
            step.caches[self.index],
            step.metadata[self.index].batch.slot_mapping,
            q_norm,
            k_norm,
            **self._scalars,
        )
        if self._query_scaling is not None:
            q = self._query_scaling(q, step.positions)
        attended = torch.empty_like(q)
        attend = self.backend.forward
        step.interrupt(
            self.index,
            lambda cache, plan, q, k, v, out: attend(AttentionCall(q, k, v, cache, plan, out)),
            *(q, k, v, attended),
        )
        mixed = attended.view(x.shape[0], -1)
        if gate is not None:
            mixed = mixed * self._sigmoid(gate.reshape(mixed.shape), activation="sigmoid")
        y: torch.Tensor = self.out(mixed, step)
        return y if self._returns_partial_sums else self._group.all_reduce(y)


def alibi_slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    """The slopes of ALiBi (Press et al. 2022, arXiv:2108.12409), float32 [num_heads].

    For a power of two n they are 2^(-8/n), 2^(-16/n), ...; otherwise those of the power below, followed by every
    second slope of the power above.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
