"""Compiling the kernels of a start several at a time, where the platform can."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from hardpoint.context import Context
from hardpoint_plugin_api import Platform

logger = logging.getLogger(__name__)

T = TypeVar("T")


def compile_ahead(ctx: Context, platform: Platform, run: Callable[[], object]) -> int:
    """Compile what ``run`` would launch, and return how many kernels that were; see Platform.compile_ahead."""
    return _compiled(ctx, platform, run)[0]


def run_compiled(ctx: Context, platform: Platform, run: Callable[[], T]) -> T:
    """Return what ``run`` does when its kernels are compiled. It runs once where they were, otherwise twice."""
    number, results = _compiled(ctx, platform, run)
    return results[0] if results and not number else run()


def _compiled(ctx: Context, platform: Platform, run: Callable[[], T]) -> tuple[int, list[T]]:
    """How many kernels were compiled, and the result of ``run`` if it ran to its end.

    It does nothing where kernels of third parties take part: some time themselves when they are first called, and would
    time launches that are left out. Errors are ignored here: the real run meets them again.
    """
    results: list[T] = []

    def step() -> None:
        results.append(run())

    if ctx.kernel_calls.third_party:
        return 0, []
    began = time.perf_counter()
    try:
        number = platform.compile_ahead(step)
    except Exception as error:
        logger.info("kernels are compiled one by one: %s: %s", type(error).__name__, error)
        return 0, []
    if number:
        logger.info("%d kernels were compiled in %.1f s", number, time.perf_counter() - began)
    return number, results
