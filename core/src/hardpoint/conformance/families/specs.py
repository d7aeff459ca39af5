"""Pairs of specs that kernels of quantized matrices are tried with: those that the manifest claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hardpoint.conformance.site import Subject
from hardpoint_plugin_api import CheckContext, QuantSpec, Reason, Request, Scale, Workload
from hardpoint_plugin_api.requirements import SpecRequirement

Specs = Mapping[str, tuple[QuantSpec, QuantSpec | None]]
"""By name: the spec of weights, and that of activations; None is the dtype as it is."""

_ROWS = (Scale("float32", (1, -1)),)
SPECS: Specs = {
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
    "uint4-groups": (QuantSpec("uint4", scales=(Scale("float32", (1, 32)),), zero_point=True), None),
}


def pair_of(specs: Specs, name: str, dtype: str) -> tuple[QuantSpec, QuantSpec]:
    """The pair of that name; one that ``specs`` does not have is plain."""
    plain = QuantSpec(dtype)
    weight, activation = specs.get(name, (plain, plain))
    return weight, activation or plain


def unclaimed(subject: Subject, specs: Specs, name: str, workload: Callable[..., Workload]) -> Reason | None:
    """Why the manifest claims the pair of that name in none of the dtypes; None where it does in one."""
    needs = [r for r in subject.offer.contribution.requires if isinstance(r, SpecRequirement)]
    reason = None
    for dtype in subject.dtypes():
        request = Request(subject.site.platform.info, workload(spec=pair_of(specs, name, dtype)))
        found = [need.check(CheckContext(request, subject.offer.api)) for need in needs]
        reason = next((r for r in found if r is not None), None)
        if reason is None:
            return None
    return reason
