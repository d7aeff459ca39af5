"""Are the values right, whatever lay in memory before?"""

from __future__ import annotations

from hardpoint.conformance.memory import PoisonedAllocations
from hardpoint.conformance.probe import Probe
from hardpoint.conformance.trials import Finding
from hardpoint.ops.judge import judge_call


def values(probe: Probe, seed: int) -> Finding:
    """``values``: results are within the error model, inputs and the memory around them are left alone."""
    call = probe.call(seed)
    return Finding.of(judge_call(call))


def ghost(probe: Probe, seed: int) -> Finding:
    """``ghost``: a kernel that does nothing must fail, or the trial's own buffers would hold the answer."""
    call = probe.call(seed)
    comparison = judge_call(call, call.idle)
    if comparison.faults:
        return Finding()
    results = [e.own for e in (*call.expect().outputs, *call.expect().state) if e.own.numel()]
    if not results:
        return Finding.not_claimed("nothing-to-compare", "this case has no results")
    if not any(x.isfinite().any() for x in results):  # float16 overflows, and memory is full of NaN before the call
        return Finding.not_claimed("nothing-to-compare", "no result of this case is a number")
    return Finding.failed("ghost", "outputs", "a kernel that does nothing passes: this case proves nothing")


def uninitialised(probe: Probe, seed: int) -> Finding:
    """``uninitialised``: results stay right when memory from torch's allocator is full of NaN."""
    call = probe.call(seed)

    def poisoned() -> object:
        with PoisonedAllocations():  # type: ignore[no-untyped-call]  # torch's constructor is untyped
            return call.run()

    return Finding.of(judge_call(call, poisoned))
