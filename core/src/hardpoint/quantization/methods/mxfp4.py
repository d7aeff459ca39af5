"""``quant_method: mxfp4``: the experts of gpt-oss (arXiv:2508.10925), 4-bit floats with a scale for 32 columns.

All experts of a layer stand in one tensor. For a matrix ``NAME`` (``gate_up_proj``, rows of gate and up in turn, or
``down_proj``): ``NAME_blocks`` uint8 [experts, out, in / 32, 16], two elements a byte, the first in the low bits;
``NAME_scales`` uint8 [experts, out, in / 32], exponents with 127 added. Everything else is stored as it is, biases of
experts among it. Source: ``convert_moe_packed_tensors`` of Transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hardpoint.quantization.methods.block_floats import MX_GROUP, MXFP4, check_columns
from hardpoint.quantization.methods.modules import is_excluded
from hardpoint.quantization.methods.settings import Settings
from hardpoint_plugin_api import (
    Dim,
    MethodRequest,
    Module,
    QuantizationMethod,
    QuantSpec,
    Scheme,
    StoredTensor,
)


class Mxfp4(QuantizationMethod):
    """Reads gpt-oss's experts; ``modules_to_not_convert`` names modules that are stored as they are."""

    reads_stacks = True

    def __init__(self, request: MethodRequest) -> None:
        assert request.config is not None
        settings = Settings(request.config, f"{request.where}: quantization_config")
        self._excluded: Sequence[str] = settings.texts("modules_to_not_convert")
        for name in self._excluded:
            settings.pattern("modules_to_not_convert", name)
        self._where, self._dtype = request.where, request.dtype

    def scheme(self, module: Module) -> Scheme | None:
        if module.stack is None or is_excluded(module.name, self._excluded):
            return None
        check_columns(self._where, module, MX_GROUP)
        name = module.stack.tensor
        blocks = StoredTensor(
            f"{name}_blocks",
            (Dim("expert"), Dim("out"), Dim("in", MX_GROUP), Dim(None, MX_GROUP // 2)),
            ("uint8",),
            ("weight",),
            lambda stored: {"weight": stored.flatten(-2)},
        )
        scales = StoredTensor(
            f"{name}_scales",
            (Dim("expert"), Dim("out"), Dim("in", MX_GROUP)),
            ("uint8",),
            ("weight_scale",),
            lambda stored: {"weight_scale": stored.view(torch.float8_e8m0fnu)},
        )
        return Scheme(MXFP4, QuantSpec(self._dtype), (blocks, scales))
