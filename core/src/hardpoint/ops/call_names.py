"""Calls of ops under a name that stacks show: a crash says nothing else of a kernel that is no Python (--blame-ops)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from hardpoint.plugin_host.culprits import call_name
from hardpoint_plugin_api import OpWorkload

if TYPE_CHECKING:
    from hardpoint.plugin_host import Offer

P = ParamSpec("P")
R = TypeVar("R")


class CallNames:
    """Names calls. ``synchronize`` waits for the device, so that what fails there fails within the call."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize

    def name(self, offer: Offer, workload: OpWorkload, function: Callable[P, R]) -> Callable[P, R]:
        """``function``, an implementation that was bound, called by a function of a telling name."""
        synchronize = self._synchronize

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            result = function(*args, **kwargs)
            synchronize()
            return result

        contribution = offer.contribution
        name = call_name(f"op.{contribution.of}", contribution.name, offer.plugin, workload.key())
        call.__code__ = call.__code__.replace(co_name=name)
        return functools.wraps(function)(call)
