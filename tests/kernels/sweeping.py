"""Tools for sweeps of kernels on an accelerator: variants compiled side by side, and times without the host's."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import triton

from hardpoint.kernels.launch import overlap_launches
from tests.kernels.sample_kernels import read

WEIGHT_BYTES = 256 << 20
"""Of weights in turn: several times what caches hold."""

_WORDS = 8192
"""Elements that one program reads at a time."""


def launch_early() -> None:
    """Launch kernels in this process as the cuda platform does: before those that they depend on have ended."""
    from hardpoint_cuda.overlapped import OVERLAP

    overlap_launches("cuda", OVERLAP)


def compile_beside(build: Callable[[Any], object], variants: Sequence[Any]) -> list[bool]:
    """Whether ``build(variant)`` ran, each in a process beside others; what it compiled is in Triton's cache then."""
    if not variants:
        return []
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(variants), os.cpu_count() or 1), spawned) as pool:
        return list(pool.map(functools.partial(_runs, build), variants))


def _runs(build: Callable[[Any], object], variant: object) -> bool:
    try:
        build(variant)
        torch.cuda.synchronize()
    except Exception:  # a variant that asks for more memory than there is, say
        return False
    return True


def microseconds(call: Callable[[Any], object], weights: Sequence[Any]) -> float:
    """Of one call among those on other weights, recorded and replayed: the best of several times."""
    for _ in range(2):
        call(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for some in weights:
            call(some)
    times: list[float] = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(weights))
    return min(times)


def plain_read(weight: torch.Tensor) -> torch.Tensor:
    """Read all of ``weight`` (contiguous, a multiple of 4 bytes), and write next to nothing."""
    words = weight.view(torch.int32).view(-1)
    out = torch.empty(triton.cdiv(words.numel(), _WORDS), dtype=torch.int32, device=weight.device)
    read[out.numel(),](words, out, words.numel(), _WORDS, num_warps=8)
    return out
