"""AITER's norms and matrix products. None of this ran on hardware.

AITER's norms that also quantize are left aside: for ``float8_e4m3fnuz`` they round up to 240 (``get_dtype_max`` in
``aiter/ops/quant.py``), and core up to 224.

Axes: T tokens, N rows of the weight (out), K columns (in), n columns of a row.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from hardpoint.quantization.rounding_linear import LibraryProduct
from hardpoint_plugin_api import DeviceInfo, LinearWorkload, Reason
from hardpoint_rocm.aiter_library import function, reasons_against

_TILE = 128


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """See core's op. Rows may be apart; within a row, elements must be neighbours."""
    if not x.numel():
        return torch.empty_like(x)
    y: torch.Tensor = function("rms_norm")(input=_rows(x), weight=weight, epsilon=eps)
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See core's op. The sum is a new tensor."""
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if x.numel():
        function("rmsnorm2d_fwd_with_add")(
            out=out,
            input=_rows(x),
            residual_in=residual.contiguous(),
            residual_out=total,
            weight=weight,
            epsilon=eps,
        )
    return out, total


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _AiterProduct(LibraryProduct):
    """A product of AITER's, which takes at least one row."""

    def product(
        self, codes: torch.Tensor, scale: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        if not codes.shape[0]:
            return codes.new_empty(0, weights["weight"].shape[0], dtype=self.ctx.dtype)
        return self.of_some(codes.contiguous(), scale.contiguous(), weights, bias)

    @abstractmethod
    def of_some(
        self, codes: torch.Tensor, scale: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``product`` of contiguous operands, at least one row."""


class AiterRowScaledLinear(_AiterProduct):
    """``gemm_a8w8``: int8, or 8-bit floats, with scales for rows of both operands."""

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse rows that are no multiples of 16 bytes, and an AITER that has the function otherwise."""
        return [*_not_multiples(workload, 16, 16), *reasons_against("gemm_a8w8")]

    def of_some(
        self, codes: torch.Tensor, scale: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        y: torch.Tensor = function("gemm_a8w8")(
            XQ=codes,
            WQ=weights["weight"],
            x_scale=scale,
            w_scale=weights["weight_scale"].view(1, -1),
            bias=bias,
            dtype=self.ctx.dtype,
        )
        return y


class AiterBlockScaledLinear(_AiterProduct):
    """``gemm_a8w8_blockscale``: 8-bit floats; the weight has a scale for each tile of 128 x 128."""

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse weights that are no whole tiles, and an AITER that has the function otherwise."""
        return [*_not_multiples(workload, _TILE, _TILE), *reasons_against("gemm_a8w8_blockscale")]

    def of_some(
        self, codes: torch.Tensor, scale: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        y: torch.Tensor = function("gemm_a8w8_blockscale")(
            XQ=codes,
            WQ=weights["weight"],
            x_scale=scale,
            w_scale=weights["weight_scale"],
            dtype=self.ctx.dtype,
        )
        return y if bias is None else y.add_(bias)


def _not_multiples(workload: LinearWorkload, of_in: int, of_out: int) -> list[Reason]:
    sizes = (("in-features", workload.in_features, of_in), ("out-features", workload.out_features, of_out))
    return [
        Reason(code, "AITER's product takes whole blocks", wanted=str(size), supported=f"multiples of {of}")
        for code, size, of in sizes
        if size and size % of
    ]
