"""The record of routed experts: which experts the router chose for each token, layer by layer.

It lies in the paged cache beside keys and values, so that it holds for tokens of a cached prefix, of every chunk of a
prompt, and of requests that were preempted. Axes: T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hardpoint.context import Context
from hardpoint_plugin_api import (
    AttentionMetadata,
    CacheSpec,
    CacheUser,
    CaptureGrade,
    ForwardStep,
    PlainLayout,
    Plane,
    StepPlanner,
)

PLANE = "expert_ids"
"""The plane's name, by which ``recorders`` finds the layers that keep a record."""


class RecordPlanner(StepPlanner):
    """Steps need no plan: slots are in the batch's own arrays."""

    capture = CaptureGrade.ANY
    exact_lengths = False


class RoutedExperts:
    """The record of one layer. ``num_experts`` is below 2**15: ids are kept as int16."""

    def __init__(self, ctx: Context, top_k: int) -> None:
        spec = CacheSpec((Plane(PLANE, (top_k,), "int16"),))
        self._user = ctx.cache_users.add(CacheUser(ctx.path, spec, PlainLayout(), RecordPlanner(), RecordPlanner))

    def store(self, ids: torch.Tensor, step: ForwardStep) -> None:
        """Write ids [T, K], of all the step's tokens, to the cache."""
        step.interrupt(self._user, _store, ids)


def _store(cache: dict[str, torch.Tensor], plan: AttentionMetadata, ids: torch.Tensor) -> None:
    record, slots = cache[PLANE], plan.batch.slot_mapping.long()
    block = record.shape[1]
    record[slots // block, slots % block] = ids.to(record.dtype)


def recorders(users: Sequence[CacheUser]) -> list[int]:
    """The numbers of the cache users that are such records, in the order of their layers."""
    return [number for number, user in enumerate(users) if user.spec.planes[0].name == PLANE]
