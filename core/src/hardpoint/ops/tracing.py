"""Calls of ops while a model's forward pass is traced for compilation: a compiler fuses what it sees."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from hardpoint_plugin_api import EngineError

P = ParamSpec("P")
R = TypeVar("R")


class CannotCompileError(EngineError):
    """A model's forward pass cannot be compiled; the message says why."""


class OpTracing:
    """One engine's switch: while it is on, bound ops run as their references, which are torch operators."""

    def __init__(self) -> None:
        self._is_on = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have ops run as their references inside. Raises CannotCompileError for an op that is not ``fusible``."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def wrap(self, name: str, function: Callable[P, R], reference: Callable[P, R], fusible: bool) -> Callable[P, R]:
        """``function``, an implementation of the op ``name`` that was bound."""

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not self._is_on:
                return function(*args, **kwargs)
            if not fusible:
                raise CannotCompileError(f"op {name} cannot be written as PyTorch operators for the compiler")
            return reference(*args, **kwargs)

        return call
