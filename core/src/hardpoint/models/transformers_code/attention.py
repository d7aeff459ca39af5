"""Attention of a model's code: Transformers' attention interface, served by the selected backend and the paged cache.

Axes: T tokens, H query heads, K KV heads, D head size, E the size of a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from hardpoint.ops.qk_norm_rope_store import qk_norm_rope_store
from hardpoint_plugin_api import AttentionCall, AttentionSpec, ForwardStep, StoreCall, WeightSlot

CURRENT = "hardpoint_current"
"""The attribute by which a module's code finds the state that its model shares."""


class Attend(PluggableLayer):
    """One call of attention in a step. Slot: sinks float32 [H], where there are sinks.

    Values smaller than keys are stored with zeros behind them. ``heads``: the scalars of ``qk_norm_rope_store``, where
    that op comes before attention; see FusedAttention.
    """

    def __init__(self, ctx: Context, seen: AttentionSeen, heads: Mapping[str, Any] | None = None) -> None:
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
        self.index, self.backend, layout = attention_backend(ctx, spec)
        self._heads = heads
        if heads is not None:
            self._qk_norm_rope_store = qk_norm_rope_store.bind(
                ctx,
                parts={"store": self.backend.store},
                layout=layout,
                kv_dtype=ctx.kv_dtype,
                head_size=seen.head_size,
                scalars=dict(heads),
            )

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
        attended = self._attended(q, k, v, step)
        return attended if value == size else attended[..., :value]

    def norm_rotate_attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: torch.Tensor | None,
        rows: torch.Tensor | None,
        weights: Sequence[torch.Tensor | None],
        step: ForwardStep,
    ) -> torch.Tensor:
        """q [T, H D], k and v [T, K D], as projected -> [T, H, D]. Writes keys and values to the cache, and to q and k.

        ``angles`` float32 [P, R] and ``rows`` int64 [T], a token's row of them, are None without rotation. ``weights``
        are those of the norms of q and k, [D] each, or None.
        """
        assert self._heads is not None
        q, k, v = (x.unflatten(1, (-1, self.seen.head_size)) for x in (q, k, v))
        slots = step.metadata[self.index].batch.slot_mapping
        rows = step.positions if rows is None else rows
        given = q, k, v, angles, rows, step.caches[self.index], slots
        q, k = self._qk_norm_rope_store(*given, *weights, **self._heads)
        return self._attended(q, k, v, step)

    def _attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        attend = self.backend.forward
        step.interrupt(
            self.index,
            lambda cache, plan, q, k, v, out: attend(AttentionCall(q, k, v, cache, plan, out)),
            *(q, k, v, attended),
        )
        return attended


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
