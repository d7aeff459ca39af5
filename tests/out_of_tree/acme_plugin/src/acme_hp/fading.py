"""A mixer with a state of its own in the cache: a sum of all values so far, in which older ones fade.

Axes: T tokens, N requests, W channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from hardpoint.context import Context
from hardpoint.layers import PluggableLayer
from hardpoint.layers.linear import Linear
from hardpoint_plugin_api import (
    AttentionBatch,
    CacheSpec,
    CacheUser,
    CaptureGrade,
    ForwardStep,
    Latest,
    LinearArgs,
    PlainLayout,
    Plane,
    StepPlanner,
)


@dataclass(frozen=True)
class FadingArgs:
    """A mixer: ``sum_t = fade * sum_{t-1} + value_t`` for each of ``width`` channels."""

    layer: ClassVar[str] = "acme_fading"

    hidden_size: int
    width: int
    fade: float


class FadingPlanner(StepPlanner):
    """Nothing to plan; a step of single tokens can be captured."""

    capture = CaptureGrade.SINGLE_TOKEN


class AcmeFading(PluggableLayer, name="acme_fading"):
    """The cache holds the sum of each sequence, float32 [W], in as many planes as it has names for."""

    traceable = True
    planes: ClassVar[tuple[str, ...]] = ("sum",)

    def __init__(self, ctx: Context, args: FadingArgs) -> None:
        super().__init__(ctx)
        self.args, self._block_size = args, ctx.block_size
        self.value = Linear(ctx.child("value"), LinearArgs(args.hidden_size, (("value", args.width),)))
        self.out = Linear(ctx.child("out"), LinearArgs(args.width, (("out", args.hidden_size),)))
        width = args.width // len(self.planes)
        spec = CacheSpec(tuple(Plane(name, (width,), "float32") for name in self.planes), Latest())
        self.index = ctx.cache_users.add(CacheUser(ctx.path, spec, PlainLayout(), FadingPlanner(), FadingPlanner))

    def forward(self, x: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. Adds this step's values to the sums of its requests."""
        values = self.value(x, step)
        sums = torch.empty_like(values)
        step.interrupt(
            self.index, lambda cache, plan, values, out: self._add_all(values, cache, plan.batch, out), values, sums
        )
        y: torch.Tensor = self.out(sums, step)
        return y

    def _add_all(
        self, values: torch.Tensor, cache: Mapping[str, torch.Tensor], batch: AttentionBatch, sums: torch.Tensor
    ) -> None:
        """Channels go to the planes in turn."""
        step = len(self.planes)
        for first, name in enumerate(self.planes):
            self._add(values[:, first::step], cache[name], batch, sums[:, first::step])

    def _add(self, values: torch.Tensor, states: torch.Tensor, batch: AttentionBatch, sums: torch.Tensor) -> None:
        """Write the sum at each token to ``sums`` [T, W] and those of the newest tokens to ``states``."""
        pages, fade = batch.state_pages(self._block_size), self.args.fade
        if batch.num_decodes == batch.num_requests:  # one token each: nothing on the host is read
            old = states[pages].masked_fill((batch.seq_lens == 1)[:, None], 0.0)
            states[pages] = fade * old + values[: len(pages)].float()
            sums[: len(pages)] = states[pages]
            return
        for i, length in enumerate(batch.seq_lens_host):
            first, last = batch.query_start_host[i : i + 2]
            total = torch.zeros_like(states[0]) if length == last - first else states[pages[i]]
            for token in range(first, last):
                total = fade * total + values[token].float()
                sums[token] = total
            states[pages[i]] = total


class AcmeFadingPairs(AcmeFading):
    """The same, with a plane for the even channels and one for the odd ones; their number is even."""

    planes = ("even", "odd")
