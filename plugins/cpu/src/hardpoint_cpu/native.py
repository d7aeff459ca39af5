"""The door to the compiled kernels of ``_native`` (C++, in ``csrc/``): numbers of kernels by name and dtype, and calls.

Where a list is being recorded (``recorded_list.py``) a call goes into it in place of running; callers need not know.
Kernels take addresses: who calls checks shapes, and keeps tensors alive until the call is done or the list dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch

from hardpoint_cpu.compiled import REBUILD
from hardpoint_cpu.compiled import missing as missing
from hardpoint_plugin_api import PluginLoadError

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

if missing() is None:
    from hardpoint_cpu import _native
    from hardpoint_cpu._native import BLOCK_ROWS as BLOCK_ROWS
    from hardpoint_cpu._native import EXPERT_ROWS_BYTES as EXPERT_ROWS_BYTES
    from hardpoint_cpu._native import LEAST_LATENT_SPLIT as LEAST_LATENT_SPLIT
    from hardpoint_cpu._native import PANEL_ROWS as PANEL_ROWS
    from hardpoint_cpu._native import SPLITS_PER_THREAD as SPLITS_PER_THREAD


def level() -> str:
    """The level of instruction sets in use, such as ``avx512_bf16``."""
    return _native.level()


@cache
def kernel_number(name: str) -> int:
    """The number of a kernel. Raises PluginLoadError where none was compiled: the build is older than this code."""
    try:
        return _native.kernels().index(name)
    except ValueError:
        message = f"plugin cpu: its compiled kernels are of another version and have no {name!r}; compile them anew"
        raise PluginLoadError(f"{message}: {REBUILD}") from None


@cache
def number_for(name: str, dtype: torch.dtype) -> int:
    """The number of a kernel that there is for each floating-point dtype."""
    return kernel_number(f"{name}_{str(dtype).removeprefix('torch.')}")


def run(number: int, *arguments: int | float | None) -> None:
    """Call a kernel on torch's threads."""
    _native.run(torch.get_num_threads(), number, *arguments)


def new_list() -> CapsuleType:
    """An empty list."""
    return _native.new_list()


def record(tasks: CapsuleType | None) -> None:
    """From now on this thread's calls go into ``tasks``; None: they run."""
    _native.record(tasks)


def is_recording() -> bool:
    """Whether this thread's calls go into a list."""
    return _native.recording()


def length(tasks: CapsuleType) -> int:
    """The number of calls that a list holds."""
    return _native.length(tasks)


def relocate(tasks: CapsuleType, first: int, low: int, high: int, target: int) -> None:
    """From call ``first`` on, have arguments that point into [low, high) point as far into ``target``."""
    _native.relocate(tasks, first, low, high, target)


def replay(tasks: CapsuleType) -> None:
    """Run what a list holds on torch's threads. RuntimeError while this thread records."""
    _native.replay(torch.get_num_threads(), tasks)


def address(x: torch.Tensor | None) -> int:
    """Where a tensor's elements lie; 0 for None, the null pointer."""
    return 0 if x is None else x.data_ptr()


def rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., n] as rows: itself where its elements lie one by one within rows, else a copy.

    Its leading axes then count rows with one stride, ``x.stride(-2)``.
    """
    if x.ndim == 2 and (x.stride(1) == 1 or x.shape[1] == 1):
        return x
    return x.contiguous().view(-1, x.shape[-1])


Native = Callable[..., None]
