# ruff: noqa: N999 - an extension's module is called _C, as torch's own
from typing import Any, TypedDict

class MemoryStats(TypedDict):
    limit: int
    used: int
    peak: int
    num_allocations: int
    by_tag: dict[str, int]

class Recording:
    """A recorded list (in truth a capsule)."""

# Memory. Devices are given by index, sizes in bytes.
def memory_stats(device: int, /) -> MemoryStats: ...
def set_limit(device: int, nbytes: int, /) -> None: ...
def reset_peak(device: int, /) -> None: ...
def exchange_tag(tag: str, /) -> str:
    """Give what this thread allocates from now on ``tag``; returns the tag before."""

def suspend(device: int, tag: str, /) -> None:
    """Give the memory of ``tag`` back; using it before ``resume`` raises RuntimeError."""

def resume(device: int, tag: str, /) -> None:
    """Take it again, at its addresses, its content lost."""

# Devices.
def device_count() -> int: ...
def current_device() -> int: ...
def set_device(device: int, /) -> None: ...
def synchronize(device: int, /) -> None: ...

# What happened so far, in this process.
def num_operations() -> int:
    """Operators, copies and replays put on the devices."""

def host_waits() -> dict[str, int]:
    """How often the host waited for a device, by what for: an operator's name, a kind of copy, ``synchronize``..."""

def forbid_waits(forbidden: bool, /) -> bool:
    """While True, a wait in this thread raises RuntimeError; returns what was before."""

# Recorded lists.
def begin_recording(device: int, /) -> Recording: ...
def end_recording(recording: Recording, /) -> None:
    """Also undo what recording did to memory."""

def replay(recording: Recording, /) -> None: ...
def describe(recording: Recording, /) -> list[tuple[str, tuple[Any, ...]]]:
    """Each node's operator and arguments: numbers as they are, lists as tuples, tensors by dtype and shape."""

def rebind(recording: Recording, node: int, argument: int, value: float, /) -> None:
    """Replace a number among a node's arguments."""
