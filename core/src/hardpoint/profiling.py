"""Ranges and profiles of one engine.

While no profile is taken a range is one shared object that does nothing: marking costs an attribute and a comparison.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from torch import nn
from torch.utils.hooks import RemovableHandle

from hardpoint_plugin_api import ConfigError, EngineError, Platform

logger = logging.getLogger(__name__)

Range = AbstractContextManager[None]
NO_RANGE: Range = nullcontext()
"""A range that records nothing."""


class Profiler:
    """Takes profiles of an engine on ``platform``; with None (a context outside an engine) only marks nothing."""

    def __init__(self, platform: Platform | None = None) -> None:
        self._platform, self._profile, self._folder = platform, ExitStack(), Path()
        self._mark: Callable[[str], Range] | None = None
        self._layers_marked = False

    @property
    def is_on(self) -> bool:
        """True while a profile is taken."""
        return self._mark is not None

    @property
    def marks_layers(self) -> bool:
        """True while a profile is taken that wants to see every layer run."""
        return self.is_on and self._layers_marked

    def range(self, name: str) -> Range:
        """Return a context manager that records its body as the range ``name`` of the profile.

        It does nothing while no profile is taken.
        """
        return NO_RANGE if self._mark is None else self._mark(name)

    def start(self, folder: Path, model: nn.Module | None = None) -> None:
        """Start a profile that will be written into ``folder``, which is made; of every layer of ``model``, if given.

        Raises EngineError where one is being taken already, ConfigError for a folder that cannot be made, PlatformError
        where the platform has no profiler.
        """
        assert self._platform is not None, "only an engine's profiler can start"
        if self.is_on:
            raise EngineError(f"a profile is being taken already, into {self._folder}; stop it first")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the profile cannot be written to {folder}: {error.strerror}") from error
        with ExitStack() as stack:
            for handle in _mark_layers(model, self.range) if model else ():
                stack.callback(handle.remove)
            stack.enter_context(self._platform.profile(folder))
            self._profile, self._folder, self._mark = stack.pop_all(), folder, self._platform.range
            self._layers_marked = model is not None

    def stop(self) -> Path:
        """End the profile, write it, and return its folder. Raises EngineError where none is being taken."""
        if not self.is_on:
            raise EngineError("no profile is being taken; start one first")
        self._mark = None
        self._profile.close()
        logger.info("profile written to %s", self._folder)
        return self._folder

    def close(self) -> None:
        """End a profile that may still be running."""
        if self.is_on:
            self.stop()


def _mark_layers(model: nn.Module, mark: Callable[[str], Range]) -> list[RemovableHandle]:
    """Open a range before the forward of each module of ``model``, named by its path, and close it after."""
    handles = []
    for path, module in model.named_modules():
        if not path:  # the model itself, for which the engine opens a range
            continue
        opened: list[Range] = []

        def enter(*_: object, name: str = path, opened: list[Range] = opened) -> None:
            opened.append(mark(f"layer.{name}"))
            opened[-1].__enter__()

        def leave(*_: object, opened: list[Range] = opened) -> None:
            opened.pop().__exit__(None, None, None)

        handles += [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
        ]
    return handles
