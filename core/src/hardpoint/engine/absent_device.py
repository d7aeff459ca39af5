"""Explaining for hardware that is not here: kernels that cannot be imported are represented by stand-ins.

Layers and models are really imported and constructed, since they say what will be asked; what would touch the device
is never called, because nothing is loaded and nothing runs.
"""

from __future__ import annotations

from typing import Any

from hardpoint.attention.reference import ReferenceAttention
from hardpoint.context import Context
from hardpoint.experts.local import LocalAll2All
from hardpoint.experts.reference import ReferenceExperts
from hardpoint.plugins import Offer
from hardpoint.quantization.plain_linear import PlainLinear
from hardpoint_plugin_api import PluginLoadError


class AbsentDeviceContext(Context):
    """A context whose ``load`` cannot fail for want of a device's libraries."""

    def load(self, offer: Offer) -> object:
        """Import the target; for a kernel that cannot be imported here, return something of its kind."""
        try:
            return super().load(offer)
        except PluginLoadError:
            stand_in = _STAND_INS.get(offer.contribution.family)
            if stand_in is None:
                raise
            return (lambda *args: stand_in) if offer.contribution.form == "factory" else stand_in


def _never_called(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a stand-in for a kernel of absent hardware was called")


_STAND_INS: dict[str, object] = {
    "op": _never_called,
    "attention": ReferenceAttention,
    "linear": PlainLinear,
    "experts": ReferenceExperts,
    "all2all": LocalAll2All,
}
