"""Attention of a model's code: Transformers' attention interface, served by the selected backend and the paged cache.

Axes: T tokens, H query heads, K KV heads, D head size, E the size of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hardpoint.attention.build import attention_backend
from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers.attention import alibi_slopes
from hardpoint.layers.base import PluggableLayer
from hardpoint.models.transformers_code.architectures import ATTENTION
from hardpoint.models.transformers_code.probe import AttentionSeen
from hardpoint_plugin_api import AttentionCall, AttentionSpec, ForwardStep, StoreCall, WeightSlot

CURRENT = "hardpoint_current"
"""The attribute by which a module's code finds the state that its model shares."""


class Attend(PluggableLayer):
    """One call of attention in a step. Slot: sinks float32 [H], where there are sinks.

    Values smaller than keys are stored with zeros behind them.
    """

    def __init__(self, ctx: Context, seen: AttentionSeen) -> None:
        super().__init__(ctx)
        self.seen, self._device, self._group = seen, ctx.torch_device, ctx.parallel.tp
        spec = AttentionSpec(
            num_heads=seen.num_heads,
            num_kv_heads=seen.num_kv_heads,
            head_size=seen.head_size,
            scale=seen.scale,
            dtype=dtype_name(ctx.dtype),
            kv_dtype=ctx.kv_dtype,
            block_size=ctx.block_size,
            window=seen.mask.window,
            chunk=seen.mask.chunk,
            soft_cap=seen.soft_cap,
            sinks=seen.sinks is not None,
            alibi=seen.alibi,
        )
        self.index, self.backend, _ = attention_backend(ctx, spec)

    def declare(self) -> dict[str, WeightSlot]:
        return {"sinks": WeightSlot((self.seen.num_heads,), "float32")} if self.seen.sinks is not None else {}

    def bind(self) -> None:
        slopes = None
        if self.seen.alibi:
            own = self.seen.num_heads
            first = own * self._group.rank
            slopes = alibi_slopes(own * self._group.size, self._device)[first : first + own]
        self.backend.set_head_constants(self.weights.get("sinks"), slopes)

    def allocate(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        return q.new_empty(*q.shape[:2], self.seen.value_size)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """q [T, H, D], k [T, K, D], v [T, K, E] -> [T, H, E]. Writes keys and values to the cache."""
        size, value = self.seen.head_size, self.seen.value_size
        if value < size:
            v = functional.pad(v, (0, size - value))
        q, k, v = _heads_in_rows(q), _heads_in_rows(k), _heads_in_rows(v)
        slots = step.metadata[self.index].batch.slot_mapping
        self.backend.store(StoreCall(k, v, step.caches[self.index], slots))
        attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        attend = self.backend.forward
        step.interrupt(
            self.index,
            lambda cache, plan, q, k, v, out: attend(AttentionCall(q, k, v, cache, plan, out)),
            *(q, k, v, attended),
        )
        return attended if value == size else attended[..., :value]


def _heads_in_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D], copied unless a token's heads lie one behind the other, as in a merged projection's output."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """A function of Transformers' attention interface: query [1, H, T, D] and the like -> [1, T, H, E]."""
    current = getattr(module, CURRENT)
    if current.probe is not None:
        return current.probe.attend(module, query, key, value, attention_mask, scaling, **keywords), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return current.attend(q, k, v)[None], None


def register() -> None:
    """Add our attention to Transformers' interface, under the name that configs are given."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
