"""Which matrices in an OCP MX format have a product on this device: it says once that others have none, and why."""

from __future__ import annotations

import logging

from hardpoint_plugin_api import DeviceInfo, ExpertsWorkload, LinearWorkload, MethodRequest, Module, Scheme
from hardpoint_rocm.aiter_mxfp4 import AiterMxfp4Experts, AiterMxfp4Linear

logger = logging.getLogger(__name__)

_FP4 = "float4_e2m1"
_DTYPES = ("float16", "bfloat16")


class MxProducts:
    """A checkpoint's matrices as its method is asked for them, beside what AITER's kernels take.

    Sizes are the checkpoint's. Ranks have slices of matrices, and layers merge some: ``explain`` shows what they run.
    """

    def __init__(self, request: MethodRequest) -> None:
        self._request = request
        self._asked: set[tuple[object, ...]] = set()
        self._is_said = False

    def ask(self, module: Module, scheme: Scheme) -> None:
        """Warn where ``module``, the first such matrix, has an operand in MXFP4 and no kernel."""
        kind = (module.expert is None, module.out_features, module.in_features, scheme.pair)
        if self._is_said or kind in self._asked or _FP4 not in (spec.element for spec in scheme.pair):
            return
        self._asked.add(kind)
        device = self._request.device
        if reason := reason_against(module, scheme, self._request.dtype, device):
            self._is_said = True
            logger.warning(
                "%s: %r [%d, %d] is in an OCP MX format, for whose products no kernel is here: %s; core's emulated "
                "product serves, for this matrix and others like it, which makes numbers of them at every step: expect "
                "it to be slow on %s",
                self._request.where,
                module.name,
                module.out_features,
                module.in_features,
                reason,
                device.name,
            )


def reason_against(module: Module, scheme: Scheme, dtype: str, device: DeviceInfo) -> str | None:
    """Why AITER's kernels do not multiply a matrix with an operand in MXFP4; None where they do."""
    if {spec.element for spec in scheme.pair} != {_FP4}:
        return "AITER's takes weights and activations in MXFP4, and one of them is not"
    if "mxfp" not in device.features:
        return "this device has none"
    if dtype not in _DTYPES:
        return f"AITER's makes {' or '.join(_DTYPES)}, not {dtype}"
    rows, columns = module.out_features, module.in_features
    if module.expert is None:
        found = AiterMxfp4Linear.supports(LinearWorkload(in_features=columns, out_features=rows), device)
    else:
        # Both sizes of a layer have one condition: whichever matrix of an expert this is.
        found = AiterMxfp4Experts.supports(ExpertsWorkload(hidden_size=columns, intermediate_size=rows), device)
    return str(found[0]) if found else None
