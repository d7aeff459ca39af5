"""The host as a platform of its own."""

from __future__ import annotations

import platform
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint_plugin_api import (
    CapturedGraph,
    ConfigValue,
    DeviceInfo,
    EagerGraphEngine,
    Memory,
    MemorySnapshot,
    Platform,
    PlatformError,
    Reason,
    StepLimits,
)

if TYPE_CHECKING:
    import torch


class FrozenMemory(Memory):
    """Two gigabytes, always free."""

    def snapshot(self) -> MemorySnapshot:
        return MemorySnapshot(free=2**31, total=2**31, peak=0)

    def reset_peak(self) -> None:
        pass


class FrozenGraphs(EagerGraphEngine):
    """Counts what it prepares."""

    prepared = 0

    def prepare(self, key: Hashable, fn: Callable[..., Any], inputs: Mapping[str, object]) -> CapturedGraph:
        self.prepared += 1
        return super().prepare(key, fn, inputs)


class FrozenPlatform(Platform):
    """Every method of it, overridden."""

    name = "frozen_0_2"

    def __init__(self, info: DeviceInfo, config: Mapping[str, ConfigValue] | None = None) -> None:
        super().__init__(info, config)
        assert set(self.config) == {"count", "share", "loud", "label"}
        self._memory = FrozenMemory()

    @classmethod
    def detect(cls) -> DeviceInfo | Reason:
        return DeviceInfo(cls.name, "Frozen", "cpu", platform.machine(), memory_bytes=2**31, accelerator=False)

    @property
    def memory(self) -> FrozenMemory:
        return self._memory

    def activate(self, index: int) -> torch.device:
        import torch

        if index:
            raise PlatformError(f"no device {index}")
        return torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def graph_engine(self) -> FrozenGraphs:
        return FrozenGraphs()

    def step_limits(self) -> StepLimits:
        return StepLimits(max_tokens=512).intersect(StepLimits(chunk_multiple=1))

    def default_dtype(self, checkpoint_dtype: str) -> str:
        return super().default_dtype(checkpoint_dtype)

    def default_block_size(self) -> int:
        return 32

    def kv_cache_budget(self) -> int:
        return 2**26

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def range(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def profile(self, folder: Path) -> AbstractContextManager[None]:
        raise PlatformError("no profiler")
