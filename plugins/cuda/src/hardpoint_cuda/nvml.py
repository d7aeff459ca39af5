"""NVML, the driver's management library: its devices as plain data.

Asking NVML creates no CUDA context. The library is shut down again before ``read_devices`` returns, so that nothing
of it is alive when the process forks.
"""

# ruff: noqa: N802  # the names are NVML's

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol, cast

# nvml.h; pynvml's own names for the P2P index are damaged in some releases (a tuple in place of 0).
ERROR_DRIVER_NOT_LOADED = 9
ERROR_LIBRARY_NOT_FOUND = 12
ERROR_VERSION_MISMATCH = 18
P2P_CAPS_INDEX_READ = 0
P2P_STATUS_OK = 0


class Nvml(Protocol):
    """Functions in use of the module ``pynvml`` (distribution nvidia-ml-py). Each raises ``NVMLError``."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> Any: ...
    def nvmlDeviceGetName(self, handle: Any, /) -> str: ...
    def nvmlDeviceGetUUID(self, handle: Any, /) -> str: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, /) -> tuple[int, int]: ...
    def nvmlDeviceGetPciInfo(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, index: int, /) -> int: ...


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``peers`` are the indices of the GPUs whose memory it reads directly; ``pci`` as in sysfs."""

    name: str
    uuid: str
    capability: tuple[int, int]
    memory_bytes: int
    pci: str
    peers: frozenset[int]


def load() -> Nvml | None:
    """Return the module, or None where nvidia-ml-py is not installed. Loads no driver library yet."""
    try:
        return cast("Nvml", importlib.import_module("pynvml"))
    except ImportError:
        return None


def read_devices(nvml: Nvml) -> tuple[str, list[Gpu]]:
    """Return the driver's version and all its GPUs, in PCI order. Raises ``nvml.NVMLError``."""
    nvml.nvmlInit()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return nvml.nvmlSystemGetDriverVersion(), [_read(nvml, handle, handles) for handle in handles]
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Nvml, handle: Any, handles: list[Any]) -> Gpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        name=nvml.nvmlDeviceGetName(handle),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        capability=(major, minor),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        pci=str(nvml.nvmlDeviceGetPciInfo(handle).busId).casefold().removeprefix("0000"),  # NVML writes 8 digits
        peers=frozenset(i for i, other in enumerate(handles) if other is not handle and _reads(nvml, handle, other)),
    )


def _reads(nvml: Nvml, one: Any, other: Any) -> bool:
    try:
        return nvml.nvmlDeviceGetP2PStatus(one, other, P2P_CAPS_INDEX_READ) == P2P_STATUS_OK
    except nvml.NVMLError:  # not supported by this driver or in this virtual machine
        return False
