"""The simulated accelerator as a platform: limits unlike those of any other, so that core cannot rely on theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, cast, get_args

import hardpoint_sim
from hardpoint.platforms.torch_accelerator import DeviceModule, TorchAcceleratorPlatform, TorchMemory
from hardpoint_plugin_api import (
    ConfigError,
    ConfigValue,
    DeviceInfo,
    GraphEngine,
    MemoryTag,
    PlatformError,
    Reason,
    StepLimits,
)

if TYPE_CHECKING:
    import torch

MIB = 2**20
MAX_MEMORY_MIB = 8192
NUM_DEVICES = 2


class SimMemory(TorchMemory):
    """Counts by tag, and can give any tag's memory back while its tensors stay."""

    suspendable = frozenset(get_args(MemoryTag))

    @contextmanager
    def pool(self, tag: MemoryTag) -> Iterator[None]:
        """Allocate under ``tag``, in this thread."""
        from hardpoint_sim import _C

        before = _C.exchange_tag(tag)
        try:
            yield
        finally:
            _C.exchange_tag(before)

    def suspend(self, tags: Sequence[MemoryTag]) -> None:
        """Give the memory of ``tags`` back."""
        from hardpoint_sim import _C

        for tag in tags:
            _C.suspend(self.index, tag)

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        """Take it again. Raises PlatformError where it has been given to somebody else."""
        from hardpoint_sim import _C

        for tag in tags:
            try:
                _C.resume(self.index, tag)
            except RuntimeError as error:
                raise PlatformError(str(error)) from error


class SimPlatform(TorchAcceleratorPlatform):
    """Two devices of ``memory_mib`` each, which know float32 and bfloat16."""

    name = "sim"

    def __init__(self, info: DeviceInfo, config: Mapping[str, ConfigValue] | None = None) -> None:
        """Raises ConfigError for a size of memory that cannot be simulated."""
        super().__init__(info, config)
        self.memory_mib = int(self.config.get("memory_mib", 2048))
        if not 1 <= self.memory_mib <= MAX_MEMORY_MIB:
            raise ConfigError(f"sim.memory_mib must be 1 to {MAX_MEMORY_MIB}, got {self.memory_mib}")

    @classmethod
    def detect(cls) -> DeviceInfo | Reason:
        """Describe the devices, which are there wherever the extension was built."""
        # Not importlib.util.find_spec, which raises while another thread imports the module.
        if PathFinder.find_spec("hardpoint_sim._C", hardpoint_sim.__path__) is None:
            return Reason(
                "not-built",
                "the extension of hardpoint-simulated was not built",
                fix="pip install --no-build-isolation tests/simulated",
            )
        return DeviceInfo(
            platform="sim",
            name="Simulated accelerator",
            torch_type="sim",
            arch="sim1",
            count=NUM_DEVICES,
            memory_bytes=2048 * MIB,
            dtypes=frozenset(("float32", "bfloat16")),
            features=frozenset(("pinned_memory",)),
        )

    def device_module(self) -> DeviceModule:
        """Register the device type with torch, and return its module."""
        import hardpoint_sim.device

        return cast(DeviceModule, hardpoint_sim.device)  # torch calls some of it without an argument, too

    def new_memory(self, module: DeviceModule, index: int) -> SimMemory:
        """The memory of one device."""
        return SimMemory(module, index)

    def activate(self, index: int) -> torch.device:
        """As for every accelerator; the device's memory becomes as large as configured."""
        device = super().activate(index)
        from hardpoint_sim import _C

        _C.set_limit(device.index, self.memory_mib * MIB)
        return device

    def graph_engine(self) -> GraphEngine:
        """Steps as recorded lists."""
        from hardpoint_sim.graphs import RecordedLists

        return RecordedLists(self.memory.index)

    def step_limits(self) -> StepLimits:
        """Steps come in three sizes, and long prompts in multiples of four tokens."""
        return StepLimits(chunk_multiple=4, token_buckets=(8, 32, 256))
