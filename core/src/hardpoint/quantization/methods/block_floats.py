"""Floats of 8 and 4 bits with 8-bit scales for short groups of columns: MXFP8, MXFP4 and NVFP4 as specs.

The MX formats are those of the OCP Microscaling Formats (MX) specification 1.0, section 5. NVFP4 has scales of e4m3 for
16 columns, and a float32 for the whole matrix: ``w = element * scale * outer`` ("Pretraining Large Language Models with
NVFP4", arXiv:2509.25149, section 2).
"""

from __future__ import annotations

import torch

from hardpoint_plugin_api import (
    CheckpointError,
    CheckpointTensors,
    Dim,
    Module,
    QuantSpec,
    Scale,
    StoredTensor,
)

MX_GROUP, NV_GROUP = 32, 16
"""Columns that share a scale."""

_POWER = Scale("float8_e8m0fnu", (1, MX_GROUP))
MXFP8 = QuantSpec("float8_e4m3fn", scales=(_POWER,))
MXFP4 = QuantSpec("float4_e2m1", scales=(_POWER,))
NVFP4 = QuantSpec("float4_e2m1", scales=(Scale("float8_e4m3fn", (1, NV_GROUP)), Scale("float32", (-1, -1))))


def check_columns(where: str, module: Module, group: int) -> None:
    """Raise CheckpointError unless groups of ``group`` columns divide the module's."""
    if module.in_features % group:
        raise CheckpointError(
            f"{where}: {module.name!r} has {module.in_features} columns, which groups of {group} do not divide; store "
            "this module as it is"
        )


def stored_elements(name: str, spec: QuantSpec) -> StoredTensor:
    """The tensor ``name`` of elements as a spec has them: two of 4 bits a byte, the first in the low bits."""
    dims = Dim("out"), Dim("in", spec.per_byte)
    return StoredTensor(name, dims, (spec.storage,), ("weight",), lambda stored: {"weight": stored})


def stored_group_scales(name: str, spec: QuantSpec) -> StoredTensor:
    """The tensor ``name`` of the first level's scales [out, in / group]; exponents may be stored as plain bytes."""
    scale = spec.scales[0]
    dtype = getattr(torch, scale.format)
    dtypes = (scale.format, "uint8") if dtype == torch.float8_e8m0fnu else (scale.format,)
    dims = Dim("out"), Dim("in", scale.block[1])
    return StoredTensor(name, dims, dtypes, ("weight_scale",), lambda x: {"weight_scale": x.contiguous().view(dtype)})


def outer_scale(
    tensors: CheckpointTensors, module: Module, name: str, slot: str, *, divides: bool = False
) -> StoredTensor:
    """The tensor ``name`` of one number, of whatever rank, that fills ``slot``; its reciprocal where it ``divides``.

    Weights' scales are [1, 1], those of activations [1].
    """
    full = f"{module.name}.{name}"
    rank = len(tensors.info(full).shape) if full in tensors.names else 1
    shape = (1, 1) if slot.startswith("weight") else (1,)

    def read(stored: torch.Tensor) -> dict[str, torch.Tensor]:
        value = stored.float().reshape(shape)
        return {slot: value.reciprocal() if divides else value}

    return StoredTensor(name, (Dim(None),) * rank, ("float32",), (slot,), read)
