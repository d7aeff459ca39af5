"""AITER's products of 4-bit floats, in which both operands have a scale for 32 columns (MXFP4). Never run on hardware.

Axes: T tokens, N rows of the weight (out), K columns (in); E experts, I width of an expert, H hidden.
"""

from __future__ import annotations

import torch

from hardpoint.numerics import pack_nibbles, quantize_rows
from hardpoint_plugin_api import (
    DeviceInfo,
    ExpertsCall,
    ExpertsKernel,
    ExpertsWorkload,
    LinearCall,
    LinearKernel,
    LinearWorkload,
    Reason,
    dequantize,
)
from hardpoint_plugin_api.experts import MATRICES, expert_matrix
from hardpoint_rocm.aiter_experts import ACTIVATIONS, in_rows, in_tiles, not_multiples, shuffled
from hardpoint_rocm.aiter_library import constant, function, reasons_against

_SHUFFLE_SCALES = "utility.fp4_utils.e8m0_shuffle"
_MULTIPLE = 256
"""Columns of a tile of scales: 8 of them."""

PRODUCT = "ops.triton.gemm.basic.gemm_afp4wfp4.gemm_afp4wfp4"
_IN, _OUT = 128, 16


class AiterMxfp4Linear(LinearKernel):
    """``gemm_afp4wfp4``, a Triton kernel of AITER's, which reads weights as checkpoints store them.

    Activations are rounded by core's rule (OCP Microscaling Formats 1.0, section 6.3) with torch's operators. AITER's
    own function rounds the largest magnitude first.
    """

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse weights that are no whole tiles, and an AITER that has the function otherwise."""
        sizes = (("in-features", workload.in_features, _IN), ("out-features", workload.out_features, _OUT))
        found = [
            Reason(code, "AITER's product takes whole blocks", wanted=str(size), supported=f"multiples of {of}")
            for code, size, of in sizes
            if size and size % of
        ]
        return [*found, *reasons_against(PRODUCT)]

    def apply(self, call: LinearCall) -> torch.Tensor:
        """See LinearKernel."""
        assert self.workload.spec is not None
        weight, rows = call.weights["weight"], call.x.reshape(-1, call.x.shape[-1])
        if not rows.shape[0]:
            return call.x.new_empty(*call.x.shape[:-1], weight.shape[0])
        rounded = quantize_rows(rows, self.workload.spec[1], {})
        y: torch.Tensor = function(PRODUCT)(
            x=pack_nibbles(rounded.codes),
            w=weight,
            x_scales=_exponents(rounded.scale.squeeze(-1)),
            w_scales=_exponents(call.weights["weight_scale"]),
            dtype=self.ctx.dtype,
        )
        y = y if call.bias is None else y.add_(call.bias)
        return y.view(*call.x.shape[:-1], weight.shape[0])


class AiterMxfp4Experts(ExpertsKernel):
    """``fused_moe`` on weights and activations in MXFP4.

    AITER rounds activations itself, before each product, by a scale that is rounded up: no element is cut off, which
    core's rule may do. How it rounds may be set for AITER as a whole.
    """

    layout = "aiter_mxfp4_tiles"

    @classmethod
    def supports(cls, workload: ExpertsWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse sizes that are no whole tiles of scales, and an AITER that has other functions."""
        found = reasons_against("fused_moe.fused_moe", "ops.shuffle.shuffle_weight", _SHUFFLE_SCALES)
        return [*not_multiples(workload, _MULTIPLE), *found]

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights in AITER's tiles of 16 rows and 32 bytes; scales in tiles of 32 rows and 8 columns, as bytes."""
        packed = {}
        for name in MATRICES:
            scales = weights[f"{name}.weight_scale"].contiguous().view(torch.uint8)
            packed[f"{name}.weight"] = in_tiles(weights[f"{name}.weight"])
            packed[f"{name}.weight_scale"] = function(_SHUFFLE_SCALES)(scale=scales.flatten(0, 1)).view(scales.shape)
        return packed

    def unpack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert self.workload.spec is not None
        plain = {}
        for name in MATRICES:
            plain[f"{name}.weight"] = in_rows(weights[f"{name}.weight"])
            plain[f"{name}.weight_scale"] = _scales_in_rows(weights[f"{name}.weight_scale"])
        spec, experts = self.workload.spec[0], range(plain["w2.weight"].shape[0])
        return {
            name: torch.stack([dequantize(expert_matrix(plain, name, e), spec, self.ctx.dtype) for e in experts])
            for name in MATRICES
        }

    def apply(self, call: ExpertsCall) -> None:
        if not call.ids.shape[0]:
            return
        assert self.workload.activation is not None
        call.out.copy_(
            function("fused_moe.fused_moe")(
                hidden_states=call.x,
                w1=shuffled(call.w["w13.weight"].view(torch.float4_e2m1fn_x2)),
                w2=shuffled(call.w["w2.weight"].view(torch.float4_e2m1fn_x2)),
                topk_weight=call.weights,
                topk_ids=call.ids,
                activation=getattr(constant("ActivationType"), ACTIVATIONS[self.workload.activation]),
                quant_type=constant("QuantType").per_1x32,
                w1_scale=call.w["w13.weight_scale"],
                w2_scale=call.w["w2.weight_scale"],
                dtype=self.ctx.dtype,
            )
        )


def _scales_in_rows(tiles: torch.Tensor) -> torch.Tensor:
    """The inverse of AITER's ``e8m0_shuffle``, of bytes [E, rows, columns], as numbers."""
    parts = tiles.view(-1, tiles.shape[-1] // 8, 4, 16, 2, 2)  # rows by 32, columns by 8; then as they lie in memory
    return parts.permute(0, 5, 3, 1, 4, 2).reshape(tiles.shape).view(torch.float8_e8m0fnu)


def _exponents(scales: torch.Tensor) -> torch.Tensor:
    """Powers of two as their exponents with a bias of 127, uint8."""
    return scales.to(torch.float8_e8m0fnu).contiguous().view(torch.uint8)
