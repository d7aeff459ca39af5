"""Matmul over a weight in tiles: [out / 16, in, 16], the last tile filled up with zeros."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from hardpoint_plugin_api import DeviceInfo, LinearCall, LinearKernel, LinearWorkload, Reason

TILE = 16


class SimLinear(LinearKernel):
    """See the top of this file."""

    layout = "sim_tiles"

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Rows of the input come in whole tiles too."""
        if workload.in_features is None or workload.in_features % TILE == 0:
            return []
        wanted = str(workload.in_features)
        return [Reason("in-features", "rows are not whole tiles", wanted=wanted, supported=f"multiples of {TILE}")]

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weight = weights["weight"]
        padded = pad(weight, (0, 0, 0, -weight.shape[0] % TILE))
        return {"tiles": padded.unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()}

    def unpack(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return weights["tiles"].transpose(1, 2).flatten(0, 1)[: self.workload.out_features].clone()

    def rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return weights["tiles"][ids // TILE, :, ids % TILE]

    def apply(self, call: LinearCall) -> torch.Tensor:
        x, weights, bias = call.x, call.weights, call.bias
        tiles = torch.matmul(x[..., None, :, :], weights["tiles"])
        y = tiles.movedim(-3, -2).flatten(-2)[..., : self.workload.out_features]
        return y if bias is None else y + bias
