"""``hardpoint explain``: the whole table of choices, before any weight is loaded."""

from __future__ import annotations

from hardpoint.adapters.candidates import AdaptedOffer
from hardpoint.config import EngineConfig
from hardpoint.conformance.certificate import Certificates
from hardpoint.engine.absent_device import AbsentDeviceSelector
from hardpoint.engine.blueprint import Blueprint, draw
from hardpoint.plugin_host import Offer
from hardpoint.selection import SelectionTable


def explain(config: EngineConfig, device: str | None = None) -> SelectionTable:
    """Return who would serve what for ``config``, on this machine or on the device preset ``device``, and why.

    Pipeline stages have rows of their own. Loads no weights. Imports the platforms of plugins, to look for devices
    (with ``device``: that platform alone), candidates that come first, to ask their ``supports``, and the plugins of
    ``--plugins``. For absent hardware, a winner whose ``supports`` cannot be asked here is marked in its row.
    """
    stages = [draw(config, device, rank=rank) for rank in config.topology.first_ranks]
    return SelectionTable.of_stages([_table(blueprint) for blueprint in stages])


def _table(blueprint: Blueprint) -> SelectionTable:
    certificates = Certificates(blueprint.plugins, blueprint.config)

    def certified(offer: Offer) -> str:
        original = offer.inner if isinstance(offer, AdaptedOffer) else offer
        return str(certificates.standing(original, blueprint.choice.device))

    selector = blueprint.ctx.selector
    not_asked = selector.not_asked if isinstance(selector, AbsentDeviceSelector) else {}
    plans = [blueprint.choice.plan, *selector.plans]
    return SelectionTable(plans, certified, not_asked, blueprint.model.notes)
