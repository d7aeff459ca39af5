"""Matrix products of vllm-xpu-kernels, which are oneDNN's: weights of 8-bit floats or of 4 bits.

Axes: T tokens, N rows of the weight (out), K columns (in), G groups of columns.
"""

from __future__ import annotations

import torch

from hardpoint.numerics import pack_nibbles, unpack_nibbles
from hardpoint.quantization.rounding_linear import LibraryProduct
from hardpoint_plugin_api import (
    BuildContext,
    DeviceInfo,
    LinearCall,
    LinearKernel,
    LinearWorkload,
    QuantSpec,
    Reason,
    dequantize,
)
from hardpoint_xpu.vllm_library import operator, reasons_against

_TILE = 128
_CODES = 8
"""Of 4 bits, in a word."""
_MIDDLE = 8
"""The offset of an unsigned code from a signed one."""


class XpuFp8WeightLinear(LinearKernel):
    """``fp8_gemm_w8a16``: activations as they are; the weight has a scale, one for each row, or tiles of 128 x 128."""

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse weights that are no whole tiles, and a library that has another operator."""
        return [*tile_reasons(workload), *reasons_against("_xpu_C.fp8_gemm_w8a16")]

    def apply(self, call: LinearCall) -> torch.Tensor:
        weight = call.weights["weight"]
        rows = call.x.reshape(-1, call.x.shape[-1]).contiguous()
        if not rows.shape[0]:
            return call.x.new_empty(*call.x.shape[:-1], weight.shape[0])
        y: torch.Tensor = operator("_xpu_C.fp8_gemm_w8a16")(
            A=rows,
            B=weight.t(),
            B_scale_=weight_scale(call.weights),
            bias_=call.bias,
        )
        return y.view(*call.x.shape[:-1], weight.shape[0])


class XpuFp8Linear(LibraryProduct):
    """``fp8_gemm``: both operands in 8-bit floats; activations have a scale for each token, or 128 of its elements."""

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse weights that are no whole tiles, and a library that has another operator."""
        return [*tile_reasons(workload), *reasons_against("_xpu_C.fp8_gemm")]

    def product(
        self, codes: torch.Tensor, scale: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        weight = weights["weight"]
        if not codes.shape[0]:
            return codes.new_empty(0, weight.shape[0], dtype=self.ctx.dtype)
        y: torch.Tensor = operator("_xpu_C.fp8_gemm")(
            A=codes.contiguous(),
            B=weight.t(),
            out_dtype=self.ctx.dtype,
            A_scale_=scale.contiguous(),
            B_scale_=weight_scale(weights),
            bias_=bias,
        )
        return y


class XpuInt4Linear(LinearKernel):
    """``int4_gemm_w4a16``: 4-bit weights with scales for groups of columns; activations as they are."""

    layout: str = "xpu_int4"
    spec: QuantSpec

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.spec is not None
        assert workload.in_features is not None
        self.spec = workload.spec[0]
        group = self.spec.scales[0].block[1]
        self.group = workload.in_features if group == -1 else group
        self._middle = _MIDDLE if self.spec.element == "int4" else 0

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse groups that end within words or columns, and a library that has another operator."""
        assert workload.spec is not None
        rows, columns, group = workload.out_features, workload.in_features, workload.spec[0].scales[0].block[1]
        found = []
        if columns and columns % _CODES:
            found.append(_size_reason("in-features", columns, _CODES))
        if rows and rows % _CODES and workload.spec[0].zero_point:
            found.append(_size_reason("out-features", rows, _CODES))
        if columns and group != -1 and (columns % group or group % _CODES):
            wanted, supported = f"{group} of {columns}", f"multiples of {_CODES} that divide the columns"
            found.append(Reason("group", "groups of columns", wanted=wanted, supported=supported))
        return [*found, *reasons_against("_xpu_C.int4_gemm_w4a16")]

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``weight``: words int32 [N, K/8] of unsigned codes. ``weight_scale`` [G, N]. ``weight_zero_point``: words
        int32 [G, N/8], or int8 [1], what stands for zero in all groups."""
        codes = weights["weight"] ^ (self._middle * 0x11)
        packed = {
            "weight": _words(codes),
            "weight_scale": weights["weight_scale"].t().contiguous(),
        }
        if self.spec.zero_point:
            zeros = weights["weight_zero_point"].to(torch.int16).t() + self._middle
            packed["weight_zero_point"] = _words(pack_nibbles(zeros))
        else:
            packed["weight_zero_point"] = codes.new_tensor([self._middle], dtype=torch.int8)
        return packed

    def unpack(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return dequantize(self._plain(weights), self.spec, self.ctx.dtype)

    def rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        found = self._plain({"weight": weights["weight"][ids]}) | {"weight_scale": weights["weight_scale"].t()[ids]}
        if self.spec.zero_point:
            found["weight_zero_point"] = self._zero_points(weights)[ids]
        return dequantize(found, self.spec, self.ctx.dtype)

    def _plain(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The slots as they were loaded; of those that are given."""
        plain = {"weight": weights["weight"].contiguous().view(torch.uint8) ^ (self._middle * 0x11)}
        if "weight_scale" in weights:
            plain["weight_scale"] = weights["weight_scale"].t()
        if self.spec.zero_point and "weight_zero_point" in weights:
            plain["weight_zero_point"] = self._zero_points(weights)
        return plain

    def _zero_points(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """Zero points [N, G], as loaded."""
        return unpack_nibbles(weights["weight_zero_point"].view(torch.uint8)).t().to(torch.int16) - self._middle

    def apply(self, call: LinearCall) -> torch.Tensor:
        weight = call.weights["weight"]
        rows = call.x.reshape(-1, call.x.shape[-1]).contiguous()
        if not rows.shape[0]:
            return call.x.new_empty(*call.x.shape[:-1], weight.shape[0])
        y: torch.Tensor = operator("_xpu_C.int4_gemm_w4a16")(
            A=rows,
            B=weight.t(),
            bias=call.bias,
            B_scale=call.weights["weight_scale"],
            B_zp=call.weights["weight_zero_point"],
            group_size=self.group,
            g_idx=None,
        )
        return y.view(*call.x.shape[:-1], weight.shape[0])


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [R, 4 * n] as int32 [R, n]. A matrix of one row may have any stride, which views of it would mind."""
    return codes.reshape(-1).view(torch.int32).view(codes.shape[0], -1)


def weight_scale(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The scales of an 8-bit weight as oneDNN reads them: [1], [N], or of tiles [K/128, N/128]."""
    scale = weights["weight_scale"]
    return scale.flatten() if scale.shape[1] == 1 else scale.t().contiguous()


def tile_reasons(workload: LinearWorkload) -> list[Reason]:
    """Refuse weights with scales of tiles that are no whole tiles; one tile of columns is taken for a scale of rows."""
    if workload.spec is None or workload.spec[0].scales[0].block != (_TILE, _TILE):
        return []
    columns, rows = workload.in_features, workload.out_features
    found = [
        _size_reason(code, size, _TILE)
        for code, size in (("in-features", columns), ("out-features", rows))
        if size and size % _TILE
    ]
    if columns == _TILE:
        found.append(Reason("in-features", "one tile of columns", wanted=str(columns), supported="several"))
    return found


def _size_reason(code: str, size: int, of: int) -> Reason:
    return Reason(code, "oneDNN's product takes whole blocks", wanted=str(size), supported=f"multiples of {of}")
