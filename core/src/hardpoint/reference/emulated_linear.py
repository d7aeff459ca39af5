"""The linear family's truth for quantized weights: dequantize, then multiply. It takes every pair of specs.

The weight stays packed: some of its rows at a time become numbers of the activations' dtype, are multiplied, and go.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from hardpoint.numerics import fake_quantize
from hardpoint.reference.batch_invariant_linear import rows_are_alike
from hardpoint_plugin_api import (
    DeviceInfo,
    Feature,
    LinearCall,
    LinearKernel,
    LinearWorkload,
    QuantSpec,
    Reason,
    dequantize,
)
from hardpoint_plugin_api.elements import BUILT_IN

_CHUNK = 1 << 22
"""Elements of the weight that are numbers at one time: 16 MiB of float32."""

_TILE_ROWS = 16


class EmulatedLinear(LinearKernel):
    """Weights in the plain layout, activations quantized and back where the spec says so."""

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse specs with elements, packings or levels that nothing here can read."""
        assert workload.spec is not None
        weight, activation = workload.spec
        reasons = [_unreadable(weight, "weight", most_levels=8), _unreadable(activation, "activation", most_levels=2)]
        if Feature.BATCH_INVARIANT in workload.features and not activation.static:
            reasons += [_shared_by_rows(activation)]
        return [reason for reason in reasons if reason]

    def apply(self, call: LinearCall) -> torch.Tensor:
        x, weights, bias = call.x, call.weights, call.bias
        rows = self._rounded(x, weights)
        y = x.new_empty(rows.shape[0], weights["weight"].shape[0])
        for part, weight in self._chunks(weights, x.dtype):
            y[:, part] = functional.linear(rows, weight, None if bias is None else bias[part])
        return y.view(*x.shape[:-1], y.shape[-1])

    def _rounded(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """``x`` as [T, in], quantized and back."""
        assert self.workload.spec is not None
        return fake_quantize(x.reshape(-1, x.shape[-1]), self.workload.spec[1], weights)

    def _chunks(self, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        """The weight as numbers, some rows at a time."""
        assert self.workload.spec is not None
        spec, stored = self.workload.spec[0], weights["weight"]
        height = max(1, _CHUNK // (stored.shape[1] * spec.per_byte))
        for start in range(0, stored.shape[0], height):
            part = slice(start, start + height)
            yield part, dequantize(weights, spec, dtype, part)


class BatchInvariantEmulatedLinear(EmulatedLinear):
    """The same with every matmul of one shape; see batch_invariant_linear.py for why, and for the tile's size."""

    _tile_rows = 1

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Settle the size of a tile for this weight, which stays as it is."""
        alike = all(rows_are_alike(weight, _TILE_ROWS) for _, weight in self._chunks(weights, self.ctx.dtype))
        self._tile_rows = _TILE_ROWS if alike else 1
        return weights

    def apply(self, call: LinearCall) -> torch.Tensor:
        x, weights, bias = call.x, call.weights, call.bias
        rows = self._rounded(x, weights)
        y = x.new_empty(rows.shape[0], weights["weight"].shape[0])
        tile = x.new_zeros(self._tile_rows, x.shape[-1])
        for part, weight in self._chunks(weights, x.dtype):
            for first in range(0, rows.shape[0], self._tile_rows):
                some = rows[first : first + self._tile_rows]
                tile[: some.shape[0]] = some
                y[first : first + self._tile_rows, part] = functional.linear(tile, weight)[: some.shape[0]]
        y = y if bias is None else y + bias
        return y.view(*x.shape[:-1], y.shape[-1])


class DequantizedLinear(LinearKernel):
    """Dequantizes once, while weights load: from then on plain numbers, and the memory of an unquantized model."""

    layout = "dequantized"

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """As the emulation, which it is but for when the work is done."""
        return EmulatedLinear.supports(workload, device)

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert self.workload.spec is not None
        given = {name: value for name, value in weights.items() if name.startswith("input_")}
        return {"weight": dequantize(weights, self.workload.spec[0], self.ctx.dtype), **given}

    def unpack(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return weights["weight"]

    def rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return weights["weight"][ids]

    def apply(self, call: LinearCall) -> torch.Tensor:
        assert self.workload.spec is not None
        x, weight = call.x, call.weights["weight"]
        rows = fake_quantize(x.reshape(-1, x.shape[-1]), self.workload.spec[1], call.weights)
        return functional.linear(rows, weight, call.bias).view(*x.shape[:-1], weight.shape[0])


def _unreadable(spec: QuantSpec, what: str, most_levels: int) -> Reason | None:
    if spec.is_plain:
        return None
    if spec.definition is None:
        return Reason(
            "spec",
            f"nobody says what the {what}'s elements mean",
            wanted=spec.element,
            supported=", ".join(sorted(BUILT_IN)),
            fix="offer an Element of that name in the family 'element', and write specs with QuantSpec.of",
        )
    if spec.zero_point and not spec.definition.takes_zero_point:
        return Reason("spec", f"the {what}'s elements are no whole numbers, and have no zero point", wanted=str(spec))
    if spec.packing not in ("none", "nibbles"):
        return Reason("spec", f"the {what}'s packing is not known", wanted=spec.packing, supported="none, nibbles")
    if len(spec.scales) > most_levels:
        return Reason("spec", f"the {what} has more levels of scales than can be read", wanted=str(spec))
    return None


def _shared_by_rows(activation: QuantSpec) -> Reason | None:
    if any(scale.block[0] == -1 for scale in activation.scales[:1]):
        return Reason("feature", "one scale for all tokens of a step depends on the batch", wanted=str(activation))
    return None
