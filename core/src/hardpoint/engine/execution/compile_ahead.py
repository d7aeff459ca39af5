"""Compiling the kernels of a start several at a time, where the platform can."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hardpoint.context import Context
from hardpoint_plugin_api import Platform

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class AheadCompiler:
    """Compiles the kernels of what a rank's start runs before it runs it, see Platform.compile_ahead.

    It does nothing where kernels of third parties take part: some time themselves when they are first called, and would
    time launches that are left out. Errors are ignored here: the real run meets them again.

    ``num_steps`` counts whole steps that ran, ``num_compiled`` the kernels that were compiled so far.
    """

    ctx: Context
    platform: Platform
    num_steps: int = 0
    num_compiled: int = 0

    @property
    def has_met_all(self) -> bool:
        """Whether whole steps ran whose kernels were all there: an earlier start has compiled those of others, too.

        Where that is wrong, the kernels of other steps are compiled one by one, when they are first launched.
        """
        return self.num_steps > 0 and self.num_compiled == 0

    def compile(self, run: Callable[[], object]) -> int:
        """Compile what ``run`` would launch, and return how many kernels that were."""
        return self._compiled(run)[0]

    def run(self, run: Callable[[], T]) -> T:
        """Return what ``run`` does when its kernels are compiled. It runs once where they were, otherwise twice."""
        number, results = self._compiled(run)
        return results[0] if results and not number else run()

    def run_step(self, run: Callable[[], T]) -> T:
        """The same of a whole step."""
        self.num_steps += 1
        return self.run(run)

    def _compiled(self, run: Callable[[], T]) -> tuple[int, list[T]]:
        """How many kernels were compiled, and the result of ``run`` if it ran to its end."""
        results: list[T] = []

        def step() -> None:
            results.append(run())

        if self.ctx.kernel_calls.third_party:
            return 0, []
        began = time.perf_counter()
        try:
            number = self.platform.compile_ahead(step)
        except Exception as error:
            logger.info("kernels are compiled one by one: %s: %s", type(error).__name__, error)
            return 0, []
        if number:
            logger.info("%d kernels were compiled in %.1f s", number, time.perf_counter() - began)
        self.num_compiled += number
        return number, results
