"""Stand-ins that let a platform over torch's device-generic API run on the host's tensors."""

from __future__ import annotations

from typing import Any


class HostModule:
    """One device of 1 GiB, as torch's device modules describe theirs; its memory is never full."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def set_device(self, device: int) -> None:
        """There is one."""

    def current_device(self) -> int:
        return 0

    def synchronize(self, device: int) -> None:
        """The host is never behind itself."""

    def get_device_name(self, device: int) -> str:
        return "host"

    def get_device_properties(self, device: int) -> Any:
        raise NotImplementedError

    def mem_get_info(self, device: int) -> tuple[int, int]:
        return 2**30, 2**30

    def memory_reserved(self, device: int) -> int:
        return 0

    def max_memory_allocated(self, device: int) -> int:
        return 0

    def reset_peak_memory_stats(self, device: int) -> None:
        """Nothing is counted."""

    def empty_cache(self) -> None:
        """Nothing is kept."""
