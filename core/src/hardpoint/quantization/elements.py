"""The elements that plugins offer, core among them, by name."""

from __future__ import annotations

from hardpoint.plugin_host import Offer, PluginSet
from hardpoint.plugin_host.blame import misbehaved
from hardpoint_plugin_api import Element, TableElement
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
    "BNB_FP4",
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
    "NF4",
    "UINT2",
    "UINT4",
    "UINT5",
    "UINT8",
    "element",
    "known_elements",
]


NF4 = TableElement(
    "nf4",
    4,
    table=(
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
)
"""Quantiles of the normal distribution (Dettmers et al. 2023, arXiv:2305.14314, appendix E)."""

_FP4 = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
BNB_FP4 = TableElement("bnb_fp4", 4, table=(*_FP4, *(-value for value in _FP4)))
"""bitsandbytes' ``fp4``: up to 1, unlike e2m1. Specs carry these two; they are no contributions of core."""


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
