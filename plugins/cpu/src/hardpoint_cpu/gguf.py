"""The method ``gguf`` as the compiled kernels want it: activations rounded as llama.cpp does, to int8 by 32 columns."""

from __future__ import annotations

from dataclasses import replace

from hardpoint.quantization.methods.gguf import Gguf
from hardpoint_plugin_api import Module, QuantSpec, Scale, Scheme

_ROUNDED = QuantSpec("int8", scales=(Scale("float32", (1, 32)),), static=False)
_SERVED = ("int3", "int4", "int5", "int6", "int8", "uint2", "uint4", "uint5")
"""Elements that ``cpu_native_blocks`` multiplies, for experts, too; with others activations stay as they are."""


class CpuGguf(Gguf):
    """The same numbers of weights as core's reader. In a model of float32 activations stay as they are."""

    def scheme(self, module: Module) -> Scheme | None:
        scheme = super().scheme(module)
        if scheme is None or self.dtype == "float32":
            return scheme
        if scheme.weight.element not in _SERVED:
            return scheme
        return replace(scheme, activation=_ROUNDED)
