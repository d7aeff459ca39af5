"""A benchmark's function as a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hardpoint.bench.registry import BenchResult
    from hardpoint.config import EngineConfig


def as_command(name: str, function: Callable[..., BenchResult], run: Callable[..., object]) -> click.Command:
    """``run`` as a command with its own options and those of the benchmark ``function``.

    Engines that it measures begin with all kernels built and all graphs captured, but for what the user sets.
    """
    run.__doc__ = function.__doc__
    options = [*getattr(run, "__click_params__", []), *getattr(function, "__click_params__", [])]
    run.__click_params__ = options  # type: ignore[attr-defined]  # click keeps a function's options there
    if "config" not in inspect.signature(function).parameters:
        return click.command(name)(run)
    from hardpoint.terminal.engine_options import EngineCommand  # imports the config, which few benchmarks have

    @wraps(run)
    def measured(config: EngineConfig, **options: object) -> object:
        return run(config=config.waiting_for_all(), **options)

    return click.command(name, cls=EngineCommand)(measured)
