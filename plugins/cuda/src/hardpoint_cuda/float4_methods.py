"""Checkpoints with 4-bit floats in both operands, as NVIDIA GPUs multiply them here: activations stay in 16 bits.

GPUs before Blackwell have no such product, and no kernel of this plugin multiplies two 4-bit operands on those that do.
Core's readers ask for one, and its emulated product would serve, which makes numbers of the weight at every step.
Kernels for weights of 4-bit floats read the same weights and lose nothing of the activations: results are nearer to
those of the model before it was quantized than the checkpoint's authors planned for.
"""

from __future__ import annotations

from dataclasses import replace

from hardpoint.quantization.methods.compressed_tensors import CompressedTensors
from hardpoint.quantization.methods.modelopt import ModelOpt, ModelOptFp4
from hardpoint_plugin_api import Module, QuantSpec, Scheme, StoredTensor

_FLOAT4 = "float4_e2m1"


class CudaModelOpt(ModelOpt):
    """``modelopt``: NVFP4 among its formats."""

    def scheme(self, module: Module) -> Scheme | None:
        return _with_plain_activations(super().scheme(module), self._dtype)


class CudaModelOptFp4(ModelOptFp4):
    """``modelopt_fp4``: NVFP4 alone."""

    def scheme(self, module: Module) -> Scheme | None:
        return _with_plain_activations(super().scheme(module), self._dtype)


class CudaCompressedTensors(CompressedTensors):
    """``compressed-tensors``: NVFP4 and MXFP4 among its formats."""

    def scheme(self, module: Module) -> Scheme | None:
        return _with_plain_activations(super().scheme(module), self._dtype)


def _with_plain_activations(scheme: Scheme | None, dtype: str) -> Scheme | None:
    """``scheme``, but for activations in 4-bit floats: these stay in ``dtype``."""
    if scheme is None or (scheme.weight.element, scheme.activation.element) != (_FLOAT4, _FLOAT4):
        return scheme
    stored = tuple(_checked_alone(tensor) if _is_of_input(tensor) else tensor for tensor in scheme.stored)
    return Scheme(scheme.weight, QuantSpec(dtype), stored)


def _is_of_input(tensor: StoredTensor) -> bool:
    return any(slot.startswith("input_") for slot in tensor.fills)


def _checked_alone(tensor: StoredTensor) -> StoredTensor:
    """The tensor, which must be there, and fills nothing."""
    return replace(tensor, fills=(), read=lambda stored: {})
