"""Does the kernel read and write where strides and offsets say?"""

from __future__ import annotations

from hardpoint.conformance.memory import NotEnoughMemoryError, Placement
from hardpoint.conformance.probe import Probe
from hardpoint.conformance.trials import Finding
from hardpoint.ops.judge import judge_call


def offset(probe: Probe, seed: int) -> Finding:
    """``offset``: inputs begin one element behind an aligned address."""
    return _judged(probe, seed, Placement.OFFSET)


def apart(probe: Probe, seed: int) -> Finding:
    """``apart``: rows lie apart, as slices of a merged projection's output do, and NaN fills the gaps."""
    return _judged(probe, seed, Placement.APART)


def far(probe: Probe, seed: int) -> Finding:
    """``far``: rows lie so far apart that offsets in elements exceed 2**31, which overflows 32 bits."""
    labels = probe.far_inputs(probe.call(seed))
    if not labels:
        return Finding.not_claimed("no-rows", "no input of this case has rows that could lie far apart")
    worst = Finding()
    for label in labels:
        try:
            call = probe.call(seed, Placement.FAR, far=label)
        except NotEnoughMemoryError as error:
            return Finding(skipped=f"{label} past 2**31 elements: {error}")
        worst = Finding.of(judge_call(call, whole_storages=False))
        if worst.faults:
            break
    return worst


def _judged(probe: Probe, seed: int, placement: Placement) -> Finding:
    call = probe.call(seed, placement)
    return Finding.of(judge_call(call))
