"""8-bit weights with scales for rows, groups or tiles: a product for a few rows of activations, and one for many.

Activations are plain, or rounded to the weight's own elements. They may come rounded; what comes plain and is to be
rounded is, by the op ``quantize_rows``, or within the product where that is cheaper.

Axes: M rows of x, N rows of the weight (out), K columns (in).
"""

from __future__ import annotations

import torch

from hardpoint.kernels.gemm import gemm
from hardpoint.kernels.gemv import Scales, gemv
from hardpoint.quantization.rounding_linear import RoundingLinear
from hardpoint_plugin_api import BuildContext, DeviceInfo, LinearWorkload, Quantized, QuantSpec, Reason

_SMALLEST_GROUP = 32
"""Columns: what 8-bit matrix units take at a time."""

_ROUNDED_WITHIN = 2
"""Rows of activations that every program of a product may as well round for itself: that costs less than a launch."""


class ScaledLinear(RoundingLinear):
    """8-bit weights as they stand in the checkpoint: what the products share."""

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse groups of columns that what is read at a time would straddle."""
        assert workload.spec is not None
        groups = [scale.block[1] for spec in workload.spec for scale in spec.scales]
        supported = f"powers of two from {_SMALLEST_GROUP} on, and multiples of 128"
        wrong = [group for group in groups if group != -1 and not _fits(group)]
        return [Reason("group", "groups of columns", wanted=str(group), supported=supported) for group in wrong[:1]]

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.spec is not None
        self._weight_rows, self._weight_group = _block(workload.spec[0])
        self._x_rows, self.x_group = (1, 0) if self.activation is None else _block(self.activation)

    def weight_scales(self, weights: dict[str, torch.Tensor]) -> Scales:
        """The weight's scales."""
        return Scales(weights["weight_scale"], self._weight_rows, self._weight_group)

    def x_scales(self, values: torch.Tensor) -> Scales:
        """Scales of rounded activations."""
        return Scales(values, self._x_rows, self.x_group)

    def taken(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Scales | None]:
        """``x`` [M, K] as the product takes it, with its scales: as it is, or rounded."""
        if self.activation is None:
            return x, None
        codes, scale = self.rounded(x, weights)
        return codes, self.x_scales(scale)


class TritonScaledGemv(ScaledLinear):
    """A few rows of activations."""

    def apply(self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        rows, weight, scales = x.reshape(-1, x.shape[-1]), weights["weight"], self.weight_scales(weights)
        spec = self.activation
        if spec is not None and not self.x_group and (spec.static or rows.shape[0] <= _ROUNDED_WITHIN):
            given = self.x_scales(weights["input_scale"].view(1, 1)) if spec.static else None
            y = gemv(rows, weight, bias, self.ctx.dtype, given, scales, round_x=True)
        else:
            codes, x_scales = self.taken(rows, weights)
            y = gemv(codes, weight, bias, self.ctx.dtype, x_scales, scales)
        return y.view(*x.shape[:-1], weight.shape[0])

    def apply_quantized(
        self, x: Quantized, weights: dict[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        x_scales, scales = self.x_scales(x.scale), self.weight_scales(weights)
        return gemv(x.data, weights["weight"], bias, self.ctx.dtype, x_scales, scales)


class TritonScaledGemm(ScaledLinear):
    """Any number of rows of activations, on matrix units: 8-bit ones where the activations are rounded too."""

    def apply(self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        weight = weights["weight"]
        codes, x_scales = self.taken(x.reshape(-1, x.shape[-1]), weights)
        y = gemm(codes, weight, bias, self.ctx.dtype, x_scales, self.weight_scales(weights))
        return y.view(*x.shape[:-1], weight.shape[0])

    def apply_quantized(
        self, x: Quantized, weights: dict[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        x_scales, scales = self.x_scales(x.scale), self.weight_scales(weights)
        return gemm(x.data, weights["weight"], bias, self.ctx.dtype, x_scales, scales)


def _block(spec: QuantSpec) -> tuple[int, int]:
    """A block's rows and columns, 0 for all."""
    rows, columns = (0 if size == -1 else size for size in spec.scales[0].block)
    return rows, columns


def _fits(group: int) -> bool:
    return group % 128 == 0 or (group >= _SMALLEST_GROUP and not group & (group - 1))
