"""The module ``torch.sim``: torch's device module for the simulated accelerator.

Importing this module registers the device type with torch, once and for the whole process.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from hardpoint_sim import _C
from hardpoint_sim._C import current_device, device_count, reset_peak

__all__ = ["current_device", "device_count", "set_device"]

NAME = "Simulated accelerator"


@dataclass(frozen=True)
class Properties:
    """The functions that torch's users call for a device."""

    name: str
    total_memory: int


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def set_device(device: int) -> None:
    _C.set_device(device)


def get_device_name(device: int) -> str:
    return NAME


def get_device_properties(device: int) -> Properties:
    return Properties(NAME, _C.memory_stats(device)["limit"])


def synchronize(device: int | None = None) -> None:
    _C.synchronize(current_device() if device is None else device)


def mem_get_info(device: int) -> tuple[int, int]:
    stats = _C.memory_stats(device)
    return stats["limit"] - min(stats["used"], stats["limit"]), stats["limit"]


def memory_allocated(device: int) -> int:
    return _C.memory_stats(device)["used"]


memory_reserved = memory_allocated


def max_memory_allocated(device: int) -> int:
    return _C.memory_stats(device)["peak"]


def reset_peak_memory_stats(device: int) -> None:
    reset_peak(device)


def current_stream(device: int | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(current_device() if device is None else device)


def set_sync_debug_mode(mode: str) -> None:
    """With "error", what makes the host wait raises RuntimeError, in this thread; with "default" nothing does."""
    _C.forbid_waits(mode == "error")


def empty_cache() -> None:
    """Nothing is cached."""


def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(seed: int) -> None:
    """The devices have no generators; torch.manual_seed asks for this function all the same."""


rename_privateuse1_backend("sim")
torch._register_device_module("sim", sys.modules[__name__])
