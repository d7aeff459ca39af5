"""The checks that every kernel undergoes, whatever its family. Each has a name, which reports and certificates keep.

``values`` comes first and decides: the others ask what else could be wrong with a kernel whose values are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hardpoint.conformance.checks import census, layout, repetition, replay, values
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.probe import Chained, Probe
from hardpoint.conformance.trials import Check, Finding

KernelCheck = Callable[[Probe, int], Finding]
"""Takes a probe and a seed."""

ADVERSARIAL: dict[str, KernelCheck] = {
    "ghost": values.ghost,
    "uninitialised": values.uninitialised,
    "repeat": repetition.repeat,
    "fresh": repetition.fresh,
    "offset": layout.offset,
    "apart": layout.apart,
    "far": layout.far,
    "replay": replay.replay,
    "host-sync": replay.host_sync,
    "allocation": replay.allocation,
    "threads": census.threads,
    "streams": census.streams,
}
"""By name, in the order in which they are made."""


def kernel_checks(probe: Probe, seed: int, plan: Plan, trial: int, without: Sequence[str] = ()) -> list[Check]:
    """The checks to make on trial number ``trial``: its values, and as many adversarial ones as the level asks for."""
    checks = [Check("values", lambda: values.values(probe, seed), decisive=True)]
    for number, (name, check) in enumerate(ADVERSARIAL.items()):
        if name not in without and plan.includes(number, trial):
            checks.append(Check(name, lambda check=check: check(probe, seed)))  # type: ignore[misc]  # bound early
    if probe.subject.overlapped or (isinstance(probe, Chained) and probe.subject.site.platform.info.accelerator):
        checks.append(Check("chain", lambda: replay.chain(probe, seed)))
    return checks
