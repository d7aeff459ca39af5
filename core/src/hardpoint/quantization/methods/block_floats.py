"""Floats of 8 and 4 bits with 8-bit scales for short groups of columns: MXFP8, MXFP4 and NVFP4 as specs.

The MX formats are those of the OCP Microscaling Formats (MX) specification 1.0, section 5. NVFP4 has scales of e4m3 for
16 columns, and a float32 for the whole matrix: ``w = element * scale * outer`` ("Pretraining Large Language Models with
NVFP4", arXiv:2509.25149, section 2).
"""

from __future__ import annotations

from hardpoint_plugin_api import CheckpointError, Module, QuantSpec, Scale

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
