"""A rank goes over to kernels that were built while it ran: prepared on every rank first, then done by all or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hardpoint.context import Context
from hardpoint.engine.control import Verb
from hardpoint.engine.execution.rank_verbs import on_rank
from hardpoint.selection import Plan
from hardpoint.selection.switches import Switch
from hardpoint_plugin_api import Workload

if TYPE_CHECKING:
    from hardpoint.engine.execution.worker import Worker


@dataclass(frozen=True)
class PrepareKernels(Verb[str | None]):
    """Construct the kernels that were built, beside those that serve. Returns why that cannot be, or None."""


@dataclass(frozen=True)
class SwitchKernels(Verb[None]):
    """Use what PrepareKernels constructed, or drop it where ``is_wanted`` is False."""

    is_wanted: bool


@dataclass(frozen=True)
class PreparedSwitch:
    """New plans, and the calls that put them into the layers."""

    plans: dict[Workload, Plan]
    switches: list[Switch]

    @classmethod
    def of(cls, ctx: Context) -> PreparedSwitch:
        """Select anew where kernels were being built, and construct what was chosen.

        Raises SwitchError where a layer cannot go over, and the errors of selection and construction.
        """
        plans = ctx.selector.decided_again(ctx.switches.workloads)
        with ctx.resources.extended():
            switches = ctx.switches.prepared(plans)
        return cls(plans, switches)


@on_rank.register(PrepareKernels)
def prepare_kernels(verb: PrepareKernels, worker: Worker) -> str | None:
    """See PrepareKernels."""
    ctx = worker.blueprint.ctx
    try:
        with torch.inference_mode(), worker.holdings.memory.pool("resources"):
            worker.prepared_switch = PreparedSwitch.of(ctx)
    except Exception as error:  # the kernels that serve go on serving, whatever it is
        return f"{type(error).__name__}: {error}"
    return None


@on_rank.register(SwitchKernels)
def switch_kernels(verb: SwitchKernels, worker: Worker) -> None:
    """Wait for the device first: steps in flight use the old kernels, and graphs of them."""
    prepared, worker.prepared_switch = worker.prepared_switch, None
    if prepared is None or not verb.is_wanted:
        return
    with torch.inference_mode():
        worker.blueprint.platform.synchronize()
        worker.graphs.drop()
        for switch in prepared.switches:
            switch()
    worker.graphs.narrow()
    worker.graphs.capture_later()
    worker.blueprint.ctx.selector.adopt(prepared.plans)
