"""Checkpoints with 4-bit floats in both operands, as NVIDIA GPUs multiply them here: activations stay in 16 bits.

GPUs before Blackwell have no such product, and no kernel of this plugin multiplies two 4-bit operands on those that do.
Core's readers ask for one, and its emulated product would serve, which makes numbers of the weight at every step.
Kernels for weights of 4-bit floats read the same weights and lose nothing of the activations: results are nearer to
those of the model before it was quantized than the checkpoint's authors planned for.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from hardpoint.logs import log_once
from hardpoint.quantization.methods.compressed_tensors import CompressedTensors
from hardpoint.quantization.methods.modelopt import ModelOpt, ModelOptFp4
from hardpoint_plugin_api import Module, QuantizationMethod, QuantSpec, Scheme, StoredTensor

logger = logging.getLogger(__name__)

_FLOAT4 = "float4_e2m1"


class CudaModelOpt(ModelOpt):
    """``modelopt``: NVFP4 among its formats."""

    def scheme(self, module: Module) -> Scheme | None:
        return _with_plain_activations(super().scheme(module), self, self._dtype, "modelopt=cuda_modelopt")


class CudaModelOptFp4(ModelOptFp4):
    """``modelopt_fp4``: NVFP4 alone."""

    def scheme(self, module: Module) -> Scheme | None:
        return _with_plain_activations(super().scheme(module), self, self._dtype, "modelopt_fp4=cuda_modelopt_fp4")


class CudaCompressedTensors(CompressedTensors):
    """``compressed-tensors``: NVFP4 and MXFP4 among its formats."""

    def scheme(self, module: Module) -> Scheme | None:
        choice = "compressed-tensors=cuda_compressed_tensors"
        return _with_plain_activations(super().scheme(module), self, self._dtype, choice)


def _with_plain_activations(found: Scheme | None, method: QuantizationMethod, dtype: str, choice: str) -> Scheme | None:
    """``found``, but for activations in 4-bit floats: these stay in ``dtype``, which is logged once for a ``method``.

    ``choice`` is what --deny takes, beside the family, for core's reader to serve.
    """
    if found is None or (found.weight.element, found.activation.element) != (_FLOAT4, _FLOAT4):
        return found
    message = f"activations stay in {dtype} beside 4-bit floats, which the checkpoint has in both operands"
    remedy = f"--deny quantization.{choice} asks for such a product"
    log_once(logger, logging.INFO, "plain", f"{message}; {remedy}", method)
    stored = tuple(_checked_alone(tensor) if _is_of_input(tensor) else tensor for tensor in found.stored)
    return Scheme(found.weight, QuantSpec(dtype), stored)


def _is_of_input(tensor: StoredTensor) -> bool:
    return any(slot.startswith("input_") for slot in tensor.fills)


def _checked_alone(tensor: StoredTensor) -> StoredTensor:
    """The tensor, which must be there, and fills nothing."""
    return replace(tensor, fills=(), read=lambda stored: {})
