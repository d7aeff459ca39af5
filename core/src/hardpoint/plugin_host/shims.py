"""Adapters for targets that were written for the last major version of the plugin API.

Within a major version the API only grows, so nothing has to be done. An incompatible change comes with a new major
version and with a shim here, so that plugins of the major before go on working; the next major drops it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hardpoint.plugin_host.record import Offer
from hardpoint_plugin_api import ApiVersion


@dataclass(frozen=True)
class Shim:
    """Turns a target of ``family``, written for an API before ``since``, into one that serves ``since``."""

    family: str
    since: ApiVersion
    adapt: Callable[[object], object]


SHIMS: tuple[Shim, ...] = ()
"""In the order of ``since``. Empty as long as there has been no second major version."""


def fitted(target: object, offer: Offer) -> object:
    """Return ``target``, taken through every shim that came after the API which its plugin was built for."""
    for shim in SHIMS:
        if shim.family == offer.contribution.family and offer.api < shim.since:
            target = shim.adapt(target)
    return target
