"""Instruments of the simulated devices, beyond the platform's interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import hardpoint_sim.device  # registers the device type
from hardpoint_sim import _C

assert hardpoint_sim.device


def host_waits() -> dict[str, int]:
    """How often the host waited for a device so far, by what for: see ``_C.host_waits``."""
    return _C.host_waits()


def num_operations() -> int:
    """Operators, copies and replays put on the devices so far."""
    return _C.num_operations()


def num_allocations(device: int = 0) -> int:
    """Allocations of ``device`` so far."""
    return _C.memory_stats(device)["num_allocations"]


def bytes_by_tag(device: int = 0) -> dict[str, int]:
    """Bytes allocated on ``device`` now, by tag; tags that hold nothing are left out."""
    return {tag: size for tag, size in _C.memory_stats(device)["by_tag"].items() if size}


@contextmanager
def waits_forbidden() -> Iterator[None]:
    """Within the block, whatever makes the host wait for a device raises RuntimeError instead, in this thread."""
    before = _C.forbid_waits(True)
    try:
        yield
    finally:
        _C.forbid_waits(before)
