"""Launching a kernel: early, in stages that fit the device, and without asking every argument what it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_ALIGNMENT = 16
"""Bytes; Triton compiles for pointers that are multiples of them, and for others."""


@dataclass(frozen=True, eq=False)
class Overlap:
    """How a kernel is launched before those that it depends on have ended, on devices that can do so.

    ``begin`` is a function for kernels, which returns when all that came before has ended and can be read. It is the
    first thing that they call, or comes behind reads of what stood there when the step's first layer began, such as
    lengths, pages and weights: the kernel before this one may still run then, but none before that. ``options`` are a
    launch's. A kernel that is launched so has a last parameter BEGIN.
    """

    begin: Any
    options: Mapping[str, Any]


_MOST_ROWS = 128
"""Of activations. Kernels for more take long beside their launches; prompts were slower by 1 to 3 % on an H200."""

_overlaps: dict[str, Overlap] = {}
"""By the type of torch's device."""


def overlap_launches(device_type: str, overlap: Overlap | None) -> None:
    """From now on, launch this package's kernels so on devices of that type; None: each after the one before."""
    if overlap is None:
        _overlaps.pop(device_type, None)
    else:
        _overlaps[device_type] = overlap


def begun(x: torch.Tensor) -> dict[str, Any]:
    """The named arguments with which a kernel begins as it is to, for rows ``x`` on their device."""
    overlap = _overlap(x)
    return {"BEGIN": None} if overlap is None else {"BEGIN": overlap.begin, **overlap.options}


def _overlap(x: torch.Tensor) -> Overlap | None:
    return _overlaps.get(x.device.type) if x.shape[0] <= _MOST_ROWS else None


_fitting: dict[Hashable, int] = {}
"""Stages that took the place of those that did not fit a device."""


def in_stages_that_fit(kind: Hashable, num_stages: int, launch: Callable[[int], T]) -> T:
    """``launch(num_stages)``, or with fewer where a multiprocessor's shared memory does not hold as many.

    ``kind`` is all that decides how much a stage takes, the device included: what fits is remembered for it. Raises
    triton.OutOfResources where one stage is too much.
    """
    if _fitting:
        num_stages = _fitting.get(kind, num_stages)
    while True:
        try:
            return launch(num_stages)
        except Exception as error:  # before anything ran
            from triton import OutOfResources  # who launches no kernel of Triton's needs none of it

            if not isinstance(error, OutOfResources) or num_stages == 1:
                raise
            num_stages -= 1
            _fitting[kind] = num_stages


class Launcher:
    """Launches one kernel, and remembers what it was compiled to.

    At each launch Triton finds out from every argument which of a kernel's variants it needs: 10 microseconds for 7
    arguments, 50 for 42, in a prompt's every layer. The variant follows from dtypes, arguments that are None,
    constexprs, the values of specialised integers, the device, and the alignment of pointers. A caller knows in a few
    numbers. ``options`` are those of a tuning table.
    """

    def __init__(self, kernel: Any, num_stages: int = 1, options: Mapping[str, Any] | None = None) -> None:
        self._kernel, self._options = kernel, {"num_stages": num_stages, **(options or {})}
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, grid: tuple[int, int, int], num_warps: int, x: torch.Tensor, *args: Any) -> None:
        """Launch with all of the kernel's arguments but BEGIN, in order; what decides its variant must be in ``key``.

        None as a key goes Triton's own way.
        """
        place = None if key is None else (_overlap(x), key)
        compiled = None if place is None else self._compiled.get(place)
        if compiled is not None:
            compiled[grid](x, *args, None)  # it was compiled with what begins it
            return
        compiled = self._kernel[grid](x, *args, num_warps=num_warps, **self._options, **begun(x))
        # The interpreter returns nothing, and something else stands for a kernel that is still being compiled.
        if place is not None and compiled is not None and not getattr(compiled, "is_stand_in", False):
            self._compiled[place] = compiled


def are_short(*strides: int) -> bool:
    """Whether all of them fit in 32 bits. Triton compiles another variant for an argument that does not, so this
    belongs in a launcher's key where a kernel's strides are not specialised."""
    return max(strides) < 2**31


def aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether all of them begin at addresses that kernels are compiled for."""
    bits = 0
    for x in tensors:
        if x is not None:
            bits |= x.data_ptr()
    return bits % _ALIGNMENT == 0
