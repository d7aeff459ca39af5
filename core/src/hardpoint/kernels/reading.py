"""Reads of tensors that tiles do not fill."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_inside(ptrs, inside, WHOLE: tl.constexpr):
    """The elements inside the tensor, zeros elsewhere; with WHOLE all are inside."""
    if WHOLE:
        x = tl.load(ptrs)
    else:
        x = tl.load(ptrs, mask=inside, other=0.0)
    return x
