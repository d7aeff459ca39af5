"""Pairs of specs by short names, for tests of single kernels; the kit makes its own from what is claimed."""

from __future__ import annotations

from hardpoint.conformance.families.specs import Pair
from hardpoint_plugin_api import QuantSpec, Scale

_ROWS = (Scale("float32", (1, -1)),)
SPECS: dict[str, Pair] = {
    "int8-rows": (QuantSpec("int8", scales=_ROWS), None),
    "int8-dynamic": (QuantSpec("int8", scales=_ROWS), QuantSpec("int8", scales=_ROWS, static=False)),
    "fp8-tensor": (QuantSpec("float8_e4m3fn", scales=(Scale("float32", (-1, -1)),)), None),
    "fp8-rows-dynamic": (
        QuantSpec("float8_e4m3fn", scales=_ROWS),
        QuantSpec("float8_e4m3fn", scales=_ROWS, static=False),
    ),
    "fp8-tiles": (QuantSpec("float8_e4m3fn", scales=(Scale("float32", (128, 128)),)), None),
    "fp8-tiles-dynamic": (
        QuantSpec("float8_e4m3fn", scales=(Scale("float32", (128, 128)),)),
        QuantSpec("float8_e4m3fn", scales=(Scale("float32", (1, 128)),), static=False),
    ),
    "int8-groups": (QuantSpec("int8", scales=(Scale("float32", (1, 32)),)), None),
    "mxfp4": (QuantSpec("float4_e2m1", scales=(Scale("float8_e8m0fnu", (1, 32)),)), None),
    "nvfp4": (
        QuantSpec("float4_e2m1", scales=(Scale("float8_e4m3fn", (1, 16)), Scale("float32", (1, -1)))),
        None,
    ),
    "uint4-groups": (QuantSpec("uint4", scales=(Scale("float32", (1, 32)),), zero_point=True), None),
    "uint4-pairs": (QuantSpec("uint4", scales=(Scale("float32", (1, 2)),), zero_point=True), None),
}
