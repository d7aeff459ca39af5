"""A context is made for the device that torch will use, by a driver that rejects calls out of order."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from hardpoint_cuda.driver import create_context, load_driver

_NOT_INITIALISED, _NO_DEVICE, _INVALID_DEVICE, _OUT_OF_MEMORY = 3, 100, 101, 2  # CUresult, of cuda.h


class StandIn:
    """A driver with devices of ``names``, in CUDA's order; those at ``full`` have no room for a context."""

    def __init__(self, *names: str, full: tuple[int, ...] = ()) -> None:
        self.names, self.full = names, full
        self.is_on, self.contexts = False, list[int]()

    def cuInit(self, flags: int) -> int:  # noqa: N802  # the driver's names
        assert flags == 0
        self.is_on = bool(self.names)
        return 0 if self.names else _NO_DEVICE

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.names)
        return 0 if self.is_on else _NOT_INITIALISED

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        if ordinal >= len(self.names):
            return _INVALID_DEVICE
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: ctypes.c_int) -> int:  # noqa: N802
        encoded = self.names[device.value].encode()
        assert length == len(name) > len(encoded)
        name.value = encoded
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:  # noqa: N802
        assert isinstance(context._obj, ctypes.c_void_p)
        if device.value in self.full:
            return _OUT_OF_MEMORY
        self.contexts.append(device.value)
        return 0


@pytest.mark.parametrize(("index", "ordinal"), [(0, 1), (1, 3)])
def test_the_context_is_that_of_a_described_device(index: int, ordinal: int) -> None:
    """NVML describes the H100s; CUDA counts other devices, too."""
    driver = StandIn("T4", "H100", "T4", "H100")
    assert create_context(driver, "H100", index)
    assert driver.contexts == [ordinal]


@pytest.mark.parametrize(
    ("driver", "index"),
    [(None, 0), (StandIn(), 0), (StandIn("H100"), 1), (StandIn("T4"), 0), (StandIn("H100", full=(0,)), 0)],
    ids=["no driver", "no device", "no such index", "no such name", "no memory"],
)
def test_what_the_driver_refuses_is_no_error(driver: StandIn | None, index: int) -> None:
    assert not create_context(driver, "H100", index)
    assert driver is None or not driver.contexts


def test_a_machine_without_a_driver_has_none() -> None:
    driver = load_driver()
    assert driver is None or callable(driver.cuInit)
