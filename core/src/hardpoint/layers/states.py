"""Steps of layers that keep a state of each sequence in the cache.

Axes: T tokens, N requests, H heads, D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch

from hardpoint.context import Context
from hardpoint.ops.causal_conv import causal_conv
from hardpoint.ops.linear_recurrence import linear_recurrence_chunks, linear_recurrence_step
from hardpoint_plugin_api import (
    AttentionBatch,
    AttentionMetadata,
    CacheSpec,
    CacheUser,
    CaptureGrade,
    Latest,
    PlainLayout,
    Plane,
    StepPlanner,
)


@dataclass
class StateMetadata(AttentionMetadata):
    """``pages`` int64 [N]: the page of each request's state, see AttentionBatch.state_pages."""

    pages: torch.Tensor | None = None

    @property
    def state_pages(self) -> torch.Tensor:
        """The pages that ``plan`` found."""
        return cast(torch.Tensor, self.pages)


class StatePlanner(StepPlanner):
    """Finds the pages of states, once for all layers of a cache group.

    A step of one token for each request reads nothing from the host, so it can be captured.
    """

    capture = CaptureGrade.SINGLE_TOKEN

    def __init__(self, ctx: Context) -> None:
        self._block_size = ctx.block_size
        self._pages = torch.zeros(ctx.limits.max_sequences, dtype=torch.int64, device=ctx.torch_device)

    def plan(self, batch: AttentionBatch) -> StateMetadata:
        """See StepPlanner. The pages lie where captured steps find them again."""
        pages = self._pages[: batch.num_requests]
        pages.copy_(batch.state_pages(self._block_size))
        return StateMetadata(batch, pages=pages)


def add_states(ctx: Context, *planes: Plane) -> int:
    """Declare a cache of one state for each sequence, of these planes. Returns the user's number."""
    spec = CacheSpec(planes, Latest())
    return ctx.cache_users.add(CacheUser(ctx.path, spec, PlainLayout(), StatePlanner(ctx), StatePlanner))


class ShortConvolution:
    """A causal convolution of each channel, whose last inputs are kept from step to step."""

    def __init__(self, ctx: Context, activation: str) -> None:
        self._activation = activation
        self._conv = causal_conv.bind(ctx, activation=activation)

    def advance(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        plan: StateMetadata,
    ) -> torch.Tensor:
        """The results of x [T, C] by a weight stored as [C, 1, W]. Mutates ``states``."""
        arrays = plan.state_pages, plan.batch.query_start, plan.batch.seq_lens
        return self._conv(x, weight.squeeze(1), bias, states, *arrays, activation=self._activation)


class Recurrence:
    """A linear recurrence over the tokens of a step: decodes by one op, prompts by another."""

    def __init__(
        self,
        ctx: Context,
        key_size: int,
        *,
        scale: float,
        delta_rule: bool,
        normalize: bool,
        channel_decay: bool = False,
    ) -> None:
        """The scalars are those of the op linear_recurrence_step."""
        self._scalars: dict[str, Any] = {
            "scale": scale,
            "delta_rule": delta_rule,
            "normalize": normalize,
            "channel_decay": channel_decay,
        }
        self._step = linear_recurrence_step.bind(ctx, head_size=key_size, scalars=self._scalars)
        self._chunks = linear_recurrence_chunks.bind(ctx, head_size=key_size, scalars=self._scalars)

    def advance(
        self, inputs: Iterable[torch.Tensor], states: torch.Tensor, plan: StateMetadata, out: torch.Tensor
    ) -> None:
        """Write results to ``out`` [T, H, V], and mutate ``states``. ``inputs``: q, k, v, decay and beta of the ops."""
        batch, pages, count = plan.batch, plan.state_pages, plan.batch.num_decodes
        q, k, v, decay, beta = inputs
        if count:
            decodes = q[:count], k[:count], v[:count], decay[:count], beta[:count]
            out[:count] = self._step(*decodes, states, pages[:count], batch.seq_lens[:count], **self._scalars)
        if count < batch.num_requests:
            prompts = q[count:], k[count:], v[count:], decay[count:], beta[count:]
            starts = tuple(start - count for start in batch.query_start_host[count:])
            arrays = pages[count:], batch.query_start[count:] - count, batch.seq_lens[count:]
            out[count:] = self._chunks(*prompts, states, *arrays, starts=starts, **self._scalars)
