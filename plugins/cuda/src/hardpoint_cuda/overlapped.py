"""Core's kernels, begun while the one before still ends: programmatic dependent launch.

CUDA C++ programming guide, section "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hardpoint.kernels.gemv import Overlap, TritonGemv


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _wait() -> None:
    gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _release() -> None:
    gdc_launch_dependents()


OVERLAP = Overlap(_wait, _release, {"launch_pdl": True})


class OverlappedGemv(TritonGemv):
    """Reads its first weights while what makes its activations still runs."""

    overlap = OVERLAP
    overlapped = True
