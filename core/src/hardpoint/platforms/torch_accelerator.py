"""A platform over torch's device-generic API: what every accelerator that torch drives has in common.

A plugin subclasses ``TorchAcceleratorPlatform``, adds ``name`` and ``detect``, and overrides what its devices do
otherwise. Torch is imported by ``activate``, never by importing this module: detection must stay free of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from hardpoint.platforms.torch_trace import torch_trace
from hardpoint_plugin_api import Memory, MemorySnapshot, Platform, PlatformError

if TYPE_CHECKING:
    import torch


class DeviceModule(Protocol):
    """The functions in use of the module that ``torch.get_device_module`` returns."""

    def is_available(self) -> bool: ...
    def device_count(self) -> int: ...
    def set_device(self, device: int) -> None: ...
    def current_device(self) -> int: ...
    def synchronize(self, device: int) -> None: ...
    def get_device_name(self, device: int) -> str: ...
    def get_device_properties(self, device: int) -> Any: ...
    def mem_get_info(self, device: int) -> tuple[int, int]: ...
    def memory_reserved(self, device: int) -> int: ...
    def max_memory_allocated(self, device: int) -> int: ...
    def reset_peak_memory_stats(self, device: int) -> None: ...
    def empty_cache(self) -> None: ...


class TorchMemory(Memory):
    """One device's memory, as its driver and torch's allocator count it.

    ``free`` and ``total`` are the driver's: other processes' use counts, and so does what torch's allocator has
    cached. ``peak`` is the most that this process's tensors have held since ``reset_peak``.
    """

    def __init__(self, module: DeviceModule, index: int) -> None:
        self.module, self.index = module, index

    def snapshot(self) -> MemorySnapshot:
        """Read the counters. Does not wait for the device."""
        free, total = self.free_and_total()
        return MemorySnapshot(free, total, self.module.max_memory_allocated(self.index))

    def free_and_total(self) -> tuple[int, int]:
        """Return the bytes free and in all. For subclasses whose driver cannot be asked this way."""
        return self.module.mem_get_info(self.index)

    def reset_peak(self) -> None:
        """Start a new peak at what is allocated now."""
        self.module.reset_peak_memory_stats(self.index)

    def trim(self) -> None:
        """Return what torch's allocator has cached to the driver."""
        self.module.empty_cache()


class TorchAcceleratorPlatform(Platform):
    """Device handling through torch for one type of accelerator; ``info.torch_type`` names the type.

    Device indices count the devices that ``info`` describes. A machine may have others of the same torch type:
    ``activate`` leaves out those for which ``is_described`` is False.
    """

    _memory: TorchMemory | None = None

    def device_module(self) -> DeviceModule:
        """Return torch's module for the device type. Raises PlatformError where this torch does not know the type."""
        import torch

        try:
            return cast("DeviceModule", torch.get_device_module(self.info.torch_type))
        except RuntimeError as error:
            raise PlatformError(
                f"PyTorch {torch.__version__} knows no device type {self.info.torch_type!r}, "
                f"which platform {self.name} needs"
            ) from error

    def is_described(self, module: DeviceModule, index: int) -> bool:
        """Say whether torch's device ``index`` is of the kind that ``info`` describes. Default: all are."""
        return True

    def new_memory(self, module: DeviceModule, index: int) -> TorchMemory:
        """Return the memory of torch's device ``index``."""
        return TorchMemory(module, index)

    def activate(self, index: int) -> torch.device:
        """Make the ``index``-th described device current and return it; this creates the device's context.

        Raises PlatformError where torch cannot use the devices that were detected, or there is no such index.
        """
        import torch

        module = self.device_module()
        if not module.is_available():
            raise PlatformError(
                f"platform {self.name} found {self.info.name}, but PyTorch {torch.__version__} cannot use it: "
                "its driver is too old for this PyTorch, or the device is not accessible to this process"
            )
        described = [i for i in range(module.device_count()) if self.is_described(module, i)]
        if not 0 <= index < min(len(described), self.info.count):
            names = ", ".join(module.get_device_name(i) for i in range(module.device_count()))
            raise PlatformError(
                f"platform {self.name} has no device {index}: detection found {self.info.count} x {self.info.name} "
                f"({self.info.arch}), of which PyTorch sees {len(described)} among: {names or 'no devices'}"
            )
        torch_index = described[index]
        module.set_device(torch_index)
        self._memory = self.new_memory(module, torch_index)
        return torch.device(self.info.torch_type, torch_index)

    @contextmanager
    def current(self) -> Iterator[None]:
        """See Platform."""
        module, index = self.memory.module, self.memory.index
        before = module.current_device()
        if before == index:
            yield
            return
        module.set_device(index)
        try:
            yield
        finally:
            module.set_device(before)

    @property
    def memory(self) -> TorchMemory:
        """The active device's memory. Raises PlatformError before ``activate``."""
        if self._memory is None:
            raise PlatformError(f"platform {self.name} has no active device yet: call activate(index) first")
        return self._memory

    def synchronize(self) -> None:
        """Wait for every stream of the active device."""
        self.memory.module.synchronize(self.memory.index)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a page-locked copy of ``tensor``, or ``tensor`` itself where the devices cannot use one."""
        return tensor.pin_memory() if "pinned_memory" in self.info.features else tensor

    def to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start a copy to page-locked memory, and an event behind it, which alone is waited for."""
        if "pinned_memory" not in self.info.features:
            return super().to_host(tensor)
        import torch

        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.Event(tensor.device)
        event.record()

        def wait() -> torch.Tensor:
            event.synchronize()
            return host

        return wait

    def range(self, name: str) -> AbstractContextManager[None]:
        """Mark a range that torch's profiler shows."""
        import torch

        return cast("AbstractContextManager[None]", torch.profiler.record_function(name))

    def profile(self, folder: Path) -> AbstractContextManager[None]:
        """Record by torch's profiler; see torch_trace."""
        return torch_trace(folder)
