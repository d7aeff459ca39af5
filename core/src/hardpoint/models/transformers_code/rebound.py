"""A module's code with some of its global names exchanged, for this module alone."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any


def globals_used(module: Any) -> Mapping[str, Any]:
    """The globals that the code of ``module.forward`` names; none where it was replaced, or is no plain function."""
    forward = type(module).forward
    if "forward" in vars(module) or not isinstance(forward, types.FunctionType) or forward.__closure__:
        return {}
    known = forward.__globals__
    return {name: known[name] for name in forward.__code__.co_names if name in known}


def rebind(module: Any, names: Mapping[str, Any]) -> None:
    """Have the code of ``module.forward`` find ``names`` in place of its globals; see ``globals_used``.

    Other models in this process keep theirs.
    """
    forward = type(module).forward
    copied = types.FunctionType(
        forward.__code__, {**forward.__globals__, **names}, forward.__name__, forward.__defaults__
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    module.forward = types.MethodType(copied, module)
