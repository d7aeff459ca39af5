"""NVIDIA GPUs as a platform: found through NVML, driven through torch's device-generic API."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.platforms import host
from hardpoint.platforms.torch_accelerator import DeviceModule, TorchAcceleratorPlatform
from hardpoint.platforms.torch_build import TorchBuild, torch_build, torch_reason
from hardpoint_cuda import nvml
from hardpoint_cuda.driver import create_context, load_driver
from hardpoint_cuda.nvml import Gpu, Nvml
from hardpoint_plugin_api import NO_DEVICE, DeviceInfo, Fp8Format, GraphEngine, Reason

if TYPE_CHECKING:
    import torch

    from hardpoint.platforms.operator_loading import OperatorLoading
    from hardpoint.platforms.stream_graphs import CaptureStream

_OVERLAPS = 90
"""The first architecture with programmatic dependent launch."""

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

# Also seen on a host without any driver.
_CODES_WITHOUT_DRIVER = {"nvml-binding-missing", "nvml-missing", "driver-not-loaded"}


def describe(
    root: Path, environ: Mapping[str, str], library: Nvml | None, build: TorchBuild | None
) -> DeviceInfo | Reason:
    """Describe the visible GPUs, or say why none can be used.

    GPUs of several kinds: the first visible one is described and those equal to it are counted. ``library`` is the
    module ``pynvml`` (None: not installed), ``build`` what torch was built for.
    """
    if library is None:
        return _unusable(
            root, "nvml-binding-missing", "the package nvidia-ml-py is not installed", "pip install nvidia-ml-py"
        )
    try:
        driver, gpus = nvml.read_devices(library)
    except Exception as error:  # NVML's own errors, and whatever a damaged library does to its binding
        return _explain(root, error)
    if not gpus:
        return Reason(
            NO_DEVICE,
            f"the NVIDIA driver {driver} is loaded and sees no GPU",
            fix="check the GPUs with lspci and dmesg",
        )
    visible = _visible(environ.get(VISIBLE_DEVICES), gpus)
    if isinstance(visible, Reason):
        return visible
    reason = torch_reason(
        build, "cuda", "CUDA support", "pip install --force-reinstall torch (a build for CUDA, not '+cpu')"
    )
    if reason:
        return reason
    alike = [gpu for gpu in visible if _kind(gpu) == _kind(visible[0])]
    info = describe_arch(visible[0].name, visible[0].capability)
    p2p = len(alike) > 1 and all(gpus.index(other) in gpu.peers for gpu in alike for other in alike if other is not gpu)
    return replace(
        info,
        count=len(alike),
        memory_bytes=alike[0].memory_bytes,
        features=info.features | ({"p2p"} if p2p else set()),
        numa=host.numa_nodes(root, [host.pci_numa_node(gpu.pci, root) for gpu in alike]),
        driver=driver,
    )


def describe_arch(name: str, capability: tuple[int, int]) -> DeviceInfo:
    """Describe what follows from a compute capability alone."""
    features = {"pinned_memory"}
    if capability >= (8, 9):
        features.add("fp8")
    if capability >= (10, 0):
        features.add("mxfp")
    return DeviceInfo(
        platform="cuda",
        name=name,
        torch_type="cuda",
        arch=f"sm_{capability[0]}{capability[1]}",
        dtypes=frozenset({"float32", "float16"} | ({"bfloat16"} if capability >= (8, 0) else set())),
        features=frozenset(features),
        fp8=Fp8Format("float8_e4m3fn", 448.0) if "fp8" in features else None,
    )


def _kind(gpu: Gpu) -> tuple[object, ...]:
    return gpu.name, gpu.capability, gpu.memory_bytes


def _visible(value: str | None, gpus: list[Gpu]) -> list[Gpu] | Reason:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves."""
    if value is not None and "MIG-" in value:
        message = f"{VISIBLE_DEVICES}={value!r} names MIG instances, which are not supported yet"
        return Reason("mig", message, fix=f"set {VISIBLE_DEVICES} to indices or UUIDs of whole GPUs")
    visible = [gpus[i] for i in host.visible_indices(value, [gpu.uuid for gpu in gpus])]
    return visible or host.hidden_reason(VISIBLE_DEVICES, value or "", gpus[0].name, len(gpus))


