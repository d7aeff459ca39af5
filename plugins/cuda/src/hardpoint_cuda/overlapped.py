"""Core's kernels, launched while the one before still ends: programmatic dependent launch.

CUDA C++ programming guide, section "Programmatic Dependent Launch and Synchronization".

A kernel waits for all that came before, and lets the next one be launched only then: so that one's programs stand ready
when it ends, no more than two kernels share the device, and what the last but one wrote can be read before waiting.
"""

from __future__ import annotations

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hardpoint.kernels.launch import Overlap


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _begin() -> None:
    gdc_wait()
    gdc_launch_dependents()


OVERLAP = Overlap(_begin, {"launch_pdl": True})
