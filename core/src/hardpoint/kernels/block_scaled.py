"""8-bit weights with scales for rows, groups or tiles: a product for a few rows of activations, and one for many.

Activations are plain, or rounded to the weight's own elements. They may come rounded; what comes plain and is to be
rounded is, by the op ``quantize_rows``, or within the product where the checkpoint has its scale.

Axes: M rows of x, N rows of the weight (out), K columns (in).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint.dtypes import dtype_of
from hardpoint.kernels.gemm import gemm, gemm_table
from hardpoint.kernels.gemv import Scales, gemv, gemv_table
from hardpoint.kernels.launch import begun
from hardpoint.kernels.skinny import LARGEST, rounded_to, skinny, skinny_table
from hardpoint.quantization.rounding_linear import RoundingLinear
from hardpoint_plugin_api import BuildContext, DeviceInfo, LinearCall, LinearWorkload, QuantSpec, Reason

_SMALLEST_GROUP = 32
"""Columns: what 8-bit matrix units take at a time."""

_ROUNDED_AT_ONCE = 2048


class TritonRoundingLinear(RoundingLinear):
    """Rounds by a scale of the checkpoint in one pass."""

    def rounded(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self.activation
        assert spec is not None
        if not spec.static or spec.zero_point:
            return super().rounded(x, weights)
        scale = weights["input_scale"].view(1, 1)
        return round_by(x, scale, dtype_of(spec.element)), scale


class ScaledLinear(TritonRoundingLinear):
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
        self.gemm_cuts, self.skinny_cuts, self.gemv_cuts = gemm_table(ctx), skinny_table(ctx), gemv_table(ctx)

    def weight_scales(self, weights: dict[str, torch.Tensor]) -> Scales:
        """The weight's scales."""
        return Scales(weights["weight_scale"], self._weight_rows, self._weight_group)

    def x_scales(self, values: torch.Tensor) -> Scales:
        """Scales of rounded activations."""
        return Scales(values, self._x_rows, self.x_group)

    def taken(self, call: LinearCall) -> tuple[torch.Tensor, Scales | None]:
        """The call's x as the product takes it, [M, K], with its scales: as it is, or rounded."""
        rows, scales = call.x.reshape(-1, call.x.shape[-1]), call.scales
        if scales is None:
            if self.activation is None:
                return rows, None
            rows, scales = self.rounded(rows, call.weights)
        return rows, self.x_scales(scales)


class TritonScaledSkinny(ScaledLinear):
    """A few rows of activations: on matrix units, but for float32, which asks for more digits than their sums have."""

    def apply(self, call: LinearCall) -> torch.Tensor:
        x, weights, bias = call.x, call.weights, call.bias
        weight, spec = weights["weight"], self.activation
        if spec is not None and spec.static and not self.x_group and self.ctx.dtype != torch.float32:
            rows, given = x.reshape(-1, x.shape[-1]), self.x_scales(weights["input_scale"].view(1, 1))
            w_scales = self.weight_scales(weights)
            y = skinny(rows, weight, bias, self.ctx.dtype, given, w_scales, round_x=True, cuts=self.skinny_cuts)
        else:
            y = self._product(*self.taken(call), weights, bias)
        return y.view(*x.shape[:-1], weight.shape[0])

    def _product(
        self, x: torch.Tensor, x_scales: Scales | None, weights: dict[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        weight, scales = weights["weight"], self.weight_scales(weights)
        if self.ctx.dtype == torch.float32:
            return gemv(x, weight, bias, self.ctx.dtype, x_scales, scales, cuts=self.gemv_cuts)
        of_rows = x_scales is not None and not x_scales.group and not scales.group
        if of_rows:
            return gemm(x, weight, bias, self.ctx.dtype, x_scales, scales, cuts=self.gemm_cuts)
        return skinny(x, weight, bias, self.ctx.dtype, x_scales, scales, cuts=self.skinny_cuts)


class TritonScaledGemm(ScaledLinear):
    """Any number of rows of activations, on matrix units: 8-bit ones where the activations are rounded too."""

    def apply(self, call: LinearCall) -> torch.Tensor:
        weight = call.weights["weight"]
        rows, x_scales = self.taken(call)
        w_scales = self.weight_scales(call.weights)
        y = gemm(rows, weight, call.bias, self.ctx.dtype, x_scales, w_scales, cuts=self.gemm_cuts)
        return y.view(*call.x.shape[:-1], weight.shape[0])


def _block(spec: QuantSpec) -> tuple[int, int]:
    """A block's rows and columns, 0 for all."""
    rows, columns = (0 if size == -1 else size for size in spec.scales[0].block)
    return rows, columns


def _fits(group: int) -> bool:
    return group % 128 == 0 or (group >= _SMALLEST_GROUP and not group & (group - 1))


def round_by(x: torch.Tensor, scale: torch.Tensor, element: torch.dtype) -> torch.Tensor:
    """``x`` [M, K] over ``scale`` (float32, of one element), as the nearest ``element``: a new [M, K]."""
    num_rows, k = x.shape
    out = torch.empty(num_rows, k, dtype=element, device=x.device)
    if num_rows:
        grid = num_rows, triton.cdiv(k, _ROUNDED_AT_ONCE)
        strides, most = (x.stride(0), x.stride(1)), LARGEST[element]
        _round[grid](x, scale, out, k, *strides, most, _ROUNDED_AT_ONCE, num_warps=4, num_stages=1, **begun(x))
    return out


@triton.jit
def _round(
    x_ptr, scale_ptr, out_ptr, K, stride_m, stride_k, LARGEST: tl.constexpr, BLOCK: tl.constexpr, BEGIN: tl.constexpr
):
    if BEGIN is not None:
        BEGIN()
    m = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + m * stride_m + k.to(tl.int64) * stride_k, mask=k < K, other=0.0).to(tl.float32)
    nearest = rounded_to(x, tl.load(scale_ptr + tl.arange(0, 1)), LARGEST, out_ptr.dtype.element_ty)
    tl.store(out_ptr + m * K + k, nearest, mask=k < K)
