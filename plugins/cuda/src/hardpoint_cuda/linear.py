"""Linear kernels of NVIDIA's libraries, by torch's own calls; activations are rounded by core's kernels.

Axes: M rows of x, N rows of the weight (out), K columns (in).
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from hardpoint.kernels.block_scaled import TritonRoundingLinear
from hardpoint.quantization import rounding_linear as quantization
from hardpoint_plugin_api import DeviceInfo, LinearWorkload, Reason


class LibraryProduct(TritonRoundingLinear, quantization.LibraryProduct):
    """Linear kernels of NVIDIA's libraries that multiply two rounded operands."""


class Fp8ScaledMatmul(LibraryProduct):
    """cuBLAS's product of 8-bit floats, with scales for rows of both operands, or one each."""

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse what cuBLASLt does not take: rows that are no multiple of 16 bytes."""
        return _not_multiples(workload, 16)

    def product(
        self, codes: torch.Tensor, scale: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        weight, weight_scale = weights["weight"].t(), weights["weight_scale"].t()
        if not codes.shape[0]:
            return codes.new_empty(0, weight.shape[1], dtype=self.ctx.dtype)
        if scale.numel() != weight_scale.numel():  # both must be for rows, or neither
            scale = scale.expand(codes.shape[0], 1).contiguous()
            weight_scale = weight_scale.expand(1, weight.shape[1]).contiguous()
        return torch._scaled_mm(codes, weight, scale, weight_scale, bias=bias, out_dtype=self.ctx.dtype)


class Int8Matmul(LibraryProduct):
    """cuBLAS's product of int8, which is exact; scales and bias in a pass of their own."""

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse what cuBLASLt does not take."""
        return _not_multiples(workload, 8)

    def product(
        self, codes: torch.Tensor, scale: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        num_rows = codes.shape[0]
        if num_rows < _FEWEST_ROWS:
            codes = pad(codes, (0, 0, 0, _FEWEST_ROWS - num_rows))
        whole = torch._int_mm(codes, weights["weight"].t())[:num_rows]
        y = (whole * scale).mul_(weights["weight_scale"].t())
        return (y if bias is None else y.add_(bias)).to(self.ctx.dtype)


_FEWEST_ROWS = 17
"""Of ``torch._int_mm`` on CUDA."""


def _not_multiples(workload: LinearWorkload, of: int) -> list[Reason]:
    sizes = {"in-features": workload.in_features or 0, "out-features": workload.out_features or 0}
    return [
        Reason(code, "rows must be aligned in memory", wanted=str(size), supported=f"multiples of {of}")
        for code, size in sizes.items()
        if size % of
    ]
