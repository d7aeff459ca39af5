"""CUDA's driver API: a device's context, created before torch is there.

Functions and codes: https://docs.nvidia.com/cuda/cuda-driver-api, sections Initialization, Device Management and
Primary Context Management.
"""

# ruff: noqa: N802  # the names are the driver's

from __future__ import annotations

import ctypes
from typing import Any, Protocol, cast

_SUCCESS = 0
_NAME_BYTES = 256


class Driver(Protocol):
    """Functions in use of ``libcuda.so.1``. Each returns a CUresult, and runs without Python's lock."""

    def cuInit(self, flags: int, /) -> int: ...
    def cuDeviceGetCount(self, count: Any, /) -> int: ...
    def cuDeviceGet(self, device: Any, ordinal: int, /) -> int: ...
    def cuDeviceGetName(self, name: Any, length: int, device: Any, /) -> int: ...
    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any, /) -> int: ...


def load_driver() -> Driver | None:
    """The driver's library, or None where there is none."""
    try:
        return cast("Driver", ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return None


def create_context(driver: Driver | None, name: str, index: int) -> bool:
    """Create the primary context of the ``index``-th visible device called ``name``, which torch uses later.

    The context stays until the process ends. Returns whether it is there: it is not where the driver refuses, or knows
    no such device. Torch tries again then, and reports the reason.
    """
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if driver is None or driver.cuInit(0) != _SUCCESS or driver.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS:
        return False
    for ordinal in range(count.value):
        if driver.cuDeviceGet(ctypes.byref(device), ordinal) != _SUCCESS or _name(driver, device) != name:
            continue
        if index == 0:
            return driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == _SUCCESS
        index -= 1
    return False


def _name(driver: Driver, device: ctypes.c_int) -> str:
    """A device's name, empty where the driver does not tell it."""
    name = ctypes.create_string_buffer(_NAME_BYTES)
    return name.value.decode() if driver.cuDeviceGetName(name, _NAME_BYTES, device) == _SUCCESS else ""
