"""Queries that grow with their position; see QueryScalingArgs."""

from __future__ import annotations

import torch

from hardpoint.context import Context
from hardpoint_plugin_api import QueryScalingArgs


class QueryScaling:
    """Multiplies queries by a number for their position. Layers of equal arguments share its table."""

    def __init__(self, ctx: Context, args: QueryScalingArgs) -> None:
        self._args, self._num_positions, self._device = args, ctx.max_model_len, ctx.torch_device
        self._shared = ctx.shared
        self._table: torch.Tensor | None = None

    def bind(self) -> None:
        """Create the table: float32 [positions]."""
        self._table = self._shared(self._args, self._growth)

    def __call__(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """q [T, H, D], positions int64 [T] -> like q."""
        assert self._table is not None
        return (q * self._table[positions][:, None, None]).to(q.dtype)

    def _growth(self) -> torch.Tensor:
        args, positions = self._args, torch.arange(self._num_positions, dtype=torch.float32)
        growth = torch.log1p(((positions + args.offset) / args.length).floor()) * args.factor + 1.0
        return growth.to(self._device)
