"""Facts about devices that are known without touching them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hardpoint_plugin_api.elements import BUILT_IN, unknown_element
from hardpoint_plugin_api.reasons import Reason


@dataclass(frozen=True)
class Fp8Format:
    """The platform's 8-bit float for data, and the largest magnitude that is rounded to.

    ``dtype`` names a built-in float8 element. ``max`` is that element's ``limit``: 448 for ``float8_e4m3fn``, 224 for
    ``float8_e4m3fnuz`` (240 exists and is not used). Core converts checkpoints in ``float8_e4m3fn`` to ``dtype`` where
    that is ``float8_e4m3fnuz``. Raises UnknownNameError for another dtype, and ValueError for another ``max``.
    """

    dtype: str
    max: float

    def __post_init__(self) -> None:
        formats = {name: element.limit for name, element in BUILT_IN.items() if name.startswith("float8")}
        if self.dtype not in formats:
            raise unknown_element(self.dtype, formats)
        if self.max != formats[self.dtype]:
            raise ValueError(f"{self.dtype} is rounded to at most {formats[self.dtype]:g}, got max {self.max:g}")


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
    and ``features``: names. ``driver``: the driver's version. ``isa``: the instruction sets that compiled kernels use
    (``avx2``), where the platform has kernels for several: others are other code, and need a certificate of their own.
    ``present``: False for a preset. ``absent_features``: features that this machine could have, each with the reason
    why it has not, and the fix.
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
    isa: str | None = None
    present: bool = True
    absent_features: tuple[tuple[str, Reason], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class MemorySnapshot:
    """Bytes on one device: free, total, and the peak in use since the last reset."""

    free: int
    total: int
    peak: int
