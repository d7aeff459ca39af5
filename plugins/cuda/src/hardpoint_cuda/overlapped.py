"""Core's kernels, launched while the one before still ends: programmatic dependent launch.

CUDA C++ programming guide, section "Programmatic Dependent Launch and Synchronization".

A kernel waits for all that came before, and lets the next one be launched only then: so that one's programs stand ready
when it ends, no more than two kernels share the device, and what the last but one wrote can be read before waiting.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hardpoint.kernels.launch import Overlap


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _begin() -> None:
    gdc_wait()
    gdc_launch_dependents()


OVERLAP = Overlap(_begin, {"launch_pdl": True})


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _prefetch(addresses) -> None:  # type: ignore[no-untyped-def]  # a block of pointers
    """PTX ISA, section "prefetch": into the second level of the cache, without a register that waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


PREFETCHING = replace(OVERLAP, prefetch=_prefetch)
"""Products bring the weight nearer while the kernel before still ends."""
