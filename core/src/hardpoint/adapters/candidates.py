"""Generated candidates: an adapter that makes a contribution fit a workload it alone refuses.

They are visible candidates like any other (``acme_paged+pad64``), ranked just below what they adapt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from hardpoint.plugin_host import Offer
from hardpoint_plugin_api import AttentionWorkload, Workload
from hardpoint_plugin_api.requirements import HeadMultipleRequirement

if TYPE_CHECKING:
    from hardpoint_plugin_api import AttentionBackend


@dataclass(frozen=True)
class AdaptedOffer(Offer):
    """An offer whose target is wrapped: heads are padded to ``multiple``. ``inner`` is the plugin's own offer."""

    inner: Offer
    multiple: int

    __hash__ = Offer.__hash__

    def adapt(self, target: object) -> object:
        """Wrap the loaded target of ``inner``."""
        from hardpoint.adapters.padded_heads import pad_heads

        return pad_heads(cast("type[AttentionBackend]", target), self.multiple)


def adapted_offers(offers: Sequence[Offer], workload: Workload) -> list[AdaptedOffer]:
    """Return an adapter for each attention offer that needs another multiple of the head size than the workload has."""
    if not isinstance(workload, AttentionWorkload) or workload.head_size is None:
        return []
    adapted = []
    for offer in offers:
        contribution = offer.contribution
        need = next((r for r in contribution.requires if isinstance(r, HeadMultipleRequirement)), None)
        if need is None or workload.head_size % need.multiple == 0:
            continue
        suffix = f"+pad{need.multiple}"
        padded = replace(
            contribution,
            name=contribution.name + suffix,
            priority=contribution.priority - 1,
            preferred=tuple(replace(p, priority=p.priority - 1) for p in contribution.preferred),
            requires=tuple(r for r in contribution.requires if r is not need),
            layout=contribution.layout + suffix,
            replaces=None,
        )
        adapted.append(
            AdaptedOffer(
                contribution=padded,
                plugin=offer.plugin,
                api=offer.api,
                distribution=offer.distribution,
                version=offer.version,
                inner=offer,
                multiple=need.multiple,
            )
        )
    return adapted
