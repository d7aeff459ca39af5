"""AMD GPUs as a platform: found in KFD's topology, driven through torch's device-generic API."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hardpoint.platforms import host
from hardpoint.platforms.torch_accelerator import DeviceModule, TorchAcceleratorPlatform
from hardpoint.platforms.torch_build import TorchBuild, torch_build, torch_reason
from hardpoint_plugin_api import NO_DEVICE, ConfigError, ConfigValue, DeviceInfo, Fp8Format, GraphEngine, Reason
from hardpoint_rocm.kfd import Gpu, read_gpus

if TYPE_CHECKING:
    import torch

    from hardpoint.platforms.stream_graphs import CaptureStream

# The kernel driver's runtime filters first; HIP then chooses among what is left, by its own variable or CUDA's.
RUNTIME_VARIABLE = "ROCR_VISIBLE_DEVICES"
HIP_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

PLAIN, SHUFFLE = "plain", "shuffle"
"""Values of ``--rocm.kv-layout``."""

_FNUZ, _OCP = Fp8Format("float8_e4m3fnuz", 224.0), Fp8Format("float8_e4m3fn", 448.0)
_FP8 = {"gfx942": _FNUZ, **dict.fromkeys(("gfx950", "gfx1200", "gfx1201", "gfx1250"), _OCP)}
_MXFP = {"gfx950", "gfx1250"}
_CONTAINER_FIX = "check the GPUs with lspci and dmesg; in a container pass --device=/dev/kfd --device=/dev/dri"


def describe(root: Path, environ: Mapping[str, str], build: TorchBuild | None) -> DeviceInfo | Reason:
    """Describe the visible GPUs, or say why none can be used.

    GPUs of several kinds: the first visible one is described and those equal to it are counted. ``build`` is what
    torch was built for.
    """
    gpus = read_gpus(root)
    if not gpus:
        return _why_none(root)
    if not (root / "dev/kfd").exists():
        return Reason(NO_DEVICE, f"this process is given none of the host's {len(gpus)} GPU(s)", fix=_CONTAINER_FIX)
    if not os.access(root / "dev/kfd", os.R_OK | os.W_OK):
        fix = "add the user to the groups render and video"
        return Reason("no-access", f"{len(gpus)} GPU(s) are present, but /dev/kfd may not be opened", fix=fix)
    visible = _visible(environ, gpus)
    if isinstance(visible, Reason):
        return visible
    fix = "pip install --force-reinstall torch from PyTorch's index for ROCm (pytorch.org, Get Started)"
    reason = torch_reason(build, "hip", "ROCm support", fix)
    if reason:
        return reason
    alike = [gpu for gpu in visible if _kind(gpu) == _kind(visible[0])]
    info = describe_arch(alike[0].name, alike[0].arch)
    linked = all(other.node in gpu.peers for gpu in alike for other in alike if other is not gpu)
    return replace(
        info,
        count=len(alike),
        memory_bytes=alike[0].memory_bytes,
        features=info.features | ({"p2p"} if len(alike) > 1 and linked else set()),
        numa=host.numa_nodes(root, [host.pci_numa_node(gpu.pci, root) for gpu in alike]),
        driver=host.read_text(root / "sys/module/amdgpu/version") or None,
    )


def describe_arch(name: str, arch: str) -> DeviceInfo:
    """Describe what follows from an architecture alone. PyTorch calls these devices ``cuda``."""
    fp8 = _FP8.get(arch)
    features = {"pinned_memory", "wave64" if arch.startswith("gfx9") else "wave32"}
    features |= ({"fp8"} if fp8 else set()) | ({"mxfp"} if arch in _MXFP else set())
    return DeviceInfo(platform="rocm", name=name, torch_type="cuda", arch=arch, features=frozenset(features), fp8=fp8)


def _kind(gpu: Gpu) -> tuple[object, ...]:
    return gpu.name, gpu.arch, gpu.memory_bytes


def _why_none(root: Path) -> Reason:
    if not (root / "sys/class/kfd").exists():
        return Reason(NO_DEVICE, "no amdgpu driver is loaded", fix="install the amdgpu driver, if there is a GPU")
    return Reason(NO_DEVICE, "the amdgpu driver is loaded and shows this process no GPU", fix=_CONTAINER_FIX)


def _visible(environ: Mapping[str, str], gpus: list[Gpu]) -> list[Gpu] | Reason:
    """Return the GPUs that the visibility variables leave, applied in the order in which the runtime does."""
    visible = gpus
    for name in (RUNTIME_VARIABLE, next((v for v in HIP_VARIABLES if v in environ), HIP_VARIABLES[0])):
        before = visible
        visible = [before[i] for i in host.visible_indices(environ.get(name), [gpu.uuid for gpu in before])]
        if not visible:
            return host.hidden_reason(name, environ[name], before[0].name, len(before))
    return visible


class RocmPlatform(TorchAcceleratorPlatform):
    """AMD GPUs. Steps are captured as HIP graphs where ``--rocm.graphs`` asks for it."""

    name = "rocm"
    collectives = "nccl"
    _capture_stream: CaptureStream

    def __init__(self, info: DeviceInfo, config: Mapping[str, ConfigValue] | None = None) -> None:
        """Raises ConfigError for a cache layout that does not exist."""
        super().__init__(info, config)
        if (layout := self.config.get("kv_layout", PLAIN)) not in (PLAIN, SHUFFLE):
            raise ConfigError(f"--rocm.kv-layout {layout}: it is not one of {PLAIN}, {SHUFFLE}")

    @classmethod
    def detect(cls) -> DeviceInfo | Reason:
        """Read sysfs; no device is opened and torch is not imported."""
        return describe(host.ROOT, os.environ, torch_build())

    def activate(self, index: int) -> torch.device:
        """See Platform."""
        from hardpoint.platforms.stream_graphs import CaptureStream

        device = super().activate(index)
        self._capture_stream = CaptureStream(device, self.device_module())
        return device

    def graph_engine(self) -> GraphEngine:
        """HIP graphs of the sizes that the configuration lists, if it wants any. Raises ConfigError for such a list."""
        if not self.config.get("graphs", False):
            return super().graph_engine()
        from hardpoint.platforms.stream_graphs import sizes_of
        from hardpoint_rocm.graphs import HipGraphs

        return HipGraphs(self._capture_stream, *sizes_of(self.config, self.name))

    def is_described(self, module: DeviceModule, index: int) -> bool:
        """Compare architectures: sysfs and torch name the same GPU differently."""
        gcn_arch: str = module.get_device_properties(index).gcnArchName  # such as gfx942:sramecc+:xnack-
        return gcn_arch.split(":")[0] == self.info.arch
