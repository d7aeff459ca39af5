"""How often each function of AITER's stand-in was called."""

from __future__ import annotations

CALLS: dict[str, int] = {}


def count(name: str) -> None:
    """One call more."""
    CALLS[name] = CALLS.get(name, 0) + 1
