"""Explaining for hardware that is not here: kernels that cannot be imported are represented by stand-ins.

Which packages the machine with that hardware has is unknown; those of this machine say nothing about it. So a package
that a candidate requires counts as installed, and a candidate whose package is not here is marked, with the package.
Kernels that can be imported are asked for their ``supports``, which answers from the device's description. A kernel
that cannot be imported, or whose ``supports`` fails without the device, is taken at its manifest's word, and marked.

Layers and models are really imported and constructed, since they say what will be asked; what would touch the device
is never called, because nothing is loaded and nothing runs.
"""

from __future__ import annotations

from typing import Any

from hardpoint.context import Context
from hardpoint.plugin_host import Offer
from hardpoint.reference.attention import ReferenceAttention
from hardpoint.reference.experts import ReferenceExperts
from hardpoint.reference.latent_attention import ReferenceLatentAttention
from hardpoint.reference.linear import PlainLinear
from hardpoint.reference.local_all2all import LocalAll2All
from hardpoint.selection import Selector
from hardpoint_plugin_api import (
    CheckContext,
    HardpointError,
    PluginError,
    PluginLoadError,
    Reason,
    Request,
    Requirement,
    Workload,
)
from hardpoint_plugin_api.requirements import OF_PACKAGES, PackageRequirement


class AbsentDeviceSelector(Selector):
    """A selector that takes an offer at its manifest's word where the target cannot be asked without the device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.not_asked: dict[Offer, str] = {}
        """Why the target of an offer could not be asked."""

    def _unmet(self, requirement: Requirement, context: CheckContext) -> Reason | None:
        return None if isinstance(requirement, OF_PACKAGES) else super()._unmet(requirement, context)

    def _dynamic_reasons(self, offer: Offer, workload: Workload) -> list[Reason]:
        context = CheckContext(Request(self.device, workload), offer.api)
        packages = [r for r in offer.contribution.requirements if isinstance(r, OF_PACKAGES) and r.check(context)]
        if packages:
            what = " and ".join(r.spec if isinstance(r, PackageRequirement) else r.distribution for r in packages)
            self.not_asked[offer] = f"the device's machine must have {what}, which this one lacks"
            return []
        try:
            target = self._load(offer)
        except PluginError as error:
            self.not_asked[offer] = f"it cannot be imported here: {error.__cause__ or error}"
            return []
        try:
            return self._asked_of(target, offer, workload)
        except HardpointError as error:
            self.not_asked[offer] = f"its supports() fails without the device: {error.__cause__ or error}"
            return []


class AbsentDeviceContext(Context):
    """A context whose ``load`` cannot fail for want of a device's libraries."""

    def load(self, offer: Offer) -> object:
        """Import the target; for a kernel that cannot be imported here, return something of its kind."""
        try:
            return super().load(offer)
        except PluginLoadError:
            c = offer.contribution
            stand_in = _STAND_INS.get(f"{c.family}.{c.of}", _STAND_INS.get(c.family))
            if stand_in is None:
                raise
            return (lambda *args: stand_in) if offer.contribution.form == "factory" else stand_in


def _never_called(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a stand-in for a kernel of absent hardware was called")


_STAND_INS: dict[str, object] = {
    "op": _never_called,
    "attention.causal": ReferenceAttention,
    "attention.latent": ReferenceLatentAttention,
    "linear": PlainLinear,
    "experts": ReferenceExperts,
    "all2all": LocalAll2All,
}
