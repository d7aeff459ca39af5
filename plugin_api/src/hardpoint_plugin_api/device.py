"""What is known of a device without touching it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hardpoint_plugin_api.reasons import Reason


@dataclass(frozen=True)
class Fp8Format:
    """The platform's 8-bit float for data, and its largest magnitude.

    ``dtype`` is a torch dtype's name. ``max`` is 448 for ``float8_e4m3fn`` and 240 for ``float8_e4m3fnuz``. Core rounds
    to the whole range of the dtype.
    """

    dtype: str
    max: float


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node: its CPUs, its memory in bytes, and the indices of the devices attached to it."""

    index: int
    cpus: tuple[int, ...]
    memory_bytes: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class DeviceInfo:
    """The devices of a platform, as detected or as a preset describes them. Plain data; creates no device context.

    ``platform``: the platform's name. ``torch_type``: the device type in ``torch.device`` strings. ``arch``: the
    architecture, as requirements match it (``sm_90``, ``gfx942``, ``x86_64``). ``memory_bytes``: per device. ``dtypes``
    and ``features``: names. ``present``: False for a preset. ``absent_features``: features that this machine could
    have, each with the reason why it has not, and the fix.
    """

    platform: str
    name: str
    torch_type: str
    arch: str
    count: int = 1
    memory_bytes: int = 0
    accelerator: bool = True
    dtypes: frozenset[str] = frozenset({"float32", "float16", "bfloat16"})
    features: frozenset[str] = frozenset()
    fp8: Fp8Format | None = None
    numa: tuple[NumaNode, ...] = field(default=(), compare=False)
    driver: str | None = None
    present: bool = True
    absent_features: tuple[tuple[str, Reason], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class MemorySnapshot:
    """Bytes on one device: free, total, and the peak in use since the last reset."""

    free: int
    total: int
    peak: int
