"""Switching kernels of a running engine: layers say how they would go over to another plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hardpoint.selection.plan import Plan
from hardpoint_plugin_api import EngineError, Workload

Switch = Callable[[], None]
"""Has a layer use the kernels of another plan from now on."""

PrepareSwitch = Callable[[Plan], Switch]
"""Builds the kernels of another plan for a layer that is in use; raises SwitchError where it cannot go over to them."""


class SwitchError(EngineError):
    """A layer cannot go over to another plan while the engine runs; the message says why."""


class KernelSwitches:
    """The layers of one engine whose plan passes over a kernel that is still being built."""

    def __init__(self) -> None:
        self._layers: list[tuple[Workload, PrepareSwitch]] = []

    def add(self, workload: Workload, prepare: PrepareSwitch) -> None:
        """Note a layer that was built by the plan for ``workload``."""
        self._layers.append((workload, prepare))

    @property
    def workloads(self) -> frozenset[Workload]:
        """The workloads of these layers. Kernels of other workloads, such as ops, serve from the next start on."""
        return frozenset(workload for workload, _ in self._layers)

    def prepared(self, plans: Mapping[Workload, Plan]) -> list[Switch]:
        """Functions that switch every layer to its plan among ``plans``; nothing has changed before they are called.

        Raises SwitchError.
        """
        return [prepare(plans[workload]) for workload, prepare in self._layers if workload in plans]
