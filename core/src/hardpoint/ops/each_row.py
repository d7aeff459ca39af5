"""Batch invariance the plain way: give each row to the reference alone.

A function of one row always sees tensors of one shape, contiguous, at the start of an allocation, so a deterministic
kernel does the same to it whatever stood around the row. Given several rows, many of torch's kernels do not: on a CPU,
silu and gelu compute what is left behind the last full vector by another function, a sum is split between threads
where it has one row only, and a matmul of one row is another kernel than one of two.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


def each_row(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield copies of the rows of ``tensors`` along their common first axis, which is kept, with size 1.

    Where there are no rows, yields the empty tensors, so that shapes and dtypes of results come out of one call.
    """
    count = tensors[0].shape[0]
    if count == 0:
        yield tensors
    for i in range(count):
        yield tuple(x[i : i + 1].clone(memory_format=torch.contiguous_format) for x in tensors)
