"""AITER's product of 4-bit floats, in which both operands have a scale for 32 columns (MXFP4). Never run on hardware.

Axes: T tokens, N rows of the weight (out), K columns (in).
"""

from __future__ import annotations

import torch

from hardpoint.numerics import pack_nibbles, quantize_rows
from hardpoint_plugin_api import DeviceInfo, LinearCall, LinearKernel, LinearWorkload, Reason
from hardpoint_rocm.aiter_library import function, reasons_against

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


def _exponents(scales: torch.Tensor) -> torch.Tensor:
    """Powers of two as their exponents with a bias of 127, uint8."""
    return scales.to(torch.float8_e8m0fnu).contiguous().view(torch.uint8)
