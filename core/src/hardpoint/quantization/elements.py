"""The elements that plugins offer, core among them, by name."""

from __future__ import annotations

from hardpoint.plugin_host import Offer, PluginSet
from hardpoint.plugin_host.blame import misbehaved
from hardpoint_plugin_api import Element
from hardpoint_plugin_api.elements import (
    FLOAT4_E2M1,
    FLOAT8_E4M3FN,
    FLOAT8_E4M3FNUZ,
    FLOAT8_E5M2,
    FLOAT8_E5M2FNUZ,
    INT3,
    INT4,
    INT5,
    INT6,
    INT8,
    IQ4_NL,
    UINT2,
    UINT4,
    UINT5,
    UINT8,
    unknown_element,
)

__all__ = [
    "FLOAT4_E2M1",
    "FLOAT8_E4M3FN",
    "FLOAT8_E4M3FNUZ",
    "FLOAT8_E5M2",
    "FLOAT8_E5M2FNUZ",
    "INT3",
    "INT4",
    "INT5",
    "INT6",
    "INT8",
    "IQ4_NL",
    "UINT2",
    "UINT4",
    "UINT5",
    "UINT8",
    "element",
    "known_elements",
]


def known_elements(plugins: PluginSet) -> list[str]:
    """Return the names of the elements that usable plugins offer, sorted; imports nothing of theirs."""
    return plugins.names("element")


def element(name: str, plugins: PluginSet) -> Element:
    """Return the element of that name; imports the plugin that offers it.

    Raises UnknownNameError, with how one is added, where nobody offers it; PluginLoadError where its target cannot be
    imported, is no Element, or has another name.
    """
    offer = next((offer for offer in plugins.offers("element") if offer.contribution.name == name), None)
    if offer is None:
        raise unknown_element(name, known_elements(plugins))
    return checked(plugins.load(offer), offer)


def checked(target: object, offer: Offer) -> Element:
    """Return ``target`` where it is what ``offer`` says; raises PluginLoadError, which names plugin and target."""
    if not isinstance(target, Element):
        raise misbehaved(offer, f"is {target!r:.80}, and must be an instance of hardpoint_plugin_api.Element")
    if target.name != offer.contribution.name:
        raise misbehaved(offer, f"is the element {target.name!r}; the contribution has to have the element's name")
    return target
