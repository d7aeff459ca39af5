"""The CPU as a platform: always there, never an accelerator, its memory shared with everything else on the host."""

from __future__ import annotations

import ctypes
import logging
import os
import platform as python_platform
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, cast

import hardpoint_cpu
from hardpoint.platforms import host
from hardpoint.platforms.torch_trace import torch_trace
from hardpoint_cpu.binding import bind, chosen_cpus, usable_cpus
from hardpoint_cpu.compiled import FEATURE, missing, slower_than_it_could_be
from hardpoint_plugin_api import (
    ConfigError,
    ConfigValue,
    DeviceInfo,
    GraphEngine,
    Memory,
    MemorySnapshot,
    Platform,
    PlatformError,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_KV_CACHE_BYTES = 4 * 2**30

_MAX_THREADS_PER_CPU = 4  # far beyond it, creating threads fails inside torch's runtime and takes the process down

_ARCHES = {"amd64": "x86_64", "arm64": "aarch64"}

# The name of an instruction set in Linux's /proc/cpuinfo -> the device feature.
_FEATURES = {
    **{flag: flag for flag in ("avx2", "avx_vnni", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni")},
    **{flag: flag for flag in ("amx_bf16", "amx_int8", "sve", "sve2", "i8mm")},
    "asimd": "neon",
}
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}

# AArch64 kernels give numbers instead of a model name: (implementer, part) -> name.
_ARM_CORES = {
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
    ("0x41", "0xd4f"): "Arm Neoverse-V2",
}


def describe(root: Path = host.ROOT, machine: str | None = None) -> DeviceInfo:
    """Describe the CPU of the host whose files stand below ``root``; ``machine`` as in ``platform.machine()``."""
    machine = (machine or python_platform.machine()).casefold()
    arch = _ARCHES.get(machine, machine)
    cpuinfo = host.read_fields(root / "proc/cpuinfo", ":")
    flags = set((cpuinfo.get("flags") or cpuinfo.get("Features") or "").split())
    features = {_FEATURES[flag] for flag in flags & _FEATURES.keys()}
    if flags & _BF16_FLAGS:
        features.add("bf16_native")
    # Not importlib.util.find_spec, which raises while another thread imports the module.
    if PathFinder.find_spec("hardpoint_cpu._native", hardpoint_cpu.__path__):
        features.add(FEATURE)
    part = (cpuinfo.get("CPU implementer", ""), cpuinfo.get("CPU part", ""))
    return DeviceInfo(
        platform="cpu",
        name=cpuinfo.get("model name") or _ARM_CORES.get(part) or f"{arch} CPU",
        torch_type="cpu",
        arch=arch,
        memory_bytes=host.memory(root).total,
        accelerator=False,
        features=frozenset(features),
        numa=host.numa_nodes(root),
    )


class CpuMemory(Memory):
    """Main memory: the host's, or the control group's where that is less. The peak is this process's resident size."""

    def __init__(self, root: Path = host.ROOT) -> None:
        self.root = root

    def snapshot(self) -> MemorySnapshot:
        """Read the counters."""
        memory = host.memory(self.root)
        high_water = host.read_fields(self.root / "proc/self/status", ":").get("VmHWM", "0 kB")
        return MemorySnapshot(memory.available, memory.total, int(high_water.split()[0]) * 1024)

    def reset_peak(self) -> None:
        """Start a new peak at the present size. Where the kernel cannot (some sandboxes), the old peak stays."""
        try:
            (self.root / "proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError as error:
            logger.warning("peak memory counts from the start of the process: %s", error)

    def trim(self) -> None:
        """Return what the C library keeps for later, where it is one that can (glibc)."""
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim is not None:
            malloc_trim(0)


class CpuPlatform(Platform):
    """One device, the whole CPU. ``config`` is the plugin's section: ``threads``, ``bind`` and ``isa``."""

    name = "cpu"

    def __init__(self, info: DeviceInfo, config: Mapping[str, ConfigValue] | None = None) -> None:
        """Raises ConfigError for settings that this machine, this process or this build cannot keep."""
        super().__init__(info, config)
        self.threads = int(self.config.get("threads", 0))
        most = _MAX_THREADS_PER_CPU * (os.cpu_count() or 1)
        if not 0 <= self.threads <= most:
            raise ConfigError(
                f"cpu.threads must be 0 (all cores) to {most} ({_MAX_THREADS_PER_CPU} for each CPU of this machine), "
                f"got {self.threads}"
            )
        self._cpus = chosen_cpus(str(self.config.get("bind", "")), usable_cpus())
        self._level = _level(str(self.config.get("isa", "auto")))
        if self._level is not None:
            self.info = replace(info, isa=self._level)
        self._memory = CpuMemory()

    @classmethod
    def detect(cls) -> DeviceInfo:
        """Describe this host's CPU; there always is one. Where kernels were compiled, ``isa`` names their level."""
        info = describe()
        if reason := missing():
            return replace(info, features=info.features - {FEATURE}, absent_features=((FEATURE, reason),))
        return replace(info, isa=_level("auto"))

    @property
    def memory(self) -> CpuMemory:
        """Main memory."""
        return self._memory

    def share_host(self, rank: int, ranks: int) -> None:
        """Take another NUMA node than the other ranks, or other cores of it, where ``bind`` is ``auto``."""
        self._cpus = chosen_cpus(str(self.config.get("bind", "")), usable_cpus(), rank=rank, ranks=ranks)

    def tuning_context(self) -> Mapping[str, str]:
        """The number of threads, and the kernels' level where they were compiled."""
        level = {} if self._level is None else {"isa": self._level}
        return {"threads": str(self._num_threads()), **level}

    def _num_threads(self) -> int:
        return self.threads or host.available_cores(cpus=self._cpus or None)

    def activate(self, index: int) -> torch.device:
        """Bind threads, set their number and the kernels' level, and return the device.

        All three hold for the whole process. Raises PlatformError for an index but 0.
        """
        import torch

        if index != 0:
            raise PlatformError(f"platform cpu has one device, cpu 0, and no device {index}")
        if self._cpus:
            bind(self._cpus)
        torch.set_num_threads(self._num_threads())
        where = f" on CPUs {', '.join(map(str, self._cpus))}" if self._cpus else ""
        if self._level is None:
            reason = missing()
            logger.warning(
                "%d threads%s of PyTorch's operators, which are slower: %s", torch.get_num_threads(), where, reason
            )
        else:
            from hardpoint_cpu import _native

            _native.set_level(self._level)
            team = Path(_native.team_library()).name or "no OpenMP runtime: compiled kernels run on one thread"
            logger.info("%d threads%s of %s; kernels: %s", torch.get_num_threads(), where, team, self._level)
            if slower := slower_than_it_could_be():
                logger.warning("%s", slower)
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Return at once: operators on the CPU are done when they return."""

    def graph_engine(self) -> GraphEngine:
        """Steps as recorded lists, where there are compiled kernels to list; else eager."""
        if missing():
            return super().graph_engine()
        from hardpoint_cpu.recorded_list import RecordedLists

        return RecordedLists()

    def kv_cache_budget(self) -> int:
        """Half of the free memory, at most 4 GiB: the rest of the host needs memory too."""
        return min(MAX_KV_CACHE_BYTES, self.memory.snapshot().free // 2)

    def range(self, name: str) -> AbstractContextManager[None]:
        """Mark a range that torch's profiler shows."""
        import torch

        return cast("AbstractContextManager[None]", torch.profiler.record_function(name))

    def profile(self, folder: Path) -> AbstractContextManager[None]:
        """Record by torch's profiler; see torch_trace."""
        return torch_trace(folder)


def _level(setting: str) -> str | None:
    """The level of instruction sets that ``cpu.isa`` means; None where nothing was compiled. Raises ConfigError."""
    if reason := missing():
        if setting != "auto":
            raise ConfigError(f"cpu.isa = {setting!r} needs compiled kernels, but {reason}")
        return None
    from hardpoint_cpu import _native

    levels = _native.levels()
    if setting not in ("auto", *levels):
        raise ConfigError(
            f"cpu.isa must be auto or a level that this CPU and build have ({', '.join(levels)}), got {setting!r}"
        )
    return levels[0] if setting == "auto" else setting
