"""Pairs of specs that kernels of quantized matrices are tried with: those that the manifest claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hardpoint.conformance.site import Subject
from hardpoint_plugin_api import CheckContext, QuantSpec, Reason, Request, Workload
from hardpoint_plugin_api.requirements import SpecRequirement

Specs = Mapping[str, tuple[QuantSpec, QuantSpec | None]]
"""By name: the spec of weights, and that of activations; None is the dtype as it is."""


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
