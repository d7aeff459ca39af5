"""Random router weights for trials of experts and all-to-alls, of all magnitudes: a kernel may drop no small one."""

from __future__ import annotations

import math

import torch

_LEAST, _LARGEST = 2.0**-14, 2.0**4


def draw_router_weights(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Weights [T, K], float32: each between 0.1 and 1.1, times a power of two that the token's experts share.

    A result is judged at the magnitude of its own row, so that small weights count for as much as large ones.
    """
    low, high = math.log2(_LEAST), math.log2(_LARGEST)
    magnitudes = (torch.rand(shape[0], 1, generator=generator) * (high - low) + low).round().exp2()
    return (torch.rand(shape, generator=generator) + 0.1) * magnitudes
