"""Tilings of experts' matmuls, compiled beside each other ahead of their measurement: each takes a core seconds."""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from hardpoint.conformance.site import Site
from hardpoint.dtypes import dtype_of
from hardpoint.kernels.experts_tiling import Tiling
from hardpoint.kernels.experts_tuning import RandomLayer, Steps
from hardpoint.platforms.host import available_cores
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import ExpertsWorkload, Platform

logger = logging.getLogger(__name__)

_MOST = 16
"""Processes: each takes half a gigabyte of a device for itself, and no more tilings are tried at a time."""


class CompilingProcesses:
    """Processes with the device and a small layer each, which leave what they compile in Triton's cache.

    The layer has as many experts as a token: no kernel of a tile is compiled for their number.
    """

    def __init__(self, platform: str, workload: ExpertsWorkload) -> None:
        self._platform, self._workload = platform, replace(workload, num_experts=workload.top_k)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> CompilingProcesses:
        self._pool = ProcessPoolExecutor(min(available_cores(), _MOST), multiprocessing.get_context("spawn"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def __call__(self, tokens: int, tilings: Sequence[Tiling]) -> None:
        """Compile ``tilings`` for steps of ``tokens``. A tiling that cannot be compiled raises nothing here; its
        measurement raises the error."""
        if self._pool is None or len(tilings) < 2:
            return
        try:
            list(self._pool.map(functools.partial(_compile, self._platform, self._workload, tokens), tilings))
        except BrokenProcessPool:
            logger.warning("a process that compiles tiles died: from now on each is compiled when it is measured")
            self._pool = None


def _compile(platform: str, workload: ExpertsWorkload, tokens: int, tiling: Tiling) -> None:
    with suppress(Exception):  # a device that this process cannot open among them
        device, layer = _layer(platform, workload)
        layer.runner(tiling, _steps(platform, workload, tokens))()
        device.synchronize()


@functools.cache
def _layer(platform: str, workload: ExpertsWorkload) -> tuple[Platform, RandomLayer]:
    site = Site.open(discover(), platform)
    return site.platform, RandomLayer(site.context(dtype_of(str(workload.dtype))), workload)


@functools.cache
def _steps(platform: str, workload: ExpertsWorkload, tokens: int) -> Steps:
    return _layer(platform, workload)[1].steps(tokens, 1)