def _explain(root: Path, error: Exception) -> Reason:
    """Turn NVML's refusal into a reason."""
    code = getattr(error, "value", None)
    if code == nvml.ERROR_LIBRARY_NOT_FOUND:
        fix = "in a container: start it with the NVIDIA runtime and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return _unusable(root, "nvml-missing", "NVML (libnvidia-ml.so.1) cannot be found", fix)
    if code == nvml.ERROR_VERSION_MISMATCH:
        problem = "the NVIDIA driver's kernel module and its libraries are of different versions"
        return _unusable(root, "nvml-version-mismatch", problem, "reboot, or reload the kernel modules")
    if code == nvml.ERROR_DRIVER_NOT_LOADED:
        return _unusable(root, "driver-not-loaded", "the NVIDIA driver is not loaded", "modprobe nvidia; check dmesg")
    return _unusable(root, "nvml-error", f"NVML fails: {error}", "see what nvidia-smi says")


def _unusable(root: Path, code: str, problem: str, fix: str) -> Reason:
    """Return the reason, with the GPUs that the kernel knows; NO_DEVICE where this process was given none.

    ``/proc/driver/nvidia`` knows names, not architectures, and without an architecture nothing can be selected. A
    container sees it too, given a GPU or not; the device files it sees only if given one.
    """
    base = root / "proc/driver/nvidia/gpus"
    fields = [host.read_fields(base / gpu / "information", ":") for gpu in host.entries(base)]
    names = ", ".join(gpu.get("Model", "unknown GPU") for gpu in fields)
    if code in _CODES_WITHOUT_DRIVER and not (root / "dev/nvidiactl").exists():
        if names:
            return Reason(NO_DEVICE, f"this process is given none of the host's GPUs ({names}): {problem}", fix=fix)
        return Reason(NO_DEVICE, "no NVIDIA driver is loaded", fix="install the NVIDIA driver, if there is a GPU")
    return Reason(code, f"{len(fields)} GPU(s) are present ({names}), but {problem}" if names else problem, fix=fix)


class CudaPlatform(TorchAcceleratorPlatform):
    """NVIDIA GPUs. Decode steps are captured as CUDA graphs."""

    name = "cuda"
    collectives = "nccl"
    _capture_stream: CaptureStream
    _loading: OperatorLoading

    @classmethod
    def detect(cls) -> DeviceInfo | Reason:
        """Ask NVML; no CUDA context is created and torch is not imported."""
        return describe(host.ROOT, os.environ, nvml.load(), torch_build())

    @classmethod
    def begin(cls, info: DeviceInfo, index: int) -> None:
        """Create the device's context in a thread, and hash Triton's files in another."""
        from hardpoint.kernels.compiler_hash import hash_early

        hash_early()
        arguments = (load_driver(), info.name, index)
        threading.Thread(target=create_context, args=arguments, name="hardpoint-cuda-context", daemon=True).start()

    def is_described(self, module: DeviceModule, index: int) -> bool:
        """Compare names: NVML counts in PCI order, CUDA by default with the fastest first."""
        return module.get_device_name(index) == self.info.name

    def activate(self, index: int) -> torch.device:
        """See Platform. Core's kernels overlap from now on, where the device can and the configuration lets them."""
        from hardpoint.kernels.compiler_hash import hash_early
        from hardpoint.platforms.operator_loading import OperatorLoading
        from hardpoint.platforms.stream_graphs import CaptureStream

        hash_early()
        device = super().activate(index)
        self._loading = OperatorLoading(device)
        self._capture_stream = CaptureStream(device, self.device_module(), self._loading)
        try:
            from hardpoint_cuda.overlapped import OVERLAP
        except ImportError:  # no Triton, or one that none of these kernels is for
            return device
        from hardpoint.kernels.launch import overlap_launches

        overlaps = self.config.get("overlap_launches", True) and int(self.info.arch.removeprefix("sm_")) >= _OVERLAPS
        overlap_launches(device.type, OVERLAP if overlaps else None)
        return device

    def compile_ahead(self, run: Callable[[], None]) -> int:
        """Compile the Triton kernels that ``run`` would launch, in several processes.

        Returns their number; 0 without Triton. See Platform.compile_ahead.
        """
        try:
            from hardpoint.kernels.compile_ahead import compile_ahead
        except ImportError:  # no Triton, or one whose compiler takes one kernel at a time
            return 0
        import torch

        self._loading.wait()
        return compile_ahead(run, torch.device(self.info.torch_type, self.memory.index))

    def graph_engine(self) -> GraphEngine:
        """CUDA graphs of the sizes that the configuration lists. Raises ConfigError for such a list."""
        from hardpoint.platforms.stream_graphs import sizes_of
        from hardpoint_cuda.graphs import CudaGraphs

        return CudaGraphs(self._capture_stream, *sizes_of(self.config, self.name))

    @contextmanager
    def profile(self, folder: Path) -> Iterator[None]:
        """Record by torch's profiler, and let an attached Nsight profiler record (--capture-range=cudaProfilerApi)."""
        import torch

        nsight: Any = torch.cuda.profiler
        with super().profile(folder), nsight.profile():
            yield
