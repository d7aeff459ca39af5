"""Kernels that begin before the one before has ended, on a device: the kit sees one that does not wait for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")
import triton

from hardpoint.conformance.families.linear import LinearTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.plugins import discover
from hardpoint_cuda.overlapped import OVERLAP, OverlappedGemv
from tests.conformance.trying import subject

pytestmark = pytest.mark.accelerator


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _no_wait() -> None:
    pass


class NotWaiting(OverlappedGemv):
    overlap = replace(OVERLAP, wait=_no_wait)


@pytest.mark.parametrize("kernel", [OverlappedGemv, NotWaiting])
def test_chains(kernel: type[OverlappedGemv]) -> None:
    site = Site.open(discover(), "cuda")
    claims = [{"spec": ["float32/float32", "bfloat16/bfloat16"]}]
    trials = LinearTrials().trials(
        subject(site, kernel, "linear", name="cuda_overlapped_gemv", requires=claims), Plan()
    )
    found = [check.run() for trial in trials for check in trial.checks if check.name == "chain"]
    assert any(not finding.unsupported for finding in found)
    faults = {fault.code for finding in found for fault in finding.faults}
    assert faults == ({"too-early"} if kernel is NotWaiting else set())
