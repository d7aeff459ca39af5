"""Launching a kernel without asking every argument what it is."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

_ALIGNMENT = 16
"""Bytes; Triton compiles for pointers that are multiples of them, and for others."""


class Launcher:
    """Launches one kernel, and remembers what it was compiled to.

    At each launch Triton finds out from every argument which of a kernel's variants it needs: 10 microseconds for 7
    arguments, 50 for 42, in a prompt's every layer. What decides it are dtypes, what is None, constexprs, the values of
    integers that are specialised, the device, and whether pointers are aligned. A caller knows in a few numbers.
    """

    def __init__(self, kernel: Any, num_stages: int = 1) -> None:
        self._kernel, self._num_stages = kernel, num_stages
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, grid: tuple[int, int, int], num_warps: int, *args: Any) -> None:
        """Launch with all of the kernel's arguments, in order; whatever decides its variant must be in ``key``.

        None as a key goes Triton's own way.
        """
        compiled = None if key is None else self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*args)
            return
        compiled = self._kernel[grid](*args, num_warps=num_warps, num_stages=self._num_stages)
        if key is not None and compiled is not None:  # the interpreter returns nothing
            self._compiled[key] = compiled


def aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether all of them begin at addresses that kernels are compiled for."""
    bits = 0
    for x in tensors:
        if x is not None:
            bits |= x.data_ptr()
    return bits % _ALIGNMENT == 0
