"""Plain weights, with results that do not depend on the batch: every matmul has one shape.

A matmul of fewer rows, or of more, may be another kernel, which adds the products up in another order: one row is a
matrix-vector product, for example. Here rows go through torch's own matmul in tiles of one size, the last one filled up
with whatever is there. So a row meets the same kernel each time, which makes the row's result of the row and the weight
alone. The row's place in its tile may still matter: a kernel may treat its last rows apart. Whether it does is found
out once for each weight, where it will be used, when it is loaded.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from hardpoint.reference.linear import PlainLinear
from hardpoint_plugin_api import LinearCall

_TILE_ROWS = 16
"""A compromise between prompts and single requests: on a Zen 5 core, with a weight of 2048 x 8192, a tile of 16 takes
3.6 times as long as a single row in float32 and 1.2 times in bfloat16."""


class BatchInvariantLinear(PlainLinear):
    """Weight as it stands in the checkpoint, [out, in]."""

    _tile_rows = 1

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Settle the size of a tile for this weight, which stays as it is."""
        self._tile_rows = _TILE_ROWS if rows_are_alike(weights["weight"], _TILE_ROWS) else 1
        return weights

    def apply(self, call: LinearCall) -> torch.Tensor:
        x, weight, bias = call.x, call.weights["weight"], call.bias
        rows = x.reshape(-1, x.shape[-1])
        y = x.new_empty(rows.shape[0], weight.shape[0])
        tile = x.new_zeros(self._tile_rows, x.shape[-1])  # of its own: alignment may choose the kernel too
        for first in range(0, rows.shape[0], self._tile_rows):
            some = rows[first : first + self._tile_rows]
            tile[: some.shape[0]] = some
            y[first : first + self._tile_rows] = _matmul(tile, weight, bias)[: some.shape[0]]
        return y.view(*x.shape[:-1], weight.shape[0])


def rows_are_alike(weight: torch.Tensor, tile_rows: int) -> bool:
    """Whether a row's product with ``weight`` [out, in] has the same bits wherever it stands among ``tile_rows``."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1, weight.shape[1], generator=generator).to(weight)
    y = _matmul(row.repeat(tile_rows, 1), weight, None)
    return torch.equal(y, y[:1].expand_as(y))


def _matmul(tile: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The bias is added apart: so it has no say in which kernel multiplies."""
    y = functional.linear(tile, weight)
    return y if bias is None else y + bias
