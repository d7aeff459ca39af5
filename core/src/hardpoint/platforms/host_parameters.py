"""The numbers among a prepared step's inputs, which a run may rebind: what graph engines say of an update."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint_plugin_api import PlatformError


def rebinds(inputs: Mapping[str, object], update: Mapping[str, object]) -> bool:
    """Whether ``update`` gives any of the numbers among a step's ``inputs`` another value, or another type.

    Raises PlatformError for an update of what is not a number, or to what is none.
    """
    numbers = {name: value for name, value in inputs.items() if isinstance(value, int | float)}
    for name, value in update.items():
        if name not in numbers:
            kind = "a fixed buffer: write into it" if name in inputs else "no input"
            raise PlatformError(f"{name!r} is {kind}; host parameters are: {', '.join(numbers) or 'none'}")
        if not isinstance(value, int | float):
            raise PlatformError(f"host parameter {name!r} must be a number, got {value!r}")
    return any(type(value) is not type(numbers[name]) or value != numbers[name] for name, value in update.items())
