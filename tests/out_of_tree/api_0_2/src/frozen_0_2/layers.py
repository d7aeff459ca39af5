"""A layer in place of core's, with its whole life."""

from __future__ import annotations

from typing import Any

import torch

from frozen_0_2.ops import rms_norm
from hardpoint.layers import PluggableLayer
from hardpoint_plugin_api import NormArgs, WeightSlot


class FrozenNorm(PluggableLayer):
    """Residual addition and norm."""

    def __init__(self, ctx: Any, args: NormArgs) -> None:
        super().__init__(ctx)
        self.args, self.dtype = args, str(ctx.dtype).removeprefix("torch.")
        self.life: list[str] = []

    def declare(self) -> dict[str, WeightSlot]:
        return {"weight": WeightSlot((self.args.size,), self.dtype, shard_axis=None, parts=())}

    def prepare(self) -> None:
        self.life.append("prepared")

    def bind(self) -> None:
        self.life.append("bound")

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.life == ["prepared", "bound"]
        total = x if residual is None else x + residual
        return rms_norm(total, self.weights["weight"], eps=self.args.eps), total
