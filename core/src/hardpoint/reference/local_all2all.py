"""All-to-all of one rank: every expert is here, and nothing travels.

Axes: T tokens, K experts per token, E experts, H hidden; a batch has T rows for each expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import torch

from hardpoint.ops.moe_permute import sort_pairs
from hardpoint.ops.moe_unpermute import moe_unpermute
from hardpoint_plugin_api import (
    ActivationFormat,
    All2All,
    All2AllWorkload,
    BuildContext,
    Dispatched,
    DispatchHandle,
)

if TYPE_CHECKING:
    from hardpoint.context import Context


class LocalAll2All(All2All):
    """One rank's all-to-all: every token goes to its experts on this rank."""

    def dispatch(
        self, x: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
    ) -> Dispatched:
        return Dispatched(x, scales, ids, weights, None, DispatchHandle(None))

    def combine(self, y: torch.Tensor, handle: object, out: torch.Tensor) -> None:
        cast(DispatchHandle[None], handle).take()
        if y is not out:
            out.copy_(y)


class LocalBatches(All2All):
    """Sorts tokens into batches, one for each expert, that hold all of them: shapes do not depend on the routing."""

    format: ClassVar[ActivationFormat] = "batched"

    def __init__(self, ctx: BuildContext, workload: All2AllWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.num_experts is not None
        self._num_experts = workload.num_experts
        self._unpermute = moe_unpermute.bind(cast("Context", ctx))

    def most_rows(self, tokens: int) -> int:
        """Every expert's batch may hold every token."""
        return tokens * self._num_experts

    def dispatch(
        self, x: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
    ) -> Dispatched:
        tokens, experts = x.shape[0], self._num_experts
        _, starts, places = sort_pairs(ids, experts)
        expert = ids.long().clamp(min=0)
        slots = torch.where(places < 0, -1, expert * tokens + places - starts[expert])
        # Of a pair without an expert here, the row goes to a place behind all batches.
        order = torch.where(slots < 0, experts * tokens, slots).flatten()

        def batches(rows: torch.Tensor) -> torch.Tensor:
            made = rows.new_zeros(experts * tokens + 1, *rows.shape[1:])
            made[order] = rows.repeat_interleave(ids.shape[1], dim=0)
            return made[:-1].view(experts, tokens, *rows.shape[1:])

        sent_scales = None if scales is None else batches(scales)
        counts = starts.diff().to(torch.int32)
        return Dispatched(batches(x), sent_scales, None, None, counts, DispatchHandle((slots, weights)))

    def combine(self, y: torch.Tensor, handle: object, out: torch.Tensor) -> None:
        slots, weights = cast(DispatchHandle[tuple[torch.Tensor, torch.Tensor]], handle).take()
        out.copy_(self._unpermute(y.flatten(0, 1), slots, weights))
